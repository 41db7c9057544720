"""Workers killed under 32 streams of every kind, without Ray: each answer equals an undisturbed one
to the byte.

A victim has all requests when it dies; who takes over joins just before. Frozen processes hold a
moment still. The same over Ray, with nodes: tests/test_failover_ray.py.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
from support.hosts import Host, hosts
from support.processes import freeze
from support.routers import RouterProcess
from support.served import DEMO, MODEL, Cluster, blocks_in_use, cluster
from support.streams import Ask, check, drafted, mid_stream, prompts
from support.tiny_models import make_speaking
from support.trace_receivers import Received, Receiver, grpc_receiver
from support.waiting import Condition, until_async

from pdserve.configs.router import RouterConfig
from pdserve.configs.traces import TracesConfig
from pdserve.router.fleet.worker_state import Leg, WorkerState
from pdserve.text.tokenizer import Tokenizer

# prompts of more than 128 tokens come in parts
ENGINE = {"num_kv_blocks": 2048, "max_num_batched_tokens": 128}
CONFIG = RouterConfig(split="always", max_attempts=3, worker_silence_s=300.0)
LONGEST_GAP_S = 30.0  # far below worker_silence_s: deaths are noticed by closed connections


class Stage:
    """The workers by name, and the undisturbed answers of all requests."""

    def __init__(self, workers: list[Host]) -> None:
        self.workers = {worker.worker_id.split("-")[0]: worker for worker in workers}
        self.asks: Callable[[], list[Ask]] = list
        self.expected: list[bytes] = []

    def __getitem__(self, name: str) -> Host:
        return self.workers[name]


@pytest.fixture(scope="module", params=["demo", pytest.param("latents", marks=pytest.mark.slow)])
def workers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Host]]:
    """Starts workers of a model with rows for each KV head, or of one with latents."""
    folder = tmp_path_factory.mktemp(request.param)
    model = DEMO if request.param == "demo" else make_speaking("deepseek-v3", folder)
    names = [*(f"P{i}" for i in range(4)), *(f"D{i}" for i in range(6))]
    with hosts(model, *names, engine=ENGINE, shells=tmp_path_factory.mktemp("shells")) as started:
        yield started


@pytest.fixture(scope="module")
async def stage(workers: list[Host]) -> Stage:
    stage = Stage(workers)
    async with cluster(stage["P0"], stage["D0"]) as running:
        stage.asks = await drafted(running.client, prompts((160, 800)), Tokenizer.load(DEMO).decode)
        stage.expected = await asyncio.gather(*(ask.run(running.client) for ask in stage.asks()))
        assert await running.metric("pdserve_router_failovers_total") == 0
    return stage


@asynccontextmanager
async def under_way(running: Cluster, stage: Stage) -> AsyncIterator[list[Ask]]:
    """All requests asked; behind the block every answer has come, as it was without a
    disturbance."""
    asks = stage.asks()
    tasks = [asyncio.create_task(ask.run(running.client)) for ask in asks]
    try:
        yield asks
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    assert check(asks, answers, stage.expected) < LONGEST_GAP_S


async def until(condition: Condition) -> None:
    await until_async(condition)


def state_of(running: Cluster, worker: Host) -> WorkerState:
    return next(state for state in running.fleet.workers if state.worker_id == worker.worker_id)


def legs_of(running: Cluster, worker: Host) -> list[Leg]:
    return list(state_of(running, worker).legs.values())


def has_legs(running: Cluster, worker: Host, more_than: int) -> bool:
    return len(legs_of(running, worker)) > more_than


async def failovers(running: Cluster) -> float:
    return await running.metric("pdserve_router_failovers_total")


@asynccontextmanager
async def traced(*workers: Host) -> AsyncIterator[tuple[Cluster, Receiver]]:
    """A router over these, and who receives its traces."""
    with grpc_receiver() as receiver:
        traces = TracesConfig(endpoint=receiver.url)
        async with cluster(*workers, config=CONFIG, traces=traces) as running:
            yield running, receiver


def check_attempts(trace: list[Received]) -> int:
    """Every attempt at an answered call is in its trace: those that were lost with their workers,
    and the one that finished. Returns how many failovers there were."""
    root = trace[0]
    assert root.has["pdserve.outcome"] == "ok" and root.events[0] == "first token"
    num_failovers: int = root.has["pdserve.failovers"]
    assert root.events.count("failover") == num_failovers
    legs = [received for received in trace if received.span.name.endswith(" leg")]
    assert [leg.has["pdserve.leg.attempt"] for leg in legs] == list(range(len(legs)))
    ends = [leg.has["pdserve.leg.end"] for leg in legs]
    assert ends.count("lost") >= num_failovers and ends[-1] in ("finished", "cancelled")
    assert all(leg.span.status.message for leg in legs if leg.has["pdserve.leg.end"] == "lost")
    done = [received.span.name for received in trace if received.path[1:-1] == legs[-1].path[1:]]
    if legs[-1].has["pdserve.leg.complete"]:  # else a stop string ended it here
        assert "queue" in done and done[-1] == "decode"
    return num_failovers


async def begin(running: Cluster, asks: list[Ask], p: Host, successor: Host, *meets: Host) -> None:
    """P, which stands still, has all requests, and the successor is there, connected; then P goes
    on."""
    await until(lambda: len(legs_of(running, p)) == len(asks))
    running.join(successor)
    await running.settled(successor, *meets)
    os.kill(p.pid, signal.SIGCONT)


@pytest.mark.slow
async def test_a_decode_worker_dies_and_then_its_successor(stage: Stage) -> None:
    p = stage["P0"]
    first = stage["D0"]
    second = stage["D1"]
    third = stage["D2"]
    async with traced(p, first) as (running, receiver):
        freeze(p.pid)
        async with under_way(running, stage) as asks:
            await begin(running, asks, p, second)
            await until(lambda: mid_stream(asks, 12))
            freeze(first.pid)
            assert [ask for ask in asks if ask.name == "three choices" and 0 < len(ask.ended) < 3]
            num_first = len(legs_of(running, first))
            # an answer or two have ended, or, unstreamed, are still at P
            assert num_first >= len(asks) // 2
            first.kill()
            await until(lambda: mid_stream(asks, 30))
            freeze(second.pid)
            running.join(third)
            await running.settled(third)
            num_second = len(legs_of(running, second))
            # some had more tokens than others when the first died
            assert num_second >= len(asks) // 4
            second.kill()
            await until(lambda: len(legs_of(running, third)) > 0)
            assert await failovers(running) >= (num_first + num_second) * 3 // 4
        traces = await receiver.traces(len(asks))
        assert len(traces) == len(asks)
        assert sum(map(check_attempts, traces)) == await failovers(running)
        assert await running.metric("pdserve_router_traces_total", result="exported") == len(asks)


async def test_a_prefill_worker_dies_while_some_prompts_are_handed_over(stage: Stage) -> None:
    """Some prompts wait, one is being computed, some are on their way to D, some are there."""
    p = stage["P0"]
    successor = stage["P1"]
    d = stage["D2"]
    async with cluster(p, d, config=CONFIG) as running:
        freeze(p.pid)
        async with under_way(running, stage) as asks:
            await begin(running, asks, p, successor, d)
            await until(lambda: any(leg.handed_off for leg in legs_of(running, p)))
            freeze(p.pid)
            waiting = [leg for leg in legs_of(running, p) if not leg.handed_off]
            assert len(waiting) > len(asks) // 4
            p.kill()
            await until(lambda: len(legs_of(running, successor)) > 0)
            assert await failovers(running) > 0


async def test_a_prefill_worker_dies_when_all_is_handed_over_and_nothing_arrived(
    stage: Stage,
) -> None:
    p = stage["P1"]
    d = stage["D2"]
    async with cluster(p, d, config=CONFIG) as running, under_way(running, stage) as asks:
        await all_handed_over(running, asks, p, d)
        p.kill()
        os.kill(d.pid, signal.SIGCONT)
        await until(lambda: mid_stream(asks, 3))
        assert await failovers(running) == 0  # D recomputes by itself


async def test_both_workers_die_between_hand_off_and_arrival(stage: Stage) -> None:
    p = stage["P2"]
    d = stage["D3"]
    successor = stage["D2"]
    async with cluster(p, d, config=CONFIG) as running, under_way(running, stage) as asks:
        await all_handed_over(running, asks, p, d)
        running.join(successor)
        await running.settled(successor)
        p.kill()
        d.kill()
        await until(lambda: len(legs_of(running, successor)) == len(asks))


async def all_handed_over(running: Cluster, asks: list[Ask], p: Host, d: Host) -> None:
    """D stands still, P has done its part."""
    freeze(d.pid)
    await until(
        lambda: (
            len(legs_of(running, p)) == len(asks)
            and all(leg.handed_off for leg in legs_of(running, p))
        )
    )


async def test_a_killed_routers_blocks_are_free_within_seconds(stage: Stage) -> None:
    alive = [stage["P3"], stage["D2"], stage["D4"]]
    assert alive[0].shell is not None
    router = RouterProcess(DEMO, CONFIG, 1.0, alive[0].shell.parent)
    try:
        router.wait()
        async with (
            cluster(*alive) as observer,
            httpx.AsyncClient(base_url=router.url, timeout=300) as client,
        ):
            async with asyncio.timeout(60):
                while (await client.get("/health")).status_code != 200:
                    await asyncio.sleep(0.05)
            asks = stage.asks()
            tasks = [asyncio.create_task(ask.run(client, max_tokens=1500)) for ask in asks]
            await until(lambda: mid_stream(asks, 12))
            while not await blocks_in_use(observer):
                await asyncio.sleep(0.05)
            router.close()
            # answers of 1,500 tokens take longer; workers push once a second
            async with asyncio.timeout(10):
                while await blocks_in_use(observer):
                    await asyncio.sleep(0.02)
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(isinstance(end, httpx.TransportError) for end in ends) > len(asks) * 3 // 4
            again = await stage.asks()[0].run(observer.client)
            assert again == stage.expected[0]
    finally:
        router.close()


async def test_attempts_end_when_one_worker_after_the_other_dies(stage: Stage) -> None:
    """The successors stand still, so nobody makes progress."""
    first = stage["D2"]
    second = stage["D4"]
    third = stage["D5"]
    async with cluster(first, config=CONFIG) as running:
        asks = stage.asks()
        tasks = [asyncio.create_task(ask.run(running.client)) for ask in asks]
        await until(lambda: mid_stream(asks, 12))
        freeze(first.pid)
        for dies, successor in ((first, second), (second, third)):
            running.join(successor)
            await running.settled(successor)
            freeze(successor.pid)
            dies.kill()
            await until(partial(has_legs, running, successor, len(asks) // 2))
        third.kill()
        await asyncio.gather(*tasks, return_exceptions=True)
        cut = [ask for ask in asks if ask.streams and "error" in ask.lines[-2]]
        assert len(cut) > len(asks) // 2
        for ask in cut:
            *_, error, done = ask.lines
            assert done == "data: [DONE]"
            told = json.loads(error.removeprefix("data: "))["error"]
            assert told["message"].startswith("gave up after 3 attempts: its worker was lost"), told
            assert (told["type"], told["code"]) == ("service_unavailable_error", "no_workers")
        refused = await running.client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
