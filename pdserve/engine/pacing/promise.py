"""When the next token of a stream is due.

A stream was promised a mean time between its tokens, counted from its first one. What it has earned
by quicker steps may be spent on a slow one; a stream that is late (a hand-off, a preemption, a bad
prediction) is brought in over its next tokens, not at once, and one that cannot be brought in any
more starts anew. Knows no sequences and no clock: times are arguments. Kept by each sequence that
decodes, used by `pace.Pace` alone.
"""

import math
from dataclasses import dataclass

YOUNG = 16  # tokens over which a late stream is brought in at least
LONGEST = 64  # tokens over which a late stream is brought in at most; beyond it is given up
REPAID = 0.5  # share of what a stream gains per token that goes into its debt; prompts get the rest


@dataclass(slots=True)
class Promise:
    """first_at: when its first token was accepted, or is taken to have been, in the clock's
    seconds. lent: seconds of lateness that are allowed at token `since`, and fewer with each later
    one, to 0 after `over` of them."""

    first_at: float
    lent: float = 0.0
    since: int = 0
    over: int = 1

    def slack(self, position: int, interval_s: float, at: float, owed_s: float = 0.0) -> float:
        """Seconds from `at` until its token at this position (0: the first) is due. interval_s:
        promised mean time between two tokens. owed_s: so late it may be anyway."""
        late_s = max(self.grace(position), owed_s)
        return self.first_at + position * interval_s + late_s - at

    def grace(self, position: int) -> float:
        """Seconds that it may be late at this token, because it is being brought in."""
        left = self.since + self.over - position
        return self.lent * left / self.over if left > 0 else 0.0

    def lend(self, seconds: float, position: int, over: int) -> None:
        """It may be so late at this token, and must have made it good `over` tokens later."""
        self.lent = seconds
        self.since = position
        self.over = max(1, over)

    def bring_in(self, late_s: float, position: int, tokens_left: int, gain_s: float) -> bool:
        """It is late: give it some tokens to make that good. False when it cannot: then it is on
        time from now on, as if its first token had come later. gain_s: that a token can be early
        by."""
        longest = min(LONGEST, tokens_left)
        if late_s > longest * gain_s:
            self.first_at += late_s
            self.lent = 0.0
            return False
        over = math.ceil(late_s / (REPAID * gain_s))
        self.lend(late_s, position, min(max(over, YOUNG), longest))
        return True


def begun(
    first_at: float | None,
    position: int,
    tokens_left: int,
    interval_s: float,
    gain_s: float,
    at: float,
) -> tuple[Promise, bool]:
    """The promise of a stream that is to sample its first token here, and whether it can be kept.
    first_at: None: it is on time. Other arguments as above."""
    promise = Promise(first_at if first_at is not None else at - (position - 1) * interval_s)
    kept = True
    late_s = interval_s - promise.slack(position, interval_s, at)
    if late_s > 0 and gain_s > 0:
        kept = promise.bring_in(late_s, position, tokens_left, gain_s)
    return promise, kept
