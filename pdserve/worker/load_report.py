"""Reports to routers between two Snapshots when this worker's load has changed much.

Compares the load with the last report. Knows no sockets. Fed by `worker.status`, sent by
`worker.loop`.
"""

import math

from pdserve.protocol.events import Load

PERIOD_S = 0.1  # least time between two reports
QUEUE_TOKENS = 1024  # least change of the queue that is worth a message
DECODE_SHARE, LEAST_DECODES = 0.1, 2  # least change of the running sequences: share and number


class LoadReport:
    """Keeps the load that routers have heard of. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._looked_at = -math.inf
        self._queue_tokens = 0
        self._num_running = 0

    def is_due(self, now: float) -> bool:
        """True if it is time to look at the load again; this counts as a look."""
        if now < self._looked_at + PERIOD_S:
            return False
        self._looked_at = now
        return True

    def told(self, queue_tokens: int, num_running: int) -> None:
        """Notes what routers have heard, in a Snapshot or a Load."""
        self._queue_tokens = queue_tokens
        self._num_running = num_running

    def has_changed(self, load: Load) -> bool:
        """True if the load differs much from what routers have heard."""
        most = max(LEAST_DECODES - 1, DECODE_SHARE * self._num_running)
        return (
            abs(load.queue_tokens - self._queue_tokens) > QUEUE_TOKENS
            or abs(load.num_running - self._num_running) > most
        )
