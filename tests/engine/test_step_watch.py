"""The clock of a step, and the thread that looks at it."""

import threading
import time

from pdserve.engine.stepping.step_watch import StepClock, StepWatch


def test_a_clock_runs_during_a_step_alone() -> None:
    clock = StepClock()
    assert clock.age_s == 0.0
    clock.start()
    time.sleep(0.02)
    assert clock.age_s >= 0.02
    clock.stop()
    assert clock.age_s == 0.0


def test_a_step_that_hangs_is_told_once() -> None:
    clock, told, reasons = StepClock(), threading.Event(), []

    def hung(reason: str) -> None:
        reasons.append(reason)
        told.set()

    clock.start()
    clock.stop()
    clock.start()
    watch = StepWatch(clock, 0.05, hung)
    assert told.wait(5.0)
    time.sleep(0.1)
    watch.stop()
    assert reasons == ["step 2 took longer than engine.step_deadline_s (0.05 s)"]


def test_many_short_steps_are_no_long_one() -> None:
    clock, reasons = StepClock(), list[str]()
    watch = StepWatch(clock, 0.5, reasons.append)
    for _ in range(100):
        clock.start()
        time.sleep(0.01)
        clock.stop()
    watch.stop()
    assert not reasons
