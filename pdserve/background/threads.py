"""Runs background threads that do not end silently: errors are logged with their traceback and
counted.

    running --returns--> ended
      |  ^
    raises, logged and counted
      '--pause: as in `tasks.keep`; `finish` cuts it short --> ended

The same function runs again on the same thread, so its state must be valid wherever it raised.
Knows nothing of what the threads do. Used for everything that an engine's process does beside its
engine's loop. An error of that loop ends the process.
"""

import logging
import threading
import time
from collections.abc import Callable

from prometheus_client import Counter

from pdserve.background.tasks import Pauses

logger = logging.getLogger(__name__)

# There is one counter per process, in the metrics of its worker.
FAILURES = Counter(
    "pdserve_thread_failures",
    "Errors that ended a run of a background thread of this process.",
    ["thread"],
    registry=None,
)


class KeptThread(threading.Thread):
    """A thread that starts at once and runs `run` until it returns; after an error it runs again.

    `name` is a metric's label, so there must be few of them. `of` says what this thread is for, if
    several have that name. `longest_pause_s` limits the pause before another run.
    """

    def __init__(
        self, name: str, run: Callable[[], None], of: str = "", longest_pause_s: float = 5.0
    ) -> None:
        super().__init__(name=f"{name} {of}".strip(), daemon=True)
        self._label = name
        self._work = run
        self._pauses = Pauses(longest_pause_s)
        self._finishing = threading.Event()
        FAILURES.labels(name)  # starts at 0, so that queries see the first failure as an increase
        self.start()

    def run(self) -> None:
        try:
            while not self._returns():
                pass
        finally:
            del self._work  # breaks the cycle: the function's owner refers to this thread

    def _returns(self) -> bool:
        """Runs once. Returns True if that was the last time; otherwise the pause after its error is
        over."""
        began = time.monotonic()
        try:
            self._work()
        except Exception as error:
            FAILURES.labels(self._label).inc()
            logger.error("background thread %s failed", self.name, exc_info=error)
            return self._finishing.wait(self._pauses.after(time.monotonic() - began))
        return True

    def finish(self, timeout_s: float | None = None) -> bool:
        """Waits, at most this long, until the thread ends. Returns True if it has ended.

        What it runs must have been told to return; it is not run again.
        """
        self._finishing.set()
        self.join(timeout_s)
        return not self.is_alive()
