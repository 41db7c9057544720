"""A warm-up fits any engine, touches what it says and leaves nothing behind; on the paper engine,
and on a real one."""

import random
from pathlib import Path
from typing import Any

import pytest
from engine.harness import Driver, make_engine, paper_engine, paper_of

from pdserve.engine.engine import Engine
from pdserve.engine.scheduling.sequence import Request
from pdserve.engine.warm_up import warm_up
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.protocol.start_progress import StartProgress


class Warmed:
    """A paper engine after its warm-up. dense_rows: steps that attention of prompts was prepared
    for; requests: what ran.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.engine = paper_engine(folder, **config)
        self.executor = paper_of(self.engine)
        self.dense_rows: list[int] = []
        self.requests: list[Request] = []
        monkeypatch.setattr(self.executor, "warm_prefill", self.dense_rows.append)
        make_request = self.engine.make_request

        def spy(submit: Any) -> Request:
            self.requests.append(make_request(submit))
            return self.requests[-1]

        monkeypatch.setattr(self.engine, "make_request", spy)
        warm_up(self.engine, StartProgress().report)


def assert_nothing_is_left(engine: Engine) -> None:
    Driver(engine).assert_empty()
    blocks = engine.blocks
    scheduler = engine.scheduler
    assert blocks.free_space().num_cached == 0
    assert (scheduler.num_preemptions, scheduler.prefix_queries, scheduler.prefix_hits) == (0, 0, 0)
    assert not scheduler.admitted


@pytest.mark.sampled(3)
@pytest.mark.lengthy
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_kv_blocks", [2, 4, 64])
@pytest.mark.parametrize("max_num_seqs", [1, pytest.param(2, marks=pytest.mark.slow), 16])
def test_it_fits_any_engine_and_leaves_nothing(
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    max_num_seqs: int,
    num_kv_blocks: int,
    is_async: bool,
) -> None:
    for max_model_len in (1, 4, 5, 6, 17, 37, 38, 512):
        for budget in (16, 33, 34, 100):
            warmed = Warmed(
                tiny_llama,
                monkeypatch,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                num_kv_blocks=num_kv_blocks,
                max_num_batched_tokens=budget,
                async_scheduling=is_async,
            )
            engine = warmed.engine
            assert_nothing_is_left(engine)
            [dense_rows] = warmed.dense_rows
            assert 1 <= dense_rows <= min(budget, engine.max_request_tokens)
            assert all(r.max_tokens == r.sampling.max_tokens == 4 for r in warmed.requests), (
                "cut short by the lengths"
            )
            assert bool(warmed.requests) == (engine.max_request_tokens > 4)
            for plan in warmed.executor.plans:
                assert sum(plan.values()) <= budget and len(plan) <= max_num_seqs


def test_it_runs_a_full_step_and_every_feature(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed = Warmed(tiny_llama, monkeypatch, max_num_batched_tokens=100)
    plans = [list(plan.values()) for plan in warmed.executor.plans]
    assert warmed.dense_rows == [100] and max(map(sum, plans)) == 99
    assert [1] in plans and [1, 1] in plans, "no decode of one, or of two sequences"
    assert warmed.executor.num_copies > 0, "no block was copied for a fork"
    sampling = [request.sampling for request in warmed.requests]
    assert any(s.greedy for s in sampling) and any(not s.greedy and s.top_k > 0 for s in sampling)
    assert any(request.prompt_logprobs[1:] for request in warmed.requests)


@pytest.mark.parametrize("is_caching", [False, True])
def test_caching_is_what_it_was(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, is_caching: bool
) -> None:
    engine = Warmed(tiny_llama, monkeypatch, enable_prefix_caching=is_caching).engine
    driver = Driver(engine)
    driver.add([0] * 40, SamplingParams(max_tokens=2, seed=0))
    driver.run()
    assert engine.scheduler.prefix_hits == 0, "the warm-up's prompts are cached"
    assert engine.blocks.free_space().num_cached == (2 if is_caching else 0)


def test_the_next_requests_see_no_trace_of_it(tiny_llama: Path) -> None:
    """The real executor: same tokens as of an engine that was never warmed, penalties in the same
    slots included."""
    outputs = []
    for is_warm in (False, True):
        engine = make_engine(tiny_llama)
        if is_warm:
            warm_up(engine, StartProgress().report)
            assert_nothing_is_left(engine)
        driver = Driver(engine)
        rng = random.Random(1)
        for i in range(6):
            params = SamplingParams(
                seed=i,
                max_tokens=12,
                temperature=i % 2,
                repetition_penalty=1.3,
                presence_penalty=0.5,
                n=1 + i % 3,
            )
            driver.add([rng.randrange(256) for _ in range(rng.randint(1, 50))], params)
        driver.run()
        outputs.append(list(driver.tokens.values()))
    assert outputs[0] == outputs[1]
    assert sum(map(len, outputs[0])) == 12 * 12
