"""Virtual time: a clock that jumps to the next event and replaces all clocks of this process.

    patch_clocks()       before any other module of pdserve is imported, in a process of its own
    VirtualLoop          an asyncio loop that never waits: it moves the clock to its next timer

Code that simulates something long sets the clock forward by hand (`CLOCK.now`). It sets the clock
back if others must act before that time is over. This module knows nothing about the simulation. It
imports nothing of pdserve, so that the clocks are patched first.
"""

import asyncio
import selectors
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

START_S = 1000.0
EPOCH_S = 1_800_000_000.0  # time.time() when the clock shows 0
SECONDS = ("monotonic", "perf_counter", "time")
NANOSECONDS = ("monotonic_ns", "perf_counter_ns", "time_ns")
REAL = {name: getattr(time, name) for name in (*SECONDS, *NANOSECONDS, "sleep")}


class Clock:
    """A clock. `now` is in seconds, and time.monotonic() returns it."""

    def __init__(self) -> None:
        self.now = START_S


CLOCK = Clock()


class NothingLeft(RuntimeError):
    """All tasks wait and no timer is set, so nothing will ever happen."""


def patch_clocks() -> None:
    """Makes all clocks of the `time` module show CLOCK, and forbids sleeping."""
    patched = time.__dict__
    patched["monotonic"] = patched["perf_counter"] = lambda: CLOCK.now
    patched["time"] = lambda: EPOCH_S + CLOCK.now
    patched["monotonic_ns"] = patched["perf_counter_ns"] = lambda: int(CLOCK.now * 1e9)
    patched["time_ns"] = lambda: int((EPOCH_S + CLOCK.now) * 1e9)
    patched["sleep"] = _no_sleep


def _no_sleep(seconds: float) -> NoReturn:
    raise AssertionError(f"somebody sleeps for {seconds:g} s in virtual time")


class _Jump(selectors.SelectSelector):
    """A selector that never waits: every timeout has passed at once."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeft("tasks wait, but nothing is left that could happen")
        if timeout > 0:
            CLOCK.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time. It refuses executors, because threads would run in real
    time."""

    def __init__(self) -> None:
        super().__init__(_Jump())

    def time(self) -> float:
        return CLOCK.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> NoReturn:
        raise AssertionError(f"{func} would run in a thread, in real time")


def real_clocks_in_use(prefix: str = "pdserve") -> Iterator[str]:
    """Yields the places where modules whose names begin with `prefix` still hold a real clock: as a
    name of their own, or as a function's default."""
    real = set(map(id, REAL.values()))
    for name, module in sorted(sys.modules.items()):
        if name == __name__ or name.partition(".")[0] != prefix:
            continue
        for label, value in vars(module).items():
            if id(value) in real:
                yield f"{name}.{label}"
            members = vars(value).values() if isinstance(value, type) else (value,)
            for member in members:
                defaults = [
                    *(getattr(member, "__defaults__", None) or ()),
                    *(getattr(member, "__kwdefaults__", None) or {}).values(),
                ]
                if any(id(default) in real for default in defaults):
                    yield f"{name}.{label}: a default"
