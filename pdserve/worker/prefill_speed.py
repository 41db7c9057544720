"""Measures how fast this worker computes prompts: work (protocol.prompt_work) per second, over its
latest steps that were mostly prompt.

A step takes a fixed time, and a time for each token. The time per token is what a queue of prompts
costs. It is the same for workers that happened to get short prompts and those that got long ones,
so a line is fitted through the steps. The fixed time is little of a larger step. If most tokens
were in larger steps, the mean of these counts. A line through them would mislead: a step deep in a
prompt takes longer than one that begins it, and the rows up to some 200 are nearly free on a GPU.
A step that something held up, such as a kernel that was compiled, says nothing and is left out of
the mean: routers would send such a worker no more prompts, and it would never show its real speed.
A few steps may have been slow for such a reason too, so a speed becomes old: the sooner, the fewer
steps it comes from. Routers then try the worker again (`router.choosing.predict`). Only steps that
are not much smaller than the others confirm a speed, since a worker that seems slow gets the
prompts of which it holds nearly all. Small steps that are alike hide how much of them is the fixed
time, so the worker is at least as fast.
`worker.status` feeds and reads it; routers predict queues with it.
"""

from collections import deque
from statistics import median_low

KEPT = 0.95  # Share of the sums that is kept at each step, so that about the latest 20 count.
LEAST_ROWS = 16  # A step with fewer rows says nothing about prompts.
LARGE_ROWS = 256  # The fixed time of a step with so many rows is a small part.
NUM_LARGE = 20  # The latest of them count.
HELD_UP = 3.0  # A step that takes so many times the median's time per token was held up.
# Seconds for which a speed of one step is not old. With n steps it is n^2 times as long, and 20
# count at most. So one slow step keeps prompts away for half a second. A worker that is really slow
# is tried 8 times in its first minute, and then ever more seldom, down to once in 200 s.
KEPT_S = 0.5
# A step confirms a speed if it has this share of the usual work, or more. The usual work is that of
# LARGE_ROWS at most, so every step of 128 rows confirms.
CONFIRMS = 0.5
USUAL_KEPT = 0.9  # Factor on the usual work when a step with less confirms.
FASTER = 1.5  # A step that is so many times as fast as old ones shows that they were held up.
# Limit for the line's speed, as a multiple of tokens / seconds: a few steps may be misleading.
MAX_GAIN = 4.0


def is_mostly_prompt(num_rows: int, num_sequences: int) -> bool:
    """True if a step of this many tokens and sequences was mostly prompt: a decode has one row
    each."""
    return num_rows >= 2 * num_sequences


class PrefillSpeed:
    """`now` is in monotonic seconds everywhere."""

    def __init__(self) -> None:
        self._latest = self._num_confirming = self._usual_work = 0.0
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0
        self._large_tokens = 0.0
        self._large: deque[tuple[float, float]] = deque(maxlen=NUM_LARGE)  # work, seconds

    def observe(
        self, num_rows: int, num_sequences: int, seconds: float, now: float, weight: float = 1.0
    ) -> None:
        """Takes note of a step that ended `now`; steps that are mostly decoding are left out.

        If the speed is old and this step is much faster, the steps before it are forgotten.
        `weight` is the work of its prompts per token.
        """
        if num_rows < LEAST_ROWS or not is_mostly_prompt(num_rows, num_sequences):
            return
        work = num_rows * weight
        if self.is_old(now) and work > FASTER * seconds * self.tokens_per_s:
            self._keep(0.0)
            self._large.clear()
            self._num_confirming = self._usual_work = 0.0
        if work >= CONFIRMS * self._usual_work:
            self._latest = now
            self._num_confirming = KEPT * self._num_confirming + 1
            usual = USUAL_KEPT * self._usual_work + (1 - USUAL_KEPT) * work
            self._usual_work = min(LARGE_ROWS, max(work, usual))
        self._keep(KEPT)
        self._weight += 1
        self._tokens += work
        self._seconds += seconds
        self._squares += work * work
        self._products += work * seconds
        if num_rows >= LARGE_ROWS:
            self._large_tokens += work
            self._large.append((work, seconds))

    def _keep(self, share: float) -> None:
        self._weight *= share
        self._tokens *= share
        self._seconds *= share
        self._squares *= share
        self._products *= share
        self._large_tokens *= share

    @property
    def tokens_per_s(self) -> float:
        """The speed; 0 before the first such step."""
        if not self._seconds:
            return 0.0
        if self._is_of_large:
            return self._mean_of_large()
        plain = self._tokens / self._seconds
        return min(MAX_GAIN * plain, max(plain, self._slope()))

    @property
    def is_least(self) -> bool:
        """True if the worker is at least as fast as that: its steps were small, and too few or too
        alike to separate their fixed time from the rest."""
        if not self._seconds or self._is_of_large:
            return False
        return not 0 < self._slope() <= MAX_GAIN * self._tokens / self._seconds

    @property
    def _is_of_large(self) -> bool:
        return self._large_tokens > self._tokens / 2

    def _slope(self) -> float:
        """The line's speed; 0 if the steps show no line."""
        spread = self._weight * self._squares - self._tokens * self._tokens
        growth = self._weight * self._products - self._tokens * self._seconds
        is_alike = spread <= 0.01 * self._tokens * self._tokens
        return 0.0 if is_alike or growth <= 0 else spread / growth

    def is_old(self, now: float) -> bool:
        """True if there were steps, but the last one that confirmed the speed was longer ago than
        their number allows."""
        return 0 < KEPT_S * self._num_confirming**2 < now - self._latest

    def _mean_of_large(self) -> float:
        most = HELD_UP * median_low(seconds / work for work, seconds in self._large)
        kept = [(work, seconds) for work, seconds in self._large if seconds <= most * work]
        return sum(work for work, _ in kept) / sum(seconds for _, seconds in kept)
