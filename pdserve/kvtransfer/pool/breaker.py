"""A circuit breaker: after several errors in a row nobody asks for a while, then one probe decides.

    CLOSED --LIMIT errors in a row--> OPEN --`open_s` later, one probe--> CLOSED | OPEN

Pure bookkeeping without a clock or a lock of its own; `threaded_pool.py` drives it.
"""

import math

LIMIT = 3  # errors in a row that open it


class Breaker:
    """open_s: how long it stays open before a probe."""

    def __init__(self, open_s: float) -> None:
        self._open_s = open_s
        self._errors = 0
        self.probe_at = math.inf
        """When the next probe is due; inf while closed and while one runs."""
        self.is_open = False

    def succeeded(self) -> None:
        """A request or a probe was answered. While open only a probe closes it: see `probed`."""
        if not self.is_open:
            self._errors = 0

    def failed(self, now: float) -> bool:
        """A request had an error; True when this one opened the breaker."""
        self._errors += 1
        if self.is_open or self._errors < LIMIT:
            return False
        self.is_open = True
        self.probe_at = now + self._open_s
        return True

    def begin_probe(self) -> None:
        self.probe_at = math.inf

    def probed(self, good: bool, now: float) -> None:
        """The result of the probe."""
        self._errors = 0
        self.is_open = not good
        self.probe_at = math.inf if good else now + self._open_s
