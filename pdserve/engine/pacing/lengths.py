"""How many more tokens a stream will probably have, from those that ended lately.

A stream of unknown length must not owe more time than its tokens can make good. Knows counts only.
Kept by `pace.Pace`, which hears of each stream that ends.
"""

from bisect import bisect_right, insort
from collections import deque

KEPT = 256  # streams that ended last
LEAST_KNOWN = 8  # fewer say nothing
FEW = 5  # of so many streams that got as far, one may have fewer tokens
UNKNOWN = 16  # tokens that a stream is taken to have in all, while nothing is known,
ASKED = 0.25  # or this share of those that it asked for


class Lengths:
    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def ended(self, num_tokens: int) -> None:
        """A stream ended that has so many tokens."""
        if len(self._latest) == KEPT:
            oldest = self._latest.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._latest.append(num_tokens)
        insort(self._sorted, num_tokens)

    def left(self, num_tokens: int, most: int) -> int:
        """Tokens that a stream which has so many, and gets at most so many more, will still have
        at least, as far as one can tell."""
        first = bisect_right(self._sorted, num_tokens)
        num_longer = len(self._sorted) - first
        if num_longer < LEAST_KNOWN:
            asked = num_tokens + most
            return min(most, max(0, max(UNKNOWN, int(ASKED * asked)) - num_tokens))
        return min(most, self._sorted[first + num_longer // FEW] - num_tokens)
