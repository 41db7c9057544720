"""Where a leg's time went: the clock by hand, and through both workers of a hand-off."""

import time
from pathlib import Path

import msgspec
import pytest
from pair import Pair, Worker, deltas, submit

from pdserve.configs.schema import TransferConfig
from pdserve.engine.protocol import (
    Delta,
    EventBatch,
    LegTimes,
    PromptScored,
    RequestKey,
    SamplingParams,
    decode_batch,
)
from pdserve.worker.leg_clock import LegClock

GREEDY = SamplingParams(temperature=0, max_tokens=9, seed=1)


def delta(reason: str | None = None, position: int = 0) -> Delta:
    return Delta("r", 1, 0, position, (5,), reason)  # type: ignore[arg-type]


SCORED = PromptScored(request_id="r", attempt=1, cached_tokens=0)


def test_a_leg_from_arrival_to_its_last_token() -> None:
    clock = LegClock(arrived=10.0, num_choices=1, one_token=False)
    clock.planned(12.0, device_seconds=100.0)
    clock.planned(14.0, device_seconds=101.0)  # after a preemption
    assert clock.see(SCORED, 15.0, 102.0) is None and clock.see(delta(), 15.0, 102.0) is None
    assert clock.see(delta("length", 8), 20.0, 106.5) == LegTimes(2.0, 3.0, 5.0, 6.5)
    assert clock.done


def test_choices_end_one_by_one_and_the_device_never_takes_more_than_there_was() -> None:
    clock = LegClock(arrived=0.0, num_choices=2, one_token=True)
    clock.planned(1.0, device_seconds=0.0)
    clock.see(SCORED, 2.0, 3.0)
    assert clock.see(delta(), 2.0, 3.0) == LegTimes(1.0, 1.0, 0.0, 1.0) and not clock.done
    assert clock.see(delta("stop"), 2.5, 3.0) == LegTimes(1.0, 1.0, 0.5, 1.5) and clock.done


def test_an_older_worker_sends_no_times() -> None:
    old = {"worker_id": "w", "incarnation": 1, "events": [["d", "r", 1, 0, 0, [5], None, None, None]]}
    new = {**old, "events": [[*old["events"][0], [1.0, 2.0, 3.0, 4.0], "a field to come"]]}  # type: ignore[misc]
    assert decode_batch(msgspec.msgpack.encode(old)) == EventBatch(worker_id="w", incarnation=1, events=(delta(),))
    [event] = decode_batch(msgspec.msgpack.encode(new)).events
    assert isinstance(event, Delta) and event.times == LegTimes(1.0, 2.0, 3.0, 4.0)


def counted(worker: Worker, name: str) -> tuple[float, float]:
    """Count and sum of a histogram."""
    samples = {sample.name: sample.value for family in worker.loop.snapshot().metrics for sample in family.samples}
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
        for name, seconds in zip(("queue", "prefill", "decode", "device"), vars_of(last), strict=True):
            assert counted(worker, f"pdserve_request_{name}_time_seconds") == (1, pytest.approx(seconds))
    assert [e.times for e in pair.d.events if isinstance(e, Delta) and e.finish_reason is None] == [None] * (
        7 * num_choices
    )
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
    assert second.queue_s > first.prefill_s + first.decode_s > first.queue_s
    pair.close()


def test_a_command_that_came_during_a_step_has_waited(tiny_llama: Path) -> None:
    worker = Worker(tiny_llama, "W", "decode", TransferConfig(connector="local"), device="cpu", num_kv_blocks=64)
    assert worker.loop._arrival() == pytest.approx(time.monotonic(), abs=0.01)
    worker.command(submit(RequestKey("router", 7, "a", 1), "full", list(range(40)), GREEDY))
    worker.loop.turn()
    time.sleep(0.1)
    assert 0.04 < time.monotonic() - worker.loop._arrival() < 0.09
    worker.close()
