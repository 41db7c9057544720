"""Limits how much of a decode worker's time whole prompts may take from the sequences it decodes: a
leaky bucket.

Without it, all prompts that come while P's queue is long would go to D at once, and the sequences
that D is decoding would pay for all of them. Owned by `router.fleet.worker_state`, used by
`router.choosing.split_rule`.
"""

SHARE = 0.05  # share of the worker's time
BURST_MS = 100.0


class StallBudget:
    """A leaky bucket of stalls. Times are monotonic seconds, stalls are milliseconds."""

    def __init__(self) -> None:
        self._level_ms = 0.0
        self._at = 0.0

    def allows(self, stall_ms: float, now: float) -> bool:
        """True if the bucket is empty, or has room for the stall up to BURST_MS."""
        level = self._left(now)
        return level == 0 or level + stall_ms <= BURST_MS

    def spend(self, stall_ms: float, now: float) -> None:
        self._level_ms = self._left(now) + stall_ms
        self._at = now

    def _left(self, now: float) -> float:
        return max(0.0, self._level_ms - 1000 * SHARE * (now - self._at))
