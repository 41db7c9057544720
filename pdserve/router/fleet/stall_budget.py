"""How much of a decode worker's time whole prompts may take from the sequences it decodes: a leaky
bucket.

Without it, the prompts that come while P's queue is long all go to D at once, and those that D
decodes just then pay for all of them. Owned by `router.fleet.worker_state`, asked by
`router.choosing.split_rule`.
"""

SHARE = 0.05  # of the worker's time
BURST_MS = 100.0


class StallBudget:
    """Times are monotonic seconds, stalls milliseconds."""

    def __init__(self) -> None:
        self._level_ms = 0.0
        self._at = 0.0

    def allows(self, stall_ms: float, now: float) -> bool:
        """One stall of any length when the bucket is empty, else up to BURST_MS in it."""
        level = self._left(now)
        return level == 0 or level + stall_ms <= BURST_MS

    def spend(self, stall_ms: float, now: float) -> None:
        self._level_ms = self._left(now) + stall_ms
        self._at = now

    def _left(self, now: float) -> float:
        return max(0.0, self._level_ms - 1000 * SHARE * (now - self._at))
