"""The fleet's life: joining, introductions, losing, silence, draining; and choosing among its
workers."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from router.fake_worker import FakeWorker
from router.harness import Harness, settle, until
from support.clock import Clock
from support.pair import submit

from pdserve.background import tasks
from pdserve.protocol.block_digests import NOBODY
from pdserve.protocol.codec import encode
from pdserve.protocol.commands import ConnectPeer, DisconnectPeer, Submit
from pdserve.protocol.events import Delta, EventBatch, LegsWaiting, PeerStatus
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.choosing.choose import Chooser, Demand, NoWorker, note_sent
from pdserve.router.fleet import fleet, watch
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.fleet.inbox import Inbox
from pdserve.router.fleet.prefix_index import PromptBlocks
from pdserve.router.fleet.worker_state import WorkerState

Make = Callable[..., Harness]
PROMPT = tuple(range(10, 30))


def sampling(**values: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 7, "max_tokens": 12, "ignore_eos": True} | values))


async def test_every_pair_is_introduced_once(make: Make) -> None:
    harness = await make(2, 2).start()
    await settle()
    for decode in harness.decodes:
        asked = [c.meta.engine_id for c in decode.commands if isinstance(c, ConnectPeer)]
        assert sorted(asked) == ["engine-p0", "engine-p1"]
    assert not any(isinstance(c, ConnectPeer) for p in harness.prefills for c in p.commands)


async def test_late_workers_are_introduced_and_gone_ones_disconnected(make: Make) -> None:
    harness = await make(1, 1).start()
    harness.add("p9", "prefill")
    await until(lambda: ("d0", "p9") in harness.connected_pairs())
    harness.prefills[0].die()
    await until(lambda: "p0" not in harness.fleet.worker_ids)
    harness.fleet.leave("p0")  # as the watcher of the running set does
    gone = DisconnectPeer(engine_id="engine-p0", incarnation=1)
    await until(lambda: gone in harness.decodes[0].commands)
    assert harness.connected_pairs() == {("d0", "p9")}
    await until(lambda: harness.decodes[0].connected == {("engine-p9", 1)})


async def test_a_report_is_added_to_the_prompts_that_the_worker_has_not_read(make: Make) -> None:
    """A router knows from a leg's first event, whatever it is, that its prompt was read."""
    harness = await make(0, 1).start()
    fake, worker = harness.decodes[0], harness.fleet.workers[0]
    fake.send_delay = lambda command: 3600.0

    def command(key: RequestKey) -> Submit:
        return submit(key, "full", list(PROMPT), sampling())

    legs = []
    for number, name in enumerate(("waits", "computed", "cancelled", "unread")):
        prompt = PromptBlocks((number, *PROMPT[1:]), NOBODY)
        note_sent([worker], worker, prompt, "full", (name, 0))
        legs.append(harness.fleet.submit(worker, name, 0, Inbox(), 1, command))

    async def unread() -> float:
        fake.report()
        await settle()
        return worker.queue.left(worker.last_seen, 0.0) / len(PROMPT)

    assert await unread() == 4
    fake.push(legs[0].key, [LegsWaiting(legs=(("waits", 0),))])
    assert await unread() == 3
    delta = Delta(request_id="computed", attempt=0, choice=0, position=0, token_ids=(1,))
    fake.push(legs[1].key, [delta])
    assert await unread() == 2
    harness.fleet.end(legs[2], cancel=True)
    assert await unread() == 1
    for leg in legs:
        harness.fleet.end(leg, cancel=False)


async def test_a_lost_stream_alone_disconnects_nobody(make: Make) -> None:
    """Another router may be using the pair; the same goes for a router that stops."""
    harness = await make(1, 1).start()
    prefill = harness.prefills[0]
    prefill.cut()
    await until(lambda: "p0" not in harness.fleet.worker_ids)
    assert harness.connected_pairs() == set()
    harness.fleet.join(prefill)
    await until(lambda: harness.connected_pairs() == {("d0", "p0")})
    await harness.fleet.close()
    await settle()
    assert not any(isinstance(command, DisconnectPeer) for command in harness.decodes[0].commands)


async def test_both_roles_pair_among_themselves_but_not_with_themselves(make: Make) -> None:
    harness = make(0, 0)
    for name in "ab":
        harness.add(name, "both")
    await until(lambda: harness.connected_pairs() == {("a", "b"), ("b", "a")})
    harness.check(await harness.collect(PROMPT, sampling()), PROMPT, sampling())


async def test_a_refused_pair_is_not_used_and_asked_again(make: Make) -> None:
    harness = make(1, 1)
    harness.decodes[0].refuse_connects = 1
    for worker in (harness.prefills[0], harness.decodes[0]):
        harness.fleet.join(worker)
    await until(lambda: len(harness.fleet.workers) == 2)
    harness.check(await harness.collect(PROMPT, sampling()), PROMPT, sampling())
    assert harness.prefills[0].submits() == []
    await until(lambda: harness.connected_pairs() == {("d0", "p0")})
    harness.check(await harness.collect(PROMPT, sampling()), PROMPT, sampling())
    assert len(harness.prefills[0].submits()) == 1


async def test_a_pair_that_breaks_is_not_used(make: Make) -> None:
    harness = await make(1, 1).start()
    harness.decodes[0].refuse_connects = 5
    harness.decodes[0].push(
        None, [PeerStatus(engine_id="engine-p0", incarnation=1, connected=False)]
    )
    await until(lambda: not harness.connected_pairs())
    await harness.collect(PROMPT, sampling())
    assert [submit.phase for submit in harness.decodes[0].submits()] == ["full"]


@pytest.mark.parametrize("at", [1, 3])
async def test_a_stream_needs_no_pair_to_go_on(make: Make, at: int) -> None:
    """Its decode worker dies before or after the hand-off, and the only other one refuses to
    connect: that one computes the prompt and the tokens again, at once."""
    harness = make(1, 2)
    first, other = harness.decodes
    other.refuse_connects = 1_000
    for worker in (*harness.prefills, first, other):
        harness.fleet.join(worker)
    await until(lambda: len(harness.fleet.workers) == 3 and harness.connected_pairs())
    dying = harness.prefills[0] if at == 1 else first
    dying.before_batch = lambda number: first.die() if number == at else None
    harness.check(await harness.collect(PROMPT, sampling()), PROMPT, sampling())
    assert harness.connected_pairs() == set() and not first.alive
    assert len(harness.prefills[0].submits()) == 1
    assert [submit.phase for submit in other.submits()] == ["full"]


async def test_why_a_pair_is_not_connected_is_logged_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pdserve.router.fleet.peers")
    harness = await make(1, 1).start()
    harness.decodes[0].refuse_connects = 1
    for detail in ("no route", "no route", "slow self-test"):
        status = PeerStatus(engine_id="engine-p0", incarnation=1, connected=False, detail=detail)
        harness.decodes[0].push(None, [status])

    def lines() -> list[str]:
        return [r.message for r in caplog.records if r.name == "pdserve.router.fleet.peers"]

    await until(lambda: len(lines()) >= 2)
    assert lines()[:2] == [
        "worker d0 cannot pull from engine-p0: no route; it is asked again",
        "worker d0 cannot pull from engine-p0: slow self-test; it is asked again",
    ]
    await until(lambda: harness.connected_pairs() == {("d0", "p0")})
    assert lines()[-1] == "worker d0 can pull from engine-p0 now"
    assert len(lines()) <= 4, "the refusals of the worker itself have one reason more"


async def test_a_link_for_prefixes_that_another_router_had_closed_is_not_asked_for(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pdserve.router.fleet.peers")
    harness = await make(1, 1).start()
    await until(lambda: harness.connected_pairs() == {("d0", "p0")})
    closed = PeerStatus(
        engine_id="engine-d7", incarnation=1, connected=False, detail="unused", for_prefixes=True
    )
    harness.decodes[0].push(None, [closed])
    [decode] = [worker for worker in harness.fleet.workers if worker.worker_id == "d0"]
    await until(lambda: ("engine-d7", 1) in decode.peers)
    assert not [r for r in caplog.records if "engine-d7" in r.message]


async def test_other_models_and_other_protocols_stay_apart(make: Make) -> None:
    harness = await make(0, 1).start()
    harness.add("p8", "prefill").fingerprint = "other"
    stranger = harness.add("d8", "decode")
    stranger.protocol += 1
    await until(lambda: "d8" not in harness.fleet.worker_ids)
    assert {worker.worker_id for worker in harness.fleet.workers} == {"d0", "p8"}
    assert harness.connected_pairs() == set()


async def test_a_failover_stays_with_the_model_that_began(make: Make) -> None:
    harness = await make(0, 1).start()
    harness.add("d8", "decode").fingerprint = "other"
    await until(lambda: len(harness.fleet.workers) == 2)
    for worker in harness.world.workers.values():
        worker.before_batch = partial(die_at_third, worker)
    with pytest.raises(Exception, match="lost"):
        await harness.collect(PROMPT, sampling())
    assert sorted(worker.alive for worker in harness.world.workers.values()) == [False, True]


def die_at_third(worker: FakeWorker, number: int) -> None:
    if number == 3:
        worker.die()


async def test_a_silent_worker_is_lost(make: Make, clock: Clock) -> None:
    harness = await make(0, 2, worker_silence_s=15.0, now=clock).start()
    harness.decodes[0].mute = True
    tasks = [asyncio.create_task(harness.collect(PROMPT, sampling())) for _ in range(2)]
    await until(lambda: harness.decodes[0].submits())
    await harness.pass_time(clock, 14)
    assert harness.fleet.worker_ids == {"d0", "d1"}
    await harness.pass_time(clock, 2)
    for task in tasks:
        harness.check(await task, PROMPT, sampling())
    assert harness.fleet.worker_ids == {"d1"}
    assert harness.decodes[0].held() == 0  # its stream was closed, so it aborted what it had


async def test_a_worker_that_left_and_is_silent_is_lost_sooner(make: Make, clock: Clock) -> None:
    """Its node vanished; the fleet's own patience would outlast this test."""
    harness = await make(0, 1, worker_silence_s=600.0, now=clock).start()
    harness.decodes[0].mute = True
    task = asyncio.create_task(harness.collect(PROMPT, sampling()))
    await until(lambda: harness.decodes[0].submits())
    harness.add("d9", "decode")
    await harness.pass_time(clock, watch.LEFT_SILENCE_S + 1)
    assert "d0" in harness.fleet.worker_ids
    harness.fleet.leave("d0")
    await harness.pass_time(clock, 1)
    harness.check(await task, PROMPT, sampling())
    assert harness.fleet.worker_ids == {"d9"}


async def test_nobody_stays_connected_to_a_worker_that_is_lost_while_it_leaves(make: Make) -> None:
    harness = await make(1, 1).start()
    prefill = harness.prefills[0]
    decode = harness.decodes[0]
    prefill.mute = True
    task = asyncio.create_task(harness.collect(PROMPT, sampling()))
    await until(lambda: prefill.submits())
    harness.fleet.leave("p0")
    assert "p0" in harness.fleet.worker_ids
    prefill.die()
    harness.check(await task, PROMPT, sampling())
    await until(lambda: any(isinstance(command, DisconnectPeer) for command in decode.commands))


async def test_a_restarted_engine_or_garbage_ends_the_stream(make: Make) -> None:
    harness = await make(0, 2).start()
    queue = next(iter(harness.decodes[0]._streams.values()))
    queue.put_nowait(encode(EventBatch(worker_id="d0", incarnation=2, events=())))
    next(iter(harness.decodes[1]._streams.values())).put_nowait(b"\xc1")
    await until(lambda: harness.fleet.worker_ids == set())
    harness.fleet.join(harness.decodes[0])
    await until(lambda: len(harness.fleet.workers) == 1)


async def test_sessions_grow(make: Make) -> None:
    harness = await make(0, 1).start()
    first = harness.fleet.workers[0].session
    harness.fleet.leave("d0")
    await until(lambda: not harness.fleet.worker_ids)
    harness.fleet.join(harness.decodes[0])
    await until(lambda: len(harness.fleet.workers) == 1)
    assert harness.fleet.workers[0].session > first
    harness.check(await harness.collect(PROMPT, sampling()), PROMPT, sampling())


async def test_leaving_lets_streams_finish_and_takes_nothing_new(make: Make) -> None:
    harness = await make(0, 2).start()
    for decode in harness.decodes:
        decode.step_s = 0.02
    task = asyncio.create_task(harness.collect(PROMPT, sampling()))
    await until(lambda: any(worker.submits() for worker in harness.decodes))
    busy = next(worker for worker in harness.decodes if worker.submits())
    harness.fleet.leave(busy.worker_id)
    harness.check(await harness.collect(PROMPT, sampling()), PROMPT, sampling())
    harness.check(await task, PROMPT, sampling())
    assert len(busy.submits()) == 1
    await until(lambda: busy.worker_id not in harness.fleet.worker_ids)


async def test_what_outlasts_the_drain_is_moved(make: Make, clock: Clock) -> None:
    """Three choices, in mid-stream: no token lost or doubled. The worker that left aborts its
    part."""
    harness = await make(1, 2, drain_s=10.0, max_attempts=1, now=clock).start()
    for decode in harness.decodes:
        decode.step_s = 0.01
    wanted = sampling(max_tokens=40, n=3)
    task = asyncio.create_task(harness.collect(PROMPT, wanted))
    await until(lambda: any(worker.num_batches > 2 for worker in harness.decodes))
    busy, idle = sorted(harness.decodes, key=lambda worker: not worker.submits())
    busy.going.clear()
    harness.fleet.leave(busy.worker_id)
    await harness.pass_time(clock, 10)
    assert busy.held() and not idle.submits(), "it has its time"
    await harness.pass_time(clock, 1)
    await until(lambda: idle.submits())
    busy.going.set()
    harness.check(await task, PROMPT, wanted)
    assert busy.worker_id not in harness.fleet.worker_ids and harness.world.held() == 0
    [resumed] = idle.submits()
    assert all(start.forced for start in resumed.starts) and resumed.phase == "full"
    [sample, *_] = next(iter(harness.service.metrics.failovers.collect())).samples
    assert (sample.labels["reason"], sample.value) == ("drained", 1)


async def test_a_drain_that_is_called_off_moves_nothing(make: Make, clock: Clock) -> None:
    harness = await make(0, 2, drain_s=10.0, now=clock).start()
    for decode in harness.decodes:
        decode.going.clear()
    task = asyncio.create_task(harness.collect(PROMPT, sampling()))
    await until(lambda: any(worker.submits() for worker in harness.decodes))
    busy = next(worker for worker in harness.decodes if worker.submits())
    harness.fleet.leave(busy.worker_id)
    await harness.pass_time(clock, 5)
    harness.fleet.join(busy)
    await harness.pass_time(clock, 20)
    busy.going.set()
    harness.check(await task, PROMPT, sampling())
    assert [len(worker.submits()) for worker in harness.decodes if worker is not busy] == [0]


async def test_a_prefill_worker_drains_with_its_tickets(make: Make) -> None:
    harness = await make(1, 1).start()
    harness.decodes[0].going.clear()
    task = asyncio.create_task(harness.collect(PROMPT, sampling(max_tokens=3)))
    await until(lambda: harness.prefills[0].tickets)
    harness.fleet.leave("p0")
    await settle()
    assert "p0" in harness.fleet.worker_ids
    harness.decodes[0].going.set()
    harness.check(await task, PROMPT, sampling(max_tokens=3))
    await until(lambda: "p0" not in harness.fleet.worker_ids)
    assert harness.world.held() == 0


async def test_a_prefill_worker_that_leaves_hands_over_to_every_routers_requests(
    make: Make, clock: Clock
) -> None:
    """The first router has nothing there and is done at once; the second one's prompts are computed
    there yet. When none can have any more, nobody stays connected."""
    first, second = (make(number, number, drain_s=10.0, now=clock) for number in (2, 0))
    second.world = first.world
    for worker in [*first.prefills, *first.decodes]:
        first.fleet.join(worker)
        second.fleet.join(worker)
    await until(lambda: len(first.connected_pairs()) == len(second.connected_pairs()) == 4)
    leaves = first.prefills[0]
    leaves.going.clear()
    prompts = [(*PROMPT, i) for i in range(4)]
    tasks = [asyncio.create_task(second.collect(prompt, sampling())) for prompt in prompts]
    await until(lambda: leaves.submits("prefill"))
    first.fleet.leave("p0")
    second.fleet.leave("p0")
    assert "p0" not in {worker.worker_id for worker in first.fleet.workers}
    for harness in (first, second):
        await harness.pass_time(clock, 4)
    leaves.going.set()
    for prompt, task in zip(prompts, tasks, strict=True):
        second.check(await task, prompt, sampling())
    assert next(iter(second.service.metrics.failovers.collect())).samples == []
    assert not any(decode.submits("full") for decode in first.decodes)
    assert all(len(decode.connected) == 2 for decode in first.decodes)
    await first.pass_time(clock, 10 + fleet.DRAIN_SLACK_S)
    await until(lambda: all(decode.connected == {("engine-p1", 1)} for decode in first.decodes))
    assert first.connected_pairs() == {("d0", "p1"), ("d1", "p1")}


async def test_a_worker_that_comes_back_from_a_drain_stays_connected(
    make: Make, clock: Clock
) -> None:
    harness = await make(1, 1, drain_s=10.0, now=clock).start()
    harness.fleet.leave("p0")
    await until(lambda: not harness.fleet.worker_ids - {"d0"})
    harness.fleet.join(harness.prefills[0])
    await until(lambda: harness.connected_pairs() == {("d0", "p0")})
    await harness.pass_time(clock, 20 + fleet.DRAIN_SLACK_S)
    assert not any(isinstance(command, DisconnectPeer) for command in harness.decodes[0].commands)


@pytest.mark.parametrize("num_decode", [1, 2])
async def test_a_decode_worker_that_leaves_before_the_hand_off_is_handed_to(
    make: Make, num_decode: int
) -> None:
    """It has no leg of this request yet, and may have none at all; who else decodes is not
    connected to P."""
    harness = make(1, num_decode)
    if num_decode == 2:
        harness.decodes[1].refuse_connects = 1000
    for worker in [*harness.prefills, *harness.decodes]:
        harness.fleet.join(worker)
    await until(
        lambda: (
            harness.connected_pairs() == {("d0", "p0")}
            and len(harness.fleet.workers) == 1 + num_decode
        )
    )
    harness.prefills[0].going.clear()
    task = asyncio.create_task(harness.collect(PROMPT, sampling()))
    await until(lambda: harness.prefills[0].submits())
    harness.fleet.leave("d0")
    await settle()
    harness.prefills[0].going.set()
    harness.check(await task, PROMPT, sampling())
    assert [submit.phase for submit in harness.decodes[0].submits()] == ["decode"]
    assert next(iter(harness.service.metrics.failovers.collect())).samples == []
    await until(lambda: "d0" not in harness.fleet.worker_ids)
    assert harness.world.held() == 0


async def test_a_planned_decode_worker_is_let_go_with_the_request(make: Make) -> None:
    harness = await make(1, 1).start()
    harness.prefills[0].going.clear()
    task = asyncio.create_task(harness.collect(PROMPT, sampling()))
    await until(lambda: harness.prefills[0].submits())
    harness.fleet.leave("d0")
    await settle()
    assert "d0" in harness.fleet.worker_ids
    task.cancel()
    await until(lambda: "d0" not in harness.fleet.worker_ids)


async def test_closing_the_fleet_cancels_what_runs(make: Make) -> None:
    harness = await make(1, 1).start()
    harness.decodes[0].step_s = 0.05
    task = asyncio.create_task(harness.collect(PROMPT, sampling()))
    await until(lambda: harness.decodes[0].held())
    task.cancel()
    await asyncio.wait({task})
    await harness.fleet.close()
    assert harness.world.held() == 0 and harness.fleet.workers == []


class RawLink:
    """A link whose stream is what the test says."""

    worker_id = "raw"

    def __init__(self, *batches: bytes) -> None:
        self._batches = batches

    async def send(self, command: object) -> None: ...

    async def events(self, router_id: str, session: int) -> AsyncIterator[bytes]:
        for batch in self._batches:
            yield batch


async def test_a_stream_without_hello_is_refused() -> None:
    fleet = Fleet()
    fleet.join(RawLink(encode(EventBatch(worker_id="raw", incarnation=1, events=()))))
    await until(lambda: not fleet.worker_ids)
    assert fleet.workers == []
    await fleet.close()


async def test_choosing_filters_scores_and_takes_turns(make: Make) -> None:
    harness = await make(2, 3).start()
    chooser = Chooser(split_min_tokens=8, policy="least-loaded", split="always")
    workers = {worker.worker_id: worker for worker in harness.fleet.workers}

    def choose(**change: Any) -> tuple[str | None, str]:
        plan = chooser.choose(
            workers.values(), Demand(**({"num_prompt_tokens": 20, "num_tokens": 30} | change))
        )
        return plan.prefill.worker_id if plan.prefill else None, plan.decode.worker_id

    assert {choose() for _ in range(6)} == {
        (p, d) for p in ("p0", "p1") for d in ("d0", "d1", "d2")
    }
    workers["d0"].outstanding_tokens = workers["d2"].outstanding_tokens = 5
    workers["p1"].outstanding_tokens = 1
    assert {choose() for _ in range(3)} == {("p0", "d1")}
    assert {choose(excluded=frozenset({"p0", "d1"}))[0] for _ in range(3)} == {"p1"}
    assert choose(num_prompt_tokens=7) == (None, "d1") and choose(resumed=True) == (None, "d1")
    workers["d1"].peers.clear()
    assert choose()[1] in ("d0", "d2")
    assert choose(excluded=frozenset({"d0", "d2"})) == (None, "d1")
    impossible: list[dict[str, Any]] = [
        {"num_tokens": 257},
        {"fingerprint": "other"},
        {"excluded": frozenset({"d0", "d1", "d2"})},
    ]
    for bad in impossible:
        with pytest.raises(NoWorker):
            choose(**bad)


@pytest.mark.processes
def test_the_router_room_imports_no_torch_and_no_ray() -> None:
    modules = [
        ".".join(file.with_suffix("").parts) for file in Path("pdserve/router").rglob("*.py")
    ]
    assert len(modules) >= 30
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
    code += "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


async def test_an_error_in_the_tick_ends_neither_silence_nor_introductions(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tick takes a hundredth of the time after which a worker is silent."""
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(watch, "TICK_S", 0.01)
    harness = make(0, 2, worker_silence_s=1.0, now=clock)
    num_ticks = 0
    introduce = harness.fleet.introducer.introduce

    def sometimes(workers: Iterable[WorkerState]) -> None:
        nonlocal num_ticks
        if asyncio.current_task() is harness.fleet.watch.ticker:
            clock.seconds += 0.01
            num_ticks += 1
            if num_ticks in (1, 2, 4):
                raise KeyError("by test")
        introduce(workers)

    monkeypatch.setattr(harness.fleet.introducer, "introduce", sometimes)
    await harness.start()
    await until(lambda: num_ticks > 5)
    assert len(harness.fleet.workers) == 2
    await until(lambda: not harness.fleet.worker_ids)
    assert harness.fleet.watch.ticker is not None and not harness.fleet.watch.ticker.done()


async def test_an_error_while_a_worker_is_forgotten_keeps_it_from_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its legs move, the error is told, and it can join again."""
    harness = await make(0, 2).start()
    for worker in harness.decodes:
        worker.step_s = 0.05
    task = asyncio.create_task(harness.collect(PROMPT, sampling()))
    await until(lambda: any(worker.submits() for worker in harness.decodes))
    busy = next(worker for worker in harness.decodes if worker.submits())

    def fails(gone: WorkerState, remaining: Iterable[WorkerState]) -> None:
        raise KeyError("by test")

    with monkeypatch.context() as patch:
        patch.setattr(harness.fleet.introducer, "lost", fails)
        busy.cut()
        await until(lambda: busy.worker_id not in harness.fleet.worker_ids)
    harness.check(await task, PROMPT, sampling())
    assert "background task worker stream failed" in caplog.text
    assert busy.held() == 0, "its stream was closed"
    harness.fleet.join(busy)
    await until(lambda: len(harness.fleet.workers) == 2)
