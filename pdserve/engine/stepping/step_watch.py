"""Finds a step that hangs, in a collective that a rank does not reach or in a kernel that does not
end.

The engine's thread cannot notice this, because it waits itself. Used by `worker.hosts` and by an
`LLM` with several ranks.
"""

import threading
import time
from collections.abc import Callable

from pdserve.background.threads import KeptThread

LOOKS = 20  # looks at the clock per deadline
LONGEST_PAUSE_S = 1.0


class StepClock:
    """The start time of the running step. Set by the engine's thread, read by any thread.

    number: number of the running step, or of the last one; the first is 1.
    """

    def __init__(self) -> None:
        self.number = 0
        self._began: float | None = None

    def start(self) -> None:
        self.number += 1
        self._began = time.monotonic()

    def stop(self) -> None:
        self._began = None

    @property
    def age_s(self) -> float:
        """Age of the running step in seconds; 0 if there is none."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began


class StepWatch:
    """A thread that looks at a step clock. on_hung: called there once, with a reason in words, if a
    step is older than deadline_s."""

    def __init__(self, clock: StepClock, deadline_s: float, on_hung: Callable[[str], None]) -> None:
        self._clock = clock
        self._deadline_s = deadline_s
        self._on_hung = on_hung
        self._stopping = threading.Event()
        self._thread = KeptThread("step watch", self._watch)

    def stop(self) -> None:
        """End the thread. After the return nothing is called any more. Must not be called from
        on_hung."""
        self._stopping.set()
        self._thread.finish()

    def _watch(self) -> None:
        pause = min(self._deadline_s / LOOKS, LONGEST_PAUSE_S)
        while not self._stopping.wait(pause):
            if self._clock.age_s > self._deadline_s:
                self._on_hung(
                    f"step {self._clock.number} took longer than engine.step_deadline_s "
                    f"({self._deadline_s:g} s)"
                )
                return
