"""How often background tasks and threads have failed, and what fails on purpose."""

import threading
from collections.abc import Callable
from typing import Any

from prometheus_client import Counter


def counts(counter: Counter) -> dict[str, float]:
    """Errors so far, by the name of the task or thread: `FAILURES` of `background.tasks` or
    `background.threads`."""
    [family] = counter.collect()
    totals = [sample for sample in family.samples if sample.name.endswith("_total")]
    return {name: sample.value for sample in totals for name in sample.labels.values()}


def from_now(counter: Counter) -> Callable[[str], float]:
    """Errors of a task or thread since this call."""
    before = counts(counter)
    return lambda name: counts(counter).get(name, 0.0) - before.get(name, 0.0)


class Faulty:
    """Raises at its first calls, and then does what it is for."""

    def __init__(self, work: Callable[..., Any] = lambda *_: None, faults: int = 1) -> None:
        self.num_calls = 0
        self._work = work
        self._faults = faults
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        with self._lock:
            self.num_calls += 1
            fails = self.num_calls <= self._faults
        if fails:
            raise KeyError("by test")
        return self._work(*args)
