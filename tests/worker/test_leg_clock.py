"""Where a leg's time went: the clock by hand, and through both workers of a hand-off."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.clock import Clock
from support.local_transfer import LocalTransferConfig
from support.pair import ROUTER, SESSION, Pair, Worker, cancel, deltas, submit
from support.waiting import until

from pdserve.protocol.codec import decode_batch
from pdserve.protocol.commands import RouterLost
from pdserve.protocol.events import Delta, EventBatch, LegTimes, PromptScored
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.worker.leg_clock import LegClock

GREEDY = SamplingParams(temperature=0, max_tokens=9, seed=1)


def delta(reason: str | None = None, position: int = 0, choice: int = 0) -> Delta:
    return Delta("r", 1, choice, position, (5,), reason)  # type: ignore[arg-type]


SCORED = PromptScored(request_id="r", attempt=1, cached_tokens=0)


def test_a_leg_from_arrival_to_its_last_token() -> None:
    clock = LegClock(arrived=10.0, choices=[0], phase="full")
    clock.planned(12.0, device_seconds=100.0)
    clock.planned(14.0, device_seconds=101.0)  # after a preemption
    assert clock.see(SCORED, 15.0, 102.0) is None and clock.see(delta(), 15.0, 102.0) is None
    assert clock.see(delta("length", 8), 20.0, 106.5) == LegTimes(2.0, 3.0, 5.0, 6.5)
    assert clock.done


def test_choices_end_one_by_one_and_the_device_never_takes_more_than_there_was() -> None:
    clock = LegClock(arrived=0.0, choices=[0, 1], phase="prefill")
    clock.planned(1.0, device_seconds=0.0)
    clock.see(SCORED, 2.0, 3.0)
    assert clock.see(delta(), 2.0, 3.0) == LegTimes(1.0, 1.0, 0.0, 1.0) and not clock.done
    assert (
        clock.see(delta("stop", choice=1), 2.5, 3.0) == LegTimes(1.0, 1.0, 0.5, 1.5) and clock.done
    )


def test_a_cancelled_leg_has_the_times_it_came_to() -> None:
    clock = LegClock(arrived=10.0, choices=[0, 1], phase="full")
    assert clock.cancel(None, 14.0, 9.0) == LegTimes(4.0, 0.0, 0.0, 0.0) and clock.stages == (
        "queue",
    )
    assert clock.cancel(None, 15.0, 9.0) is None, "only once"

    clock = LegClock(arrived=10.0, choices=[0, 1], phase="full")
    clock.planned(12.0, device_seconds=100.0)
    assert clock.cancel((1,), 13.0, 100.5) is None and not clock.done
    assert clock.see(delta("stop", choice=1), 13.5, 100.6) is None, (
        "it was on its way when the cancel came"
    )
    assert clock.cancel((0,), 15.0, 102.0) == LegTimes(2.0, 3.0, 0.0, 2.0)
    assert clock.stages == ("queue", "prefill", "device")

    clock = LegClock(arrived=10.0, choices=[0, 1], phase="full")
    clock.planned(12.0, device_seconds=100.0)
    clock.see(SCORED, 13.0, 101.0)
    assert clock.cancel((0,), 14.0, 101.0) is None
    assert (
        clock.see(delta("length", 8, choice=1), 15.0, 102.0) == LegTimes(2.0, 1.0, 2.0, 2.0)
        and clock.done
    )
    assert clock.stages == ("queue", "prefill", "device", "decode")

    clock = LegClock(arrived=10.0, choices=[2], phase="decode")  # its prompt was computed elsewhere
    clock.planned(12.0, device_seconds=100.0)
    assert clock.cancel((2,), 15.0, 102.0) == LegTimes(2.0, 0.0, 3.0, 2.0)


def test_an_older_worker_sends_no_times() -> None:
    old: dict[str, Any] = {
        "worker_id": "w",
        "incarnation": 1,
        "events": [["d", "r", 1, 0, 0, [5], None, None, None]],
    }
    new = {**old, "events": [[*old["events"][0], [1.0, 2.0, 3.0, 4.0], "a field to come"]]}
    assert decode_batch(msgspec.msgpack.encode(old)) == EventBatch(
        worker_id="w", incarnation=1, events=(delta(),)
    )
    [event] = decode_batch(msgspec.msgpack.encode(new)).events
    assert isinstance(event, Delta) and event.times == LegTimes(1.0, 2.0, 3.0, 4.0)


def counted(worker: Worker, name: str) -> tuple[float, float]:
    """Count and sum of a histogram."""
    samples = {
        sample.name: sample.value
        for family in worker.loop.snapshot().metrics
        for sample in family.samples
    }
    return samples[f"{name}_count"], samples[f"{name}_sum"]


@pytest.mark.parametrize("num_choices", [1, 3])
def test_both_legs_of_a_hand_off_report_once(tiny_llama: Path, num_choices: int) -> None:
    pair = Pair(tiny_llama)
    sampling = SamplingParams(temperature=0.7, max_tokens=9, seed=1, n=num_choices, ignore_eos=True)
    began = time.monotonic()
    pair.split(list(range(100)), sampling)
    wall = time.monotonic() - began
    for worker in (pair.p, pair.d):
        timed = [e.times for e in worker.events if isinstance(e, Delta) and e.times is not None]
        assert len(timed) == num_choices
        last = timed[-1]
        assert min(last.queue_s, last.prefill_s, last.decode_s) >= 0 and last.device_s > 0
        assert last.device_s <= last.prefill_s + last.decode_s <= wall
        for name, seconds in zip(
            ("queue", "prefill", "decode", "device"), vars_of(last), strict=True
        ):
            assert counted(worker, f"pdserve_request_{name}_time_seconds") == (
                1,
                pytest.approx(seconds),
            )
    assert [e.times for e in pair.d.events if isinstance(e, Delta) and e.finish_reason is None] == [
        None
    ] * (7 * num_choices)
    pair.close()


def vars_of(times: LegTimes) -> tuple[float, ...]:
    return times.queue_s, times.prefill_s, times.decode_s, times.device_s


def test_waiting_for_a_slot_is_queue_time(tiny_llama: Path) -> None:
    pair = Pair(tiny_llama, d={"max_num_seqs": 1})
    keys = [RequestKey("router", 7, name, 1) for name in "ab"]
    for key in keys:
        pair.d.command(submit(key, "full", list(range(40)), GREEDY))
    pair.until(lambda: all(any(d.finish_reason for d in deltas(pair.d, key)) for key in keys))
    first, second = (next(d.times for d in deltas(pair.d, key) if d.times) for key in keys)
    assert second.queue_s > first.prefill_s + first.decode_s and second.queue_s > first.queue_s
    pair.close()


def test_a_command_that_came_during_a_step_has_waited(tiny_llama: Path, clock: Clock) -> None:
    worker = Worker(
        tiny_llama, "W", "decode", LocalTransferConfig(), device="cpu", num_kv_blocks=64
    )
    assert worker.loop._arrival() == clock()
    worker.command(submit(RequestKey("router", 7, "a", 1), "full", list(range(40)), GREEDY))
    worker.loop.turn()
    clock.seconds += 0.1
    assert clock() - worker.loop._arrival() == pytest.approx(0.05)
    worker.close()


PARTS = ("queue", "prefill", "decode", "device")


def counts(worker: Worker) -> list[float]:
    return [counted(worker, f"pdserve_request_{part}_time_seconds")[0] for part in PARTS]


def long(num_choices: int) -> SamplingParams:
    return SamplingParams(temperature=0.7, max_tokens=60, seed=1, n=num_choices, ignore_eos=True)


def alone(tiny_llama: Path, **engine: object) -> Worker:
    options: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 128} | engine
    return Worker(tiny_llama, "W", "both", LocalTransferConfig(), **options)


def turn_until(worker: Worker, done: Callable[[], bool]) -> None:
    until(done, doing=worker.loop.turn, pause_s=0.0)


def test_a_leg_counts_when_some_of_its_choices_are_cancelled(tiny_llama: Path) -> None:
    worker = alone(tiny_llama)
    key = RequestKey(ROUTER, SESSION, "a", 1)
    worker.command(submit(key, "full", list(range(40)), long(3)))
    turn_until(worker, lambda: len(deltas(worker, key)) > 6)
    cancel(worker, key, (0, 2))
    assert counts(worker) == [0, 0, 0, 0]
    turn_until(
        worker,
        lambda: not worker.engine.knows(key) and any(d.finish_reason for d in deltas(worker, key)),
    )
    assert counts(worker) == [1, 1, 1, 1]
    worker.close()


@pytest.mark.parametrize("how", ["choices one by one", "the leg", "its router"])
def test_a_cancelled_leg_counts_once(tiny_llama: Path, how: str) -> None:
    worker = alone(tiny_llama)
    key = RequestKey(ROUTER, SESSION, "a", 1)
    worker.command(submit(key, "full", list(range(40)), long(2)))
    turn_until(worker, lambda: len(deltas(worker, key)) > 4)
    if how == "its router":
        worker.command(RouterLost(router_id=ROUTER, session=SESSION))
    else:
        for choices in [(0,), (1,)] if how == "choices one by one" else [None]:
            cancel(worker, key, choices)
        cancel(worker, key)
    for _ in range(5):
        worker.loop.turn()
    assert counts(worker) == [1, 1, 1, 1]
    assert counted(worker, "pdserve_request_decode_time_seconds")[1] > 0
    worker.close()


def test_a_leg_that_is_cancelled_while_it_waits_counts_as_waiting(tiny_llama: Path) -> None:
    worker = alone(tiny_llama, max_num_seqs=1)
    first, second = (RequestKey(ROUTER, SESSION, name, 1) for name in "ab")
    for key in (first, second):
        worker.command(submit(key, "full", list(range(40)), long(1)))
    turn_until(worker, lambda: len(deltas(worker, first)) > 4)
    cancel(worker, second)
    assert counts(worker) == [1, 0, 0, 0]
    turn_until(worker, lambda: not worker.engine.knows(first))
    worker.loop.turn()
    assert counts(worker) == [2, 1, 1, 1]
    worker.close()


def test_a_cancel_behind_a_prefill_leg_does_not_count_it_again(tiny_llama: Path) -> None:
    pair = Pair(tiny_llama)
    handoff, _ = pair.prefill(list(range(40)), long(1))
    assert handoff is not None and counts(pair.p) == [1, 1, 1, 1]
    cancel(pair.p, handoff.ticket.key)
    pair.turn()
    assert counts(pair.p) == [1, 1, 1, 1]
    pair.close()
