"""A circuit breaker: after several errors in a row nobody asks for a while. Then one probe decides.

    CLOSED --LIMIT errors in a row--> OPEN --`open_s` later, one probe--> CLOSED | OPEN

Pure bookkeeping, without a clock or a lock of its own; `threaded_pool.py` drives it.
"""

import math

LIMIT = 3  # consecutive errors that open it


class Breaker:
    """State of the breaker. open_s: seconds it stays open before a probe."""

    def __init__(self, open_s: float) -> None:
        self._open_s = open_s
        self._errors = 0
        self.probe_at = math.inf
        """Time at which the next probe is due; inf while closed and while a probe runs."""
        self.is_open = False

    def succeeded(self) -> None:
        """Count an answered request. While open, only a probe closes the breaker: see `probed`."""
        if not self.is_open:
            self._errors = 0

    def failed(self, now: float) -> bool:
        """Count an error of a request. Returns True if it opened the breaker."""
        self._errors += 1
        if self.is_open or self._errors < LIMIT:
            return False
        self.is_open = True
        self.probe_at = now + self._open_s
        return True

    def begin_probe(self) -> None:
        self.probe_at = math.inf

    def probed(self, good: bool, now: float) -> None:
        """Take the result of the probe."""
        self._errors = 0
        self.is_open = not good
        self.probe_at = math.inf if good else now + self._open_s
