"""Estimates how many more tokens a stream will have, from the streams that ended lately.

A stream of unknown length must not owe more time than its tokens can make good: that needs a
cautious estimate. What routers are told is the mean. Knows counts only. Kept by `pace.Pace`, which
is told the length of each stream that ends.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

KEPT = 256  # number of ended streams that are remembered
LEAST_KNOWN = 8  # streams that must have got as far; fewer give no estimate
FEW = 5  # one in FEW of these streams may have had fewer tokens than the estimate
# Without an estimate, a stream is assumed to have UNKNOWN tokens in all, or the share ASKED of the
# tokens that it asked for, whichever is more.
UNKNOWN = 16
ASKED = 0.5


class Lengths:
    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def ended(self, num_tokens: int) -> None:
        """Record that a stream with num_tokens tokens ended."""
        if len(self._latest) == KEPT:
            oldest = self._latest.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._latest.append(num_tokens)
        insort(self._sorted, num_tokens)

    def left(self, num_tokens: int, most: int) -> int:
        """Cautious estimate of how many tokens a stream will still have. num_tokens: tokens it has
        now; most: maximum number of further tokens."""
        first = bisect_right(self._sorted, num_tokens)
        num_longer = len(self._sorted) - first
        if num_longer < LEAST_KNOWN:
            return _assumed(num_tokens, most)
        return min(most, self._sorted[first + num_longer // FEW] - num_tokens)

    def mean_left(self, streams: Sequence[tuple[int, int]]) -> float:
        """Estimate how many tokens these streams will still have, on average; 0 without streams.
        streams: for each one its tokens now, and the maximum number of further ones."""
        totals = [0, *accumulate(reversed(self._sorted))]  # of the longest ones
        found = 0.0
        for num_tokens, most in streams:
            num_longer = len(self._sorted) - bisect_right(self._sorted, num_tokens)
            if num_longer < LEAST_KNOWN:
                found += _assumed(num_tokens, most)
            else:
                found += min(most, totals[num_longer] / num_longer - num_tokens)
        return found / len(streams) if streams else 0.0


def _assumed(num_tokens: int, most: int) -> int:
    """Returns how many more tokens a stream has of which nothing is known."""
    total = max(UNKNOWN, int(ASKED * (num_tokens + most)))
    return min(most, max(0, total - num_tokens))
