"""A deficit counter: a share of the time that is owed, and paid in pieces.

Knows nothing of steps. Used by `pace` (time for prompts) and `scheduling.turns` (late prompts).
"""


class TimeShare:
    """A counter of owed time. share: of all time, 0 to 1. credit: seconds that are owed now; `earn`
    limits them."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.credit = 0.0

    def earn(self, seconds: float, most: float) -> None:
        """Add the share of a time in which somebody waited for it. most: limit of the credit."""
        self.credit = min(self.credit + self.share * seconds, most)

    def spend(self, seconds: float) -> None:
        """Pay this much time. Time beyond the credit is not held against the share."""
        self.credit = max(0.0, self.credit - seconds)

    def clear(self) -> None:
        """Set the credit to 0, because nobody waits any more."""
        self.credit = 0.0
