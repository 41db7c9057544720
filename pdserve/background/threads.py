"""Background threads that do not end without a word: what one raises is logged with its traceback
and counted.

    running --returns--> ended
      |  ^
    raises, logged and counted
      '--pause: as in `tasks.keep`; `finish` cuts it short --> ended

The same function runs again on the same thread, so it must find its state whole wherever it raised.
Knows nothing of what the threads do. Used for everything that an engine's process does beside its
engine's loop; an error of that loop ends the process.
"""

import logging
import threading
import time
from collections.abc import Callable

from prometheus_client import Counter

from pdserve.background.tasks import Pauses

logger = logging.getLogger(__name__)

# One counter per process, which its worker's metrics hold.
FAILURES = Counter(
    "pdserve_thread_failures",
    "Errors that ended a run of a background thread of this process.",
    ["thread"],
    registry=None,
)


class KeptThread(threading.Thread):
    """Starts at once; runs `run` until it returns, and after an error again. name: one of few, a
    metric's label. of: what this thread is for, where there are several of that name.
    longest_pause_s: bound of the pause before another run."""

    def __init__(
        self, name: str, run: Callable[[], None], of: str = "", longest_pause_s: float = 5.0
    ) -> None:
        super().__init__(name=f"{name} {of}".strip(), daemon=True)
        self._label = name
        self._work = run
        self._pauses = Pauses(longest_pause_s)
        self._finishing = threading.Event()
        FAILURES.labels(name)  # counts from zero: the first failure is a step that a query sees
        self.start()

    def run(self) -> None:
        try:
            while not self._returns():
                pass
        finally:
            del self._work  # its owner has this thread, too

    def _returns(self) -> bool:
        """Run once. Whether that was the last time; else the pause after its error is over."""
        began = time.monotonic()
        try:
            self._work()
        except Exception as error:
            FAILURES.labels(self._label).inc()
            logger.error("background thread %s failed", self.name, exc_info=error)
            return self._finishing.wait(self._pauses.after(time.monotonic() - began))
        return True

    def finish(self, timeout_s: float | None = None) -> bool:
        """Wait, no longer than that, until it ends: what it runs has been told to return, and is
        not run again. Whether it has ended."""
        self._finishing.set()
        self.join(timeout_s)
        return not self.is_alive()
