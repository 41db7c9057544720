"""Says when the next token of a stream is due.

A stream was promised a mean time between its tokens, counted from its first one. Time that it
earned in quick steps may be spent on a slow one. A stream may be late after a hand-off, a
preemption or a bad prediction. It is then brought in over its next tokens, not at once. One that
cannot be brought in any more starts anew. Knows no sequences and no clock: times are arguments.
Each sequence that decodes keeps one; only `pace.Pace` uses it.
"""

import math
from dataclasses import dataclass
from typing import Protocol

YOUNG = 16  # minimum number of tokens over which a late stream is brought in
LONGEST = 64  # maximum number; a stream that needs more is given up
REPAID = 0.5  # share of what a stream gains per token that repays its debt; prompts get the rest


@dataclass(slots=True)
class Promise:
    """The due times of one stream's tokens."""

    first_at: float  # when its first token was accepted, or is assumed to have been (clock seconds)
    # Seconds of lateness that are allowed at token `since`. It shrinks to 0 over `over` tokens.
    lent: float = 0.0
    since: int = 0
    over: int = 1

    def slack(self, position: int, interval_s: float, at: float, owed_s: float = 0.0) -> float:
        """Seconds from `at` until its token at this position (0: the first) is due. interval_s:
        promised mean time between two tokens. owed_s: lateness that is allowed anyway."""
        late_s = max(self.grace(position), owed_s)
        return self.first_at + position * interval_s + late_s - at

    def grace(self, position: int) -> float:
        """Seconds that this token may be late, because the stream is being brought in."""
        left = self.since + self.over - position
        return self.lent * left / self.over if left > 0 else 0.0

    def lend(self, seconds: float, position: int, over: int) -> None:
        """Allow this lateness at a token; it must be made good `over` tokens later."""
        self.lent = seconds
        self.since = position
        self.over = max(1, over)

    def bring_in(self, late_s: float, position: int, tokens_left: int, gain_s: float) -> bool:
        """Give a late stream some tokens to make up for its lateness. Returns False if it cannot:
        then it counts as on time from now on, as if its first token had come later. gain_s: seconds
        that one token can be early."""
        longest = min(LONGEST, tokens_left)
        if late_s > longest * gain_s:
            self.first_at += late_s
            self.lent = 0.0
            return False
        over = math.ceil(late_s / (REPAID * gain_s))
        self.lend(late_s, position, min(max(over, YOUNG), longest))
        return True


class Stream(Protocol):
    """A sequence that decodes. first_token_at: in the clock's seconds; None if not known yet."""

    first_token_at: float | None
    promise: Promise | None

    @property
    def next_position(self) -> int: ...

    @property
    def tokens_left(self) -> int: ...


def begun(
    first_at: float | None,
    position: int,
    tokens_left: int,
    interval_s: float,
    gain_s: float,
    at: float,
) -> tuple[Promise, bool]:
    """The promise of a stream that is about to sample its first token here, and whether it can be
    kept. first_at: None means on time. Other arguments as in `Promise`."""
    promise = Promise(first_at if first_at is not None else at - (position - 1) * interval_s)
    kept = True
    late_s = interval_s - promise.slack(position, interval_s, at)
    if late_s > 0 and gain_s > 0:
        kept = promise.bring_in(late_s, position, tokens_left, gain_s)
    return promise, kept
