"""The load of an engine's experts: gathered from ranks over links, without a wait; and a worker's
answer to a router that asks for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hosts import hosts
from support.pair import ROUTER, SESSION, Pair, Worker, deltas, linked, prompt_of, submit
from support.tiny_models import make_tiny
from support.waiting import stays, until
from worker.test_host import PROMPT, wires

from pdserve.engine.execution.expert_load import ExpertLoad
from pdserve.engine.llm import LLM
from pdserve.protocol.commands import AskExpertLoad, RouterLost, Subscribe
from pdserve.protocol.events import Delta, ExpertCounts
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.worker.hosts.engine_load import EngineLoad, RankLoad

ASK = AskExpertLoad(router_id=ROUTER, session=SESSION)
NUM_EXPERTS, TOP_K = 16, 4
ONE, OTHER = ("one", 1), ("other", 5)


def load_of(**layers: list[int]) -> ExpertLoad:
    """Takes the counts of layers by their names, L0 and so on."""
    return ExpertLoad({int(name[1:]): torch.tensor(rows) for name, rows in layers.items()})


@contextmanager
def ranks(own: ExpertLoad | None, *others: ExpertLoad | None) -> Iterator[EngineLoad]:
    links = [linked() for _ in others]
    load = EngineLoad(own, {rank: near for rank, (near, _) in enumerate(links, 1)})
    ends = [RankLoad(far, each) for (_, far), each in zip(links, others, strict=True)]
    try:
        yield load
    finally:
        for end in ends:
            end.close()
        load.close()


def answers(load: EngineLoad) -> list[tuple[tuple[str, int], ExpertCounts]]:
    """Polls until something is answered."""
    found: list[Any] = []
    until(lambda: found, doing=lambda: found.extend(load.poll()))
    return found


def test_counts_of_stages_and_homes_are_added() -> None:
    """Rank 0 has the last stage. A rank that shares rows with another one reports nothing."""
    homes = load_of(L2=[1, 0], L3=[1 << 40, 2]), None, load_of(L2=[3, 4], L3=[0, 5])
    first_stage = load_of(L0=[7, 8])
    with ranks(*homes, first_stage, None) as load:
        assert not load.is_asked and load.poll() == []
        load.ask(ONE)
        assert load.is_asked
        assert answers(load) == [
            (ONE, ExpertCounts(layers={0: (7, 8), 2: (4, 4), 3: (1 << 40, 7)}))
        ]
        assert not load.is_asked and load.poll() == []


def test_a_first_rank_without_experts_asks_the_others() -> None:
    with ranks(None, load_of(L0=[7, 8])) as load:
        load.ask(ONE)
        assert answers(load) == [(ONE, ExpertCounts(layers={0: (7, 8)}))]


def test_an_engine_without_experts_answers_at_once() -> None:
    load = EngineLoad(None)
    load.ask(ONE)
    assert load.poll() == [(ONE, ExpertCounts(layers={}))]


def test_nothing_is_answered_before_the_last_rank_has() -> None:
    near, far = linked()
    load = EngineLoad(load_of(L0=[1]), {1: near})
    load.ask(ONE)
    assert load.poll() == []
    stays(lambda: load.poll() == [] and load.is_asked, 0.1)
    end = RankLoad(far, load_of(L0=[2]))
    assert answers(load) == [(ONE, ExpertCounts(layers={0: (3,)}))]
    end.close()
    load.close()


def test_who_asks_later_gets_later_counts() -> None:
    """An answer holds all that was counted before its question."""
    near, far = linked()
    counts = torch.tensor([1])
    load = EngineLoad(load_of(L0=[0]), {1: near})
    load.ask(ONE)
    load.poll()
    load.ask(OTHER)
    end = RankLoad(far, ExpertLoad({0: counts}))
    assert answers(load) == [(ONE, ExpertCounts(layers={0: (1,)}))]
    assert load.is_asked
    counts += 1
    load.ask(ONE)
    latest = ExpertCounts(layers={0: (2,)})
    assert answers(load) == [(OTHER, latest), (ONE, latest)]
    end.close()
    load.close()


def told(worker: Worker, session: int = SESSION) -> list[ExpertCounts]:
    events = worker.by_session[f"{ROUTER}/{session}"]
    return [event for event in events if isinstance(event, ExpertCounts)]


def run_one(pair: Pair) -> None:
    key = RequestKey(ROUTER, SESSION, "a")
    sampling = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    pair.d.command(submit(key, "full", prompt_of(40), sampling))
    pair.until(lambda: any(delta.finish_reason for delta in deltas(pair.d, key)))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each of two stages has a layer with experts."""
    return make_tiny("qwen3-moe", tmp_path_factory.mktemp("mixture"), seed=3, num_hidden_layers=4)


@pytest.fixture
def pair(mixture: Path) -> Iterator[Pair]:
    pair = Pair(mixture)
    yield pair
    pair.close()


def test_a_worker_tells_the_router_that_asks(pair: Pair) -> None:
    pair.d.command(Subscribe(router_id=ROUTER, session=SESSION + 1))
    run_one(pair)
    pair.d.command(ASK)
    pair.until(lambda: told(pair.d))
    expected = pair.d.engine.executor.expert_load()
    assert told(pair.d) == [
        ExpertCounts(layers={layer: tuple(rows.tolist()) for layer, rows in expected.items()})
    ]
    assert all(rows.sum() == (40 + 3) * TOP_K for rows in expected.values())
    assert told(pair.d, SESSION + 1) == []


def test_a_busy_worker_answers_between_two_steps(pair: Pair) -> None:
    key = RequestKey(ROUTER, SESSION, "long")
    sampling = SamplingParams(max_tokens=64, seed=1, ignore_eos=True)
    pair.d.command(submit(key, "full", prompt_of(40), sampling))
    pair.until(lambda: deltas(pair.d, key))
    pair.d.command(ASK)
    pair.until(lambda: told(pair.d))
    assert not any(delta.finish_reason for delta in deltas(pair.d, key))
    assert all(sum(rows) >= 40 * TOP_K for rows in told(pair.d)[0].layers.values())


def test_a_router_that_is_lost_is_not_told(pair: Pair) -> None:
    pair.d.command(ASK)
    pair.d.command(RouterLost(router_id=ROUTER, session=SESSION))
    pair.turn_for(0.05)
    assert told(pair.d) == [] and not pair.d.loop._experts.is_asked


def test_a_worker_that_waits_for_counts_looks_again_soon(pair: Pair) -> None:
    near, far = linked()
    pair.d.loop._experts = EngineLoad(pair.d.engine.expert_load, {1: near})
    pair.until(lambda: pair.d.loop.turn() > 0.01)
    pair.d.command(ASK)
    assert 0 < pair.d.loop.turn() < 0.01
    near.close()
    far.close()


def test_a_model_without_experts_tells_nothing(tiny_llama: Path) -> None:
    pair = Pair(tiny_llama)
    pair.d.command(ASK)
    pair.until(lambda: told(pair.d))
    assert told(pair.d) == [ExpertCounts(layers={})]
    pair.close()


@pytest.mark.parametrize("degrees", [(1, 2, 2), (2, 1, 2), (2, 2, 1)], ids=str)
async def test_ranks_in_processes_count_what_one_rank_counts(
    degrees: tuple[int, int, int], mixture: Path
) -> None:
    llm = LLM(str(mixture), tokenizer=False, num_kv_blocks=256, device="cpu")
    llm.generate([list(PROMPT)], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    expected = {layer: rows.sum() for layer, rows in llm.expert_load().items()}
    engine = {"expert_parallel": True}
    with hosts(mixture, "A", engine=engine, degrees={"A": degrees}) as started:
        async with wires(*started) as [wire]:
            await wire.submit(1, "full")
            await wire.until(Delta, lambda delta: delta.finish_reason)
            await wire.link.send(AskExpertLoad(router_id="router", session=1))
            counts = await wire.until(ExpertCounts, lambda counts: counts.layers)
    assert {layer: sum(rows) for layer, rows in counts.layers.items()} == expected
    assert all(len(rows) == NUM_EXPERTS for rows in counts.layers.values())
