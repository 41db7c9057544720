"""Finds a step that hangs: a collective that a rank does not come to, a kernel that does not end.

The engine's thread cannot tell, for it waits itself. Used by `worker.hosts` and by an `LLM` of
several ranks.
"""

import threading
import time
from collections.abc import Callable

from pdserve.background.threads import KeptThread

LOOKS = 20  # within the deadline
LONGEST_PAUSE_S = 1.0


class StepClock:
    """Since when the step under way runs. Set by the thread of the engine, read by any."""

    def __init__(self) -> None:
        self._began: float | None = None

    def start(self) -> None:
        self._began = time.monotonic()

    def stop(self) -> None:
        self._began = None

    @property
    def age_s(self) -> float:
        """0 when no step is under way."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began


class StepWatch:
    """A thread that looks at a clock. on_hung: is called there once, when a step is older than
    deadline_s, with the reason in words."""

    def __init__(self, clock: StepClock, deadline_s: float, on_hung: Callable[[str], None]) -> None:
        self._clock = clock
        self._deadline_s = deadline_s
        self._on_hung = on_hung
        self._stopping = threading.Event()
        self._thread = KeptThread("step watch", self._watch)

    def stop(self) -> None:
        """Nothing is called any more once this has returned. Not from on_hung."""
        self._stopping.set()
        self._thread.finish()

    def _watch(self) -> None:
        pause = min(self._deadline_s / LOOKS, LONGEST_PAUSE_S)
        while not self._stopping.wait(pause):
            if self._clock.age_s > self._deadline_s:
                self._on_hung(
                    f"a step took longer than engine.step_deadline_s ({self._deadline_s:g} s)"
                )
                return
