"""Who runs when, and with which blocks: the scheduler below an engine whose model is on paper (see
harness)."""

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine.harness import (
    Driver,
    alone,
    held_at_random,
    paper_engine,
    paper_of,
    prefix_digests,
    submit_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.engine import Engine
from pdserve.engine.scheduling import room
from pdserve.protocol.commands import Start
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams

BLOCK = 16


def greedy(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, seed=0, **more)


def prompt_of(length: int, seed: int | str = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(256) for _ in range(length)]


def plans(engine: Engine) -> list[list[int]]:
    """Tokens per sequence of every step so far, in scheduling order."""
    return [list(plan.values()) for plan in paper_of(engine).plans]


def test_long_prompts_are_computed_in_chunks_beside_decodes(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama, max_num_batched_tokens=20)
    driver = Driver(engine)
    driver.add(prompt_of(10), greedy(5))
    driver.step()
    driver.add(prompt_of(50), greedy(2))
    driver.run()
    assert plans(engine) == [[10], [1, 19], [1, 19], [1, 12], [1, 1]]


def test_a_prompt_is_cut_only_where_it_is_alone(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama, max_num_batched_tokens=32)
    driver = Driver(engine)
    for length in (20, 20, 11, 70, 5):
        driver.add(prompt_of(length, length), greedy(3), cache_salt=str(len(driver.tokens)))
    driver.run()
    assert plans(engine)[:4] == [[20], [1, 20, 11], [1, 1, 1, 29], [1, 1, 30]]
    assert plans(engine)[4] == [11, 5]


def test_a_long_prompt_has_a_step_for_itself(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last chunk, when short, has room for others again; so have decodes at any time."""
    monkeypatch.setattr(room, "LONG_PROMPT", 30)
    engine = paper_engine(tiny_llama, max_num_batched_tokens=64)
    driver = Driver(engine)
    for length in (10, 12, 30, 40, 5, 70, 8):
        driver.add(prompt_of(length, length), greedy(9), cache_salt=str(length))
    driver.run()
    assert plans(engine)[:5] == [
        [10, 12],
        [1, 1, 30],
        [1, 1, 1, 40],
        [1, 1, 1, 1, 5],
        [1, 1, 1, 1, 1, 59],
    ]
    assert plans(engine)[5] == [1, 1, 1, 1, 1, 11, 8]


def test_decodes_go_on_beside_a_prompt_that_stands_before_them(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama, max_num_batched_tokens=64)
    driver = Driver(engine)
    for i in range(3):
        driver.add(prompt_of(5, i), greedy(12), cache_salt=str(i))
    driver.step()
    driver.add(prompt_of(150), greedy(2), priority=-1)
    driver.run()
    assert [sorted(plan) for plan in plans(engine)[1:5]] == [
        [1, 1, 1, 61],
        [1, 1, 1, 61],
        [1, 1, 1, 28],
        [1] * 4,
    ]


def test_one_row_is_admitted_beside_a_long_prompt(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of a prompt handed over, or cached up to its last token."""
    monkeypatch.setattr(room, "LONG_PROMPT", 30)
    engine = paper_engine(tiny_llama, max_num_batched_tokens=64)
    driver = Driver(engine)
    driver.add(prompt_of(2 * BLOCK + 1), greedy(1))
    driver.run()
    driver.add(prompt_of(40, "other"), greedy(2))
    driver.add(prompt_of(2 * BLOCK + 1), greedy(2))
    driver.run()
    assert plans(engine)[1:3] == [[40, 1], [1, 1]]


def test_the_token_budget_is_never_exceeded_and_used_when_there_is_work(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama, max_num_batched_tokens=32)
    driver = Driver(engine)
    for i in range(12):
        driver.add(prompt_of(10 + 13 * i, i), greedy(6))
    driver.run()
    totals = [sum(plan) for plan in plans(engine)]
    assert max(totals) == 32 and totals.count(32) > 20


def test_running_decodes_go_before_new_prompts(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama, max_num_batched_tokens=16)
    driver = Driver(engine)
    for i in range(3):
        driver.add(prompt_of(4, i), greedy(20))
    driver.step()
    driver.add(prompt_of(100), greedy(2))
    driver.step()
    assert plans(engine)[-1] == [1, 1, 1, 13]


def test_priority_then_arrival(tiny_llama: Path) -> None:
    driver = Driver(paper_engine(tiny_llama, max_num_seqs=1))
    keys = [
        driver.add(prompt_of(5, i), greedy(1), priority=priority)
        for i, priority in enumerate([0, 5, -1, 0])
    ]
    order: list[RequestKey] = []
    while driver.engine.has_work:
        order += dict.fromkeys(key for key, _ in driver.step().events)
    assert order == [keys[2], keys[0], keys[3], keys[1]]


def test_max_num_seqs_counts_forks_to_come(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama, max_num_seqs=4, max_num_batched_tokens=16)
    driver = Driver(engine)
    for i in range(4):
        driver.add(prompt_of(20, i), greedy(6, n=3))
    driver.add(prompt_of(20, 9), greedy(6))
    most = 0
    while engine.has_work:
        driver.step()
        running = engine.scheduler.running
        assert sum(1 + len(seq.pending_forks) for seq in running) <= 4
        most = max(most, len(running))
    assert most == 4
    assert len(driver.reasons) == 13


def test_a_prompt_waits_until_all_of_it_fits(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama, num_kv_blocks=9, max_num_batched_tokens=16)  # 8 usable blocks
    driver = Driver(engine)
    driver.add(prompt_of(70), greedy(10))  # 5 blocks
    driver.step()
    driver.add(prompt_of(64, 1), greedy(2))  # 4 blocks: too many beside
    driver.add(prompt_of(5, 2), greedy(2))  # fits, but stands behind
    for _ in range(8):
        driver.step()
        assert len(engine.scheduler.running) == 1
    driver.run()
    assert engine.scheduler.num_preemptions == 0
    driver.assert_empty()


def test_the_last_in_order_is_preempted_and_computes_the_same_again(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama, num_kv_blocks=10)  # 9 usable blocks
    driver = Driver(engine)
    prompts = [prompt_of(30, i) for i in range(3)]
    keys = [driver.add(prompt, greedy(40)) for prompt in prompts]
    first_preempted = None
    while engine.has_work:
        driver.step()
        engine.check_integrity()
        if engine.scheduler.num_preemptions and first_preempted is None:
            first_preempted = [seq.request.key for seq in engine.scheduler.waiting]
    assert first_preempted == [keys[2]]
    for key, prompt in zip(keys, prompts, strict=True):
        assert driver.tokens[key, 0] == alone(engine, prompt, greedy(40))
    driver.assert_empty()


def test_a_low_priority_is_preempted_although_it_came_first(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama, num_kv_blocks=7)
    driver = Driver(engine)
    early = driver.add(prompt_of(30), greedy(30), priority=1)
    late = driver.add(prompt_of(30, 1), greedy(30))
    while not engine.scheduler.num_preemptions:
        driver.step()
    assert [seq.request.key for seq in engine.scheduler.running] == [late]
    driver.run()
    assert len(driver.tokens[early, 0]) == 30
    driver.assert_empty()


def test_who_is_preempted_leaves_the_plan_it_was_in_already(tiny_llama: Path) -> None:
    """Decodes are planned before the chunks of a prompt that stands before them."""
    engine = paper_engine(tiny_llama, num_kv_blocks=32, max_num_batched_tokens=20)
    driver = Driver(engine)
    early = driver.add(prompt_of(10), greedy(20, n=2), priority=1)
    driver.step()
    late = driver.add(prompt_of(90, 1), greedy(4))
    driver.step()
    taken = engine.blocks.allocate(engine.blocks.num_free)
    for _ in range(2):
        driver.step()
    assert engine.scheduler.num_preemptions
    engine.blocks.release(taken)
    driver.run()
    for choice in range(2):
        assert driver.tokens[early, choice] == alone(engine, prompt_of(10), greedy(20, n=2), choice)
    assert driver.tokens[late, 0] == alone(engine, prompt_of(90, 1), greedy(4))
    driver.assert_empty()


def test_copies_of_who_is_preempted_are_not_made(tiny_llama: Path) -> None:
    """The block to copy into is free at once, and may be a transfer's when the step runs."""
    engine = paper_engine(
        tiny_llama, num_kv_blocks=32, max_num_batched_tokens=40, enable_prefix_caching=False
    )
    driver = Driver(engine)
    early = driver.add(prompt_of(41), greedy(20, n=2), priority=1)
    driver.step()
    late = driver.add(prompt_of(90, 1), greedy(4))
    driver.step()  # the choices fork off
    taken = engine.blocks.allocate(engine.blocks.num_free - 1)
    driver.step()
    assert engine.scheduler.num_preemptions == 2 and not paper_of(engine).num_copies
    engine.blocks.release(taken)
    driver.run()
    for choice in range(2):
        assert driver.tokens[early, choice] == alone(engine, prompt_of(41), greedy(20, n=2), choice)
    assert driver.tokens[late, 0] == alone(engine, prompt_of(90, 1), greedy(4))
    driver.assert_empty()


def test_nobody_is_preempted_while_a_step_is_in_flight(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama)
    driver = Driver(engine)
    driver.add(prompt_of(16), greedy())
    driver.step()
    taken = engine.blocks.allocate(engine.blocks.num_free)
    plan = engine.scheduler.schedule(may_preempt=False)
    assert plan.blocked and not plan and not engine.scheduler.num_preemptions
    assert not engine.scheduler.schedule().blocked and engine.scheduler.num_preemptions == 1
    engine.blocks.release(taken)
    driver.run()
    driver.assert_empty()


def test_who_is_admitted_leaves_blocks_for_those_that_run(tiny_llama: Path) -> None:
    """Three blocks are free, which is what the second prompt needs; but the first will grow into
    one of them."""
    engine = paper_engine(tiny_llama, num_kv_blocks=6)
    driver = Driver(engine)
    first = driver.add(prompt_of(31), greedy())
    driver.step()
    second = driver.add(prompt_of(40, 1), greedy())
    driver.run()
    assert not engine.scheduler.num_preemptions
    for key, prompt in ((first, prompt_of(31)), (second, prompt_of(40, 1))):
        assert driver.tokens[key, 0] == alone(engine, prompt, greedy())
    driver.assert_empty()


def test_the_choices_of_a_request_stand_together(tiny_llama: Path) -> None:
    """A request's forks are not preempted before a request that came later."""
    engine = paper_engine(tiny_llama, num_kv_blocks=8)
    driver = Driver(engine)
    first = driver.add(prompt_of(30), greedy(30, n=3))
    second = driver.add(prompt_of(30, 1), greedy(30))
    while not engine.scheduler.num_preemptions:
        driver.step()
    assert {seq.request.key for seq in engine.scheduler.running} == {first}
    assert [seq.request.key for seq in engine.scheduler.waiting] == [second]
    driver.run()
    driver.assert_empty()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_forks_share_the_prompt_and_copy_what_they_write_into(
    tiny_llama: Path, length: int
) -> None:
    engine = paper_engine(tiny_llama)
    driver = Driver(engine)
    sampling = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=20)
    prompt = prompt_of(length)
    key = driver.add(prompt, sampling)
    driver.step()
    assert engine.blocks.num_owned == -(-length // BLOCK)
    driver.step()
    partial = length % BLOCK != 0
    assert paper_of(engine).num_copies == (3 if partial else 0)
    driver.run()
    for choice in range(4):
        assert driver.tokens[key, choice] == alone(engine, prompt, sampling, choice)
    assert len({tuple(driver.tokens[key, choice]) for choice in range(4)}) == 4
    driver.assert_empty()


@pytest.mark.parametrize("length", [1, 16, 40, 63])
def test_many_choices_in_a_pool_that_holds_hardly_one(tiny_llama: Path, length: int) -> None:
    engine = paper_engine(tiny_llama, num_kv_blocks=6)  # 80 tokens
    driver = Driver(engine)
    sampling = SamplingParams(temperature=1.0, seed=5, n=6, max_tokens=80 - length)
    prompt = prompt_of(length)
    key = driver.add(prompt, sampling)
    driver.run()
    for choice in range(6):
        assert driver.tokens[key, choice] == alone(engine, prompt, sampling, choice)
    driver.assert_empty()


@pytest.mark.parametrize("is_async", [False, True])
def test_blocks_are_called_written_when_the_device_has_written_them(
    tiny_llama: Path, is_async: bool
) -> None:
    """Prompts to be handed over, chunk by chunk, a cached prefix and an aborted one among them. The
    paper model's rows move when a step is collected, so a block that was announced a step early
    would not hold them yet.
    """
    engine = paper_engine(tiny_llama, max_num_batched_tokens=40, async_scheduling=is_async)
    driver = Driver(engine)
    prompts = {
        driver.add(prompt_of(n, n), greedy(1), phase="prefill"): prompt_of(n, n)
        for n in (100, 7, 130)
    }
    driver.add(prompt_of(20), greedy(30))
    again = prompt_of(100, 100)[:70] + prompt_of(30)
    seen: dict[RequestKey, list[int]] = {key: [] for key in prompts}
    gone: RequestKey | None = None
    for step in range(60):
        if step == 2:
            gone = driver.add(prompt_of(90, "gone"), greedy(1), phase="prefill")
            key = driver.add(again, greedy(1), phase="prefill")
            prompts[key] = again
            seen[key] = []
        if gone is not None and step == 5:
            engine.abort(gone)
        result = driver.step()
        for written in result.written:
            if written.key == gone:
                assert step < 5
                continue
            digests = prefix_digests(prompts[written.key])[: len(written.block_ids) * BLOCK]
            assert paper_of(engine).rows[list(written.block_ids)].reshape(-1).tolist() == digests
            seen[written.key].append(len(written.block_ids))
        for held in result.held:
            engine.release_held(held.key)
    assert all(counts == sorted(counts) for counts in seen.values())
    assert {key: counts[-1] for key, counts in seen.items()} == {
        key: len(p) // BLOCK for key, p in prompts.items()
    }
    assert len(seen[next(iter(seen))]) >= 3, "in parts"
    driver.assert_empty()


def test_a_cached_prefix_is_not_computed_again(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama)
    driver = Driver(engine)
    shared = prompt_of(48)
    driver.add([*shared, 1, 2, 3], greedy(4))
    driver.run()
    key = driver.add([*shared, 4, 5], greedy(4))
    driver.step()
    assert plans(engine)[-1] == [2]
    assert driver.scored[key][0].cached_tokens == 48
    whole = driver.add(shared, greedy(4))  # its last token is computed: its logits are wanted
    driver.step()
    assert plans(engine)[-1] == [1, 16] and driver.scored[whole][0].cached_tokens == 32
    other = driver.add(shared, greedy(4), cache_salt="tenant")
    driver.run()
    assert driver.scored[other][0].cached_tokens == 0
    assert (engine.scheduler.prefix_queries, engine.scheduler.prefix_hits) == (
        51 + 50 + 48 + 48,
        80,
    )


def test_the_queue_is_told_without_what_is_cached(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = paper_engine(tiny_llama, max_num_seqs=1, max_num_batched_tokens=32)
    driver = Driver(engine)
    scheduler = engine.scheduler
    shared = prompt_of(48)
    driver.add([*shared, 1, 2, 3], greedy(4))
    assert scheduler.queued_work(0.0) == 51
    assert scheduler.queued_work(0.01) == 51 + 0.01 * 51 * 51 / 2, "attention counts"
    driver.step()
    assert scheduler.queued_work(0.0) == 19, "the rest of a prompt that is half computed"
    assert scheduler.queued_work(0.01) == 19 + 0.01 * 19 * (32 + 19 / 2), "it attends to all rows"
    driver.run()
    assert scheduler.queued_work(0.0) == 0
    monkeypatch.setattr("pdserve.engine.scheduling.scheduler.QUEUE_LOOK_UPS", 2)
    for last in (4, 5):
        driver.add([*shared, last, last], greedy(4))
    assert scheduler.queued_work(0.0) == 2 + 2
    assert scheduler.queued_work(0.01) == pytest.approx(2 * (2 + 0.01 * 2 * (48 + 1)))
    driver.add(prompt_of(100, "other"), greedy(4))
    assert scheduler.queued_work(0.0) == 200 * 4 / 100, "the first two speak for all"
    driver.run()
    driver.assert_empty()


def preempt_half_way(driver: Driver) -> None:
    """The prompt that is next loses its blocks behind its first chunk, to somebody outside."""
    engine = driver.engine
    driver.step()
    taken = engine.blocks.allocate(engine.blocks.num_free)
    while not engine.scheduler.num_preemptions:
        assert driver.step().num_rows
    engine.blocks.release(taken)


def test_cached_tokens_are_those_found_at_first_not_what_a_preempted_request_left(
    tiny_llama: Path,
) -> None:
    engine = paper_engine(tiny_llama, num_kv_blocks=12, max_num_batched_tokens=32)
    driver = Driver(engine)
    driver.add(prompt_of(30), greedy(60))
    driver.step()
    key = driver.add(prompt_of(85, 1), greedy(4))
    preempt_half_way(driver)
    driver.run()
    assert driver.scored[key][0].cached_tokens == 0


def test_without_prefix_caching_everything_is_computed(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama, enable_prefix_caching=False)
    driver = Driver(engine)
    for _ in range(2):
        driver.add(prompt_of(40), greedy(1))
        driver.run()
    assert plans(engine) == [[40], [40]]


def imported(
    driver: Driver,
    prompt: list[int],
    sampling: SamplingParams,
    starts: tuple[Start, ...],
    home: int | None = None,
) -> RequestKey:
    """Join a request whose prompt somebody else computed, as the decode phase does. home: to be
    taken; None: the best one."""
    engine = driver.engine
    submit = submit_of(prompt, sampling, starts=starts, phase="decode")
    reservation = engine.reserve(
        engine.make_request(submit), starts, may_use=lambda each: home in (None, each.number)
    )
    assert reservation is not None
    paper_of(engine).fill(reservation.destination, prompt, reservation.num_cached, reservation.home)
    engine.join(reservation)
    for start in starts:
        driver.tokens[submit.key, start.choice] += start.forced
    return submit.key


def test_imported_prompts_that_fill_the_pool_do_not_wait_for_each_other(tiny_llama: Path) -> None:
    """Nobody runs, every block belongs to somebody who needs one more: the last one gives its
    blocks back."""
    engine = paper_engine(tiny_llama, num_kv_blocks=7)
    driver = Driver(engine)
    # 2 full blocks each; the next token needs a third
    prompts = [prompt_of(32, i) for i in range(3)]
    keys = [imported(driver, prompt, greedy(20), (Start(0, (7,)),)) for prompt in prompts]
    assert engine.blocks.num_free == 0
    driver.run()
    for key, prompt in zip(keys, prompts, strict=True):
        assert driver.tokens[key, 0] == [7, *alone(engine, [*prompt, 7], greedy(19))]
    driver.assert_empty()


def test_imported_choices_in_a_full_pool(tiny_llama: Path) -> None:
    """Siblings that share their last block, with no block free for a copy."""
    engine = paper_engine(tiny_llama, num_kv_blocks=4)
    driver = Driver(engine)
    prompt = prompt_of(40)
    starts = tuple(Start(choice, (choice,)) for choice in range(3))
    key = imported(driver, prompt, greedy(8, n=3), starts)
    assert engine.blocks.num_free == 0
    driver.run()
    for choice in range(3):
        assert driver.tokens[key, choice] == [choice, *alone(engine, [*prompt, choice], greedy(7))]
    driver.assert_empty()


def test_blocks_pinned_elsewhere_mean_waiting_not_failing(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama, num_kv_blocks=5)
    driver = Driver(engine)
    driver.add(prompt_of(50), greedy(4), phase="prefill")
    driver.run()
    [held] = driver.held
    key = driver.add(prompt_of(30, 1), greedy(4))
    for _ in range(3):
        assert not driver.step().num_rows
    engine.release_held(held.key)
    driver.run()
    assert driver.tokens[key, 0] == alone(engine, prompt_of(30, 1), greedy(4))
    driver.assert_empty()


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "shared": st.sampled_from([0, 0, 5, 16, 33]),
            "own": st.integers(1, 40),
            "max_tokens": st.integers(2, 30),
            "n": st.sampled_from([1, 1, 2, 5]),
            "forced": st.sampled_from([0, 0, 1, 14, 17]),
            "priority": st.integers(-1, 1),
            "prompt_logprobs": st.sampled_from([None, None, 0]),
            "at_step": st.integers(0, 12),
            "how": st.sampled_from(["full", "full", "prefill", "import"]),
            "abort_after": st.none() | st.integers(0, 20),
            "abort_choices": st.sampled_from([None, (0,), (1, 2)]),
        }
    ),
    min_size=1,
    max_size=9,
)


class Workload:
    """Random requests that come, are handed over, cancelled and finished in a tiny KV cache."""

    def __init__(self, engine: Engine, requests: list[dict]) -> None:
        self.engine = engine
        self.driver = Driver(engine)
        self.requests = requests
        self.plans: dict[RequestKey, tuple[dict, list[int], SamplingParams]] = {}
        self.aborted: set[tuple[RequestKey, int]] = set()
        self.held_until: dict[RequestKey, int] = {}

    def run(self) -> None:
        for step in range(3000):
            self._arrivals(step)
            self._aborts(step)
            self.driver.step()
            for held in self.driver.held:
                self.held_until.setdefault(held.key, step + 5)
            for key, until in self.held_until.items():
                if until == step:
                    self.engine.release_held(key)
            self.engine.check_integrity()
            if not self.engine.has_work and step > max([40, *self.held_until.values()]):
                return
        raise AssertionError("the workload never ended")

    def _arrivals(self, step: int) -> None:
        for index, request in enumerate(self.requests):
            if request["at_step"] == step:
                self._start(index, request)

    def _start(self, index: int, r: dict) -> None:
        prompt = prompt_of(64)[: r["shared"]] + prompt_of(r["own"], index)
        forced = min(r["forced"], r["max_tokens"] - 1)
        sampling = SamplingParams(
            n=r["n"],
            max_tokens=r["max_tokens"],
            seed=index,
            stop_token_ids=[1, 2, 3],
            prompt_logprobs=r["prompt_logprobs"],
        )
        make = tuple(Start(c, tuple(prompt_of(forced, f"{index}/{c}"))) for c in range(r["n"]))
        if r["how"] == "import" and forced and self.engine.layout.num_blocks_for(len(prompt)) <= 3:
            if max(home.blocks.num_free for home in self.engine.homes) < 4:
                return
            key = imported(self.driver, prompt, sampling, make)
        elif r["how"] == "prefill":
            key = self.driver.add(prompt, sampling, phase="prefill")
        else:
            key = self.driver.add(prompt, sampling, starts=make, priority=r["priority"])
        self.plans[key] = r, prompt, sampling

    def _aborts(self, step: int) -> None:
        for key, (r, _, _) in self.plans.items():
            if r["abort_after"] is not None and r["at_step"] + r["abort_after"] == step:
                gone = range(r["n"]) if r["abort_choices"] is None else r["abort_choices"]
                self.aborted |= {(key, c) for c in gone if (key, c) not in self.driver.reasons}
                self.engine.abort(key, r["abort_choices"])

    def check(self) -> None:
        """Every choice generated what it generates alone; a cancelled one the beginning of it."""
        for key, (r, prompt, sampling) in self.plans.items():
            scored = [entry for event in self.driver.scored[key] for entry in event.logprobs or ()]
            if scored:  # each prompt token once, whatever was computed twice
                assert [entry and entry.token_id for entry in scored] == [None, *prompt[1:]]
            for choice in range(r["n"]):
                got = self.driver.tokens[key, choice]
                started = [] if r["how"] == "prefill" else self._forced(key, choice, r)
                want = alone(self.engine, prompt, sampling, choice, started)
                if r["how"] == "prefill":
                    want = want[:1]
                if (key, choice) in self.aborted:
                    assert got == want[: len(got)]
                else:
                    assert got == want
        self.driver.assert_empty()

    def _forced(self, key: RequestKey, choice: int, r: dict) -> list[int]:
        return self.driver.tokens[key, choice][: min(r["forced"], r["max_tokens"] - 1)]


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "mode",
    [
        {"async_scheduling": False},
        {"async_scheduling": True},
        {"async_scheduling": True, "is_held": True},
        {"pipeline_parallel": 3},
        {"async_scheduling": True, "num_homes": 2},
    ],
    ids=["sync", "async", "held", "stages", "homes"],
)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(requests=REQUESTS, num_blocks=st.integers(7, 16), budget=st.sampled_from([16, 24, 100]))
def test_any_workload_ends_with_the_right_tokens(
    tiny_llama: Path, mode: dict[str, Any], requests: list[dict], num_blocks: int, budget: int
) -> None:
    options = {name: value for name, value in mode.items() if name != "is_held"}
    engine = paper_engine(
        tiny_llama,
        num_kv_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=6,
        **options,
    )
    if "is_held" in mode:
        held_at_random(engine)
    workload = Workload(engine, requests)
    workload.run()
    workload.check()


def test_with_stages_decodes_are_dealt_out_evenly(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama, pipeline_parallel=2)
    driver = Driver(engine)
    for number in range(7):
        driver.add(prompt_of(4, number), greedy(12), cache_salt=str(number))
    driver.run()
    steps = paper_of(engine).plans
    assert list(steps[0].values()) == [4] * 7
    decodes = [list(step) for step in steps[1:]]
    assert [len(step) for step in decodes[:4]] == [4, 3, 4, 3]
    for before, after in itertools.pairwise(decodes[:20]):
        assert not set(before) & set(after), "a sequence goes on before its token is known"
    counts = Counter(seq for step in decodes for seq in step)
    assert set(counts.values()) == {11}
    assert paper_of(engine).num_late == 0


def test_with_stages_prompts_that_end_at_once_find_slots(tiny_llama: Path) -> None:
    """A sequence that is complete keeps its slot while its step is in flight; three are."""
    engine = paper_engine(tiny_llama, pipeline_parallel=2, max_num_seqs=2)
    driver = Driver(engine)
    for number in range(20):
        driver.add(prompt_of(3, number), greedy(1), cache_salt=str(number))
    driver.run()
    driver.assert_empty()


def test_a_prompt_preempted_half_way_is_scored_once(tiny_llama: Path) -> None:
    engine = paper_engine(tiny_llama, num_kv_blocks=12, max_num_batched_tokens=32)
    driver = Driver(engine)
    driver.add(prompt_of(30), greedy(60))
    driver.step()
    prompt = prompt_of(85, 1)
    key = driver.add(prompt, greedy(4, prompt_logprobs=0))
    preempt_half_way(driver)
    driver.run()
    scored = [entry for event in driver.scored[key] for entry in event.logprobs or ()]
    assert [entry and entry.token_id for entry in scored] == [None, *prompt[1:]]


WINDOW = 40


def windowed(folder: Path, **config: Any) -> Engine:
    """As of a model all of whose layers have a window."""
    engine = paper_engine(folder, **config)
    engine.scheduler.homes[0].window = paper_of(engine).window = WINDOW
    return engine


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_blocks_behind_a_window_are_given_up(tiny_llama: Path, is_async: bool) -> None:
    """A long answer, choices that share a prompt, one prompt longer than a step."""
    config = {"num_kv_blocks": 40, "max_num_batched_tokens": 50}
    engine = windowed(tiny_llama, async_scheduling=is_async, **config)
    driver = Driver(engine)
    params = SamplingParams(temperature=1, n=2, seed=5, max_tokens=200, ignore_eos=True)
    for prompt, sampling, most in (
        (prompt_of(10), greedy(300, ignore_eos=True), 2 + WINDOW // BLOCK),
        (prompt_of(130), greedy(20), 9),
        (prompt_of(50), params, 2 * (2 + WINDOW // BLOCK)),
    ):
        key = driver.add(prompt, sampling)
        while engine.has_work:
            driver.step()
            engine.check_integrity()
            if len(driver.tokens[key, 0]) > 2 * BLOCK:
                assert engine.blocks.num_owned <= most
        for choice in range(sampling.n):
            assert driver.tokens[key, choice] == alone(engine, prompt, sampling, choice)
    driver.assert_empty()


def test_blocks_that_were_given_up_belong_to_others(tiny_llama: Path) -> None:
    """Many long answers in a cache that could not hold half of their rows; preemptions, and copies
    of blocks of which somebody once had one."""
    engine = windowed(tiny_llama, num_kv_blocks=24, max_num_seqs=8)
    driver = Driver(engine)
    sampling = [
        SamplingParams(temperature=1, n=1 + i % 2, seed=i, max_tokens=150, ignore_eos=True)
        for i in range(8)
    ]
    keys = [driver.add(prompt_of(20 + i, i), sampling[i]) for i in range(8)]
    driver.run()
    driver.assert_empty()
    assert engine.scheduler.num_preemptions
    for i, key in enumerate(keys):
        for choice in range(sampling[i].n):
            want = alone(engine, prompt_of(20 + i, i), sampling[i], choice)
            assert driver.tokens[key, choice] == want


def test_a_prompt_that_is_handed_over_gives_nothing_up(tiny_llama: Path) -> None:
    engine = windowed(tiny_llama)
    driver = Driver(engine)
    driver.add(prompt_of(200), greedy(), phase="prefill")
    driver.run()
    [held] = driver.held
    assert len(set(held.block_ids)) == -(-200 // BLOCK)
    engine.keep_finished_rows()
    driver.add(prompt_of(10), greedy(100, ignore_eos=True))
    kept = []
    while engine.has_work:
        kept += driver.step().finished
    assert kept == [], "rows that are not all there"
    engine.release_held(held.key)
    driver.assert_empty()
