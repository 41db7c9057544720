"""Legs of which nothing is heard: those that wait at a living worker stay there, those that hang or
got lost move.

The fleet's clock is made by hand, and workers say how they are before each tick.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from router.fake_worker import FakeWorker
from router.harness import Harness, settle, until
from support.clock import Clock

from pdserve.protocol.commands import Cancel, Submit
from pdserve.protocol.sampling_params import SamplingParams

PROMPT = tuple(range(10, 30))
PARAMS = SamplingParams(seed=7, max_tokens=12, ignore_eos=True)
DEADLINE_S = 20.0
LONG_S = 5 * DEADLINE_S
Make = Callable[..., Harness]


@pytest.fixture
async def start(make: Make, clock: Clock) -> Callable[..., Any]:
    async def started(num_prefill: int, num_decode: int, **config: Any) -> Harness:
        config = {"attempt_deadline_s": DEADLINE_S, **config}
        return await make(num_prefill, num_decode, now=clock, **config).start()

    return started


def submits(harness: Harness) -> list[tuple[str, str]]:
    """Every leg that was sent: worker and phase."""
    workers = [*harness.prefills, *harness.decodes]
    return [(worker.worker_id, submit.phase) for worker in workers for submit in worker.submits()]


def failovers(harness: Harness) -> dict[str, float]:
    samples = next(iter(harness.service.metrics.failovers.collect())).samples
    return {
        sample.labels["reason"]: sample.value
        for sample in samples
        if sample.name.endswith("_total")
    }


@pytest.mark.parametrize("phase", ["full", "prefill", "decode", "prepared"])
async def test_a_leg_waits_at_a_living_worker_as_long_as_it_takes(
    start: Callable[..., Any], clock: Clock, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queued at P, at D, or waiting there for blocks: it keeps its place, and D need not say
    anything of a leg that it only prepares."""
    monkeypatch.setattr(FakeWorker, "parts_from", 5 if phase == "prepared" else 0)
    harness = await start(0 if phase == "full" else 2, 2)
    for worker in harness.decodes if phase in ("full", "decode") else harness.prefills:
        worker.gate = asyncio.Event()
    running = asyncio.create_task(harness.collect(PROMPT, PARAMS))
    wanted = "prefill" if phase == "prepared" else phase
    await until(lambda: any(sent == wanted for _, sent in submits(harness)))
    sent = submits(harness)
    await harness.pass_time(clock, LONG_S)
    assert submits(harness) == sent and not running.done()
    for worker in harness.world.workers.values():
        if worker.gate is not None:
            worker.gate.set()
    harness.check(await running, PROMPT, PARAMS)
    assert failovers(harness) == {}
    assert await harness.world.settled() == 0


@pytest.mark.parametrize("phase", ["full", "prefill", "decode"])
async def test_a_leg_that_never_came_is_sent_elsewhere(
    start: Callable[..., Any], clock: Clock, phase: str
) -> None:
    """Its worker lives, and knows nothing of it."""
    harness = await start(0 if phase == "full" else 2, 2)
    lost: list[Submit] = []

    def loses(submit: Submit) -> bool:
        if submit.phase == phase and not lost:
            lost.append(submit)
        return lost == [submit]

    for worker in harness.world.workers.values():
        worker.loses = loses
    running = asyncio.create_task(harness.collect(PROMPT, PARAMS))
    await until(lambda: lost)
    await harness.pass_time(clock, DEADLINE_S)
    assert failovers(harness) == {} and not running.done()
    await harness.pass_time(clock, 1)
    harness.check(await running, PROMPT, PARAMS)
    assert failovers(harness) == {"silent": 1}
    assert await harness.world.settled() == 0


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_a_leg_that_hangs_behind_its_first_tokens_is_moved_with_them(
    start: Callable[..., Any], clock: Clock, num_prefill: int
) -> None:
    harness = await start(num_prefill, 2)
    for worker in harness.decodes:
        worker.hangs_at = 3
    running = asyncio.create_task(harness.collect(PROMPT, PARAMS))
    busy = await _decoding(harness)
    # another attempt of the same worker would not hang, nor does the other one
    busy.hangs_at = None
    other = next(worker for worker in harness.decodes if worker is not busy)
    other.hangs_at = None
    await harness.pass_time(clock, DEADLINE_S + 1)
    harness.check(await running, PROMPT, PARAMS)
    [resumed] = other.submits()
    assert len(resumed.starts[0].forced) == 3 + num_prefill
    assert any(isinstance(command, Cancel) for command in busy.commands)
    assert failovers(harness) == {"silent": 1}


async def _decoding(harness: Harness) -> FakeWorker:
    """The one that has given all tokens before it hangs."""
    await until(lambda: any(worker.submits() for worker in harness.decodes))
    busy = next(worker for worker in harness.decodes if worker.submits())
    wanted = 3 + (busy.submits()[0].phase == "decode")
    await until(lambda: busy.num_batches >= wanted)
    await settle()
    return busy


async def test_a_leg_that_went_back_to_the_queue_waits_again(
    start: Callable[..., Any], clock: Clock
) -> None:
    """A preempted one: its worker says that it waits, though it has given tokens."""
    harness = await start(0, 1)
    decode = harness.decodes[0]
    decode.hangs_at = 3
    running = asyncio.create_task(harness.collect(PROMPT, PARAMS))
    await _decoding(harness)
    [submit] = decode.submits()
    decode.queued.add(submit.key)
    await harness.pass_time(clock, LONG_S)
    assert not running.done() and failovers(harness) == {}
    decode.queued.clear()
    decode.hangs_at = None
    await harness.pass_time(clock, DEADLINE_S + 1)
    harness.check(await running, PROMPT, PARAMS)


async def test_a_worker_that_says_nothing_loses_what_waits_there(
    start: Callable[..., Any], clock: Clock
) -> None:
    harness = await start(0, 2, worker_silence_s=5)
    for worker in harness.decodes:
        worker.gate = asyncio.Event()
    running = asyncio.create_task(harness.collect(PROMPT, PARAMS))
    await until(lambda: submits(harness))
    silent, other = sorted(harness.decodes, key=lambda worker: not worker.submits())
    assert other.gate is not None
    other.gate.set()
    silent.mute = True
    await harness.pass_time(clock, 6)
    harness.check(await running, PROMPT, PARAMS)
    assert harness.fleet.worker_ids == {other.worker_id} and failovers(harness) == {"lost": 1}


async def test_a_leg_whose_end_waits_for_a_slow_client_is_not_repeated(
    start: Callable[..., Any], clock: Clock
) -> None:
    """The worker is done with it, and says nothing of it any more."""
    harness = await start(0, 1)
    chunks = harness.service.generate([PROMPT], PARAMS)
    first = await anext(chunks)
    await until(lambda: harness.decodes[0].held() == 0)
    await harness.pass_time(clock, LONG_S)
    rest = [chunk async for chunk in chunks]
    assert len(first.token_ids) + sum(len(chunk.token_ids) for chunk in rest) == 12
    assert failovers(harness) == {} and len(harness.decodes[0].submits()) == 1


async def test_a_router_that_stood_still_blames_nobody(
    start: Callable[..., Any], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process was stopped: the first tick is late, and what workers said meanwhile is not read
    yet."""
    harness = await start(0, 2, worker_silence_s=5)
    for worker in harness.decodes:
        worker.gate = asyncio.Event()
    running = asyncio.create_task(harness.collect(PROMPT, PARAMS))
    await until(lambda: submits(harness))
    sent = submits(harness)
    for _ in range(3):
        clock.seconds += LONG_S
        harness.fleet.watch.look()
        harness.decodes[0].report()  # the tick may come before what the other one said
        await settle()
        harness.fleet.watch.look()
        await settle()
        assert harness.fleet.worker_ids == {"d0", "d1"} and submits(harness) == sent
    assert "stood still" in caplog.text
    for worker in harness.decodes:
        assert worker.gate is not None
        worker.gate.set()
    harness.check(await running, PROMPT, PARAMS)
    harness.decodes[1].mute = True
    await harness.pass_time(clock, 6)
    assert harness.fleet.worker_ids == {"d0"}, "the excuse is not for ever"


@pytest.mark.parametrize("is_heard_first", [False, True])
async def test_a_router_that_stood_still_blames_no_leg(
    start: Callable[..., Any], clock: Clock, is_heard_first: bool
) -> None:
    """The leg's next tokens are still to be read, its worker's report was read before or after the
    tick."""
    harness = await start(0, 1)
    decode = harness.decodes[0]
    decode.hangs_at = 3
    running = asyncio.create_task(harness.collect(PROMPT, PARAMS))
    await _decoding(harness)
    clock.seconds += LONG_S
    if is_heard_first:
        decode.report()
        await settle()
    harness.fleet.watch.look()
    await harness.pass_time(clock, DEADLINE_S - 1)
    assert failovers(harness) == {} and not running.done()
    decode.hangs_at = None
    await harness.pass_time(clock, 2)
    assert failovers(harness) == {"silent": 1}, "it hangs, and had its time"
    harness.check(await running, PROMPT, PARAMS)
