"""Measures how fast this worker computes prompts: work (protocol.prompt_work) per second, over its
latest steps that were mostly prompt.

A step takes a fixed time, and a time for each token. The time per token is what a queue of prompts
costs. It is the same for workers that happened to get short prompts and those that got long ones,
so a line is fitted through the steps. The fixed time is little of a larger step. If most tokens
were in larger steps, the mean of these counts. A line through them would mislead: a step deep in a
prompt takes longer than one that begins it, and the rows up to some 200 are nearly free on a GPU.
A step that something held up, such as a kernel that was compiled, says nothing and is left out of
the mean: routers would send such a worker no more prompts, and it would never show its real speed.
A few small steps may have been slow for such a reason too, so a speed becomes old: the sooner, the
fewer steps it comes from. Routers then try the worker again (`router.choosing.predict`).
`worker.status` feeds and reads it; routers predict queues with it.
"""

from collections import deque
from statistics import median_low

KEPT = 0.95  # Share of the sums that is kept at each step, so that about the latest 20 count.
LEAST_ROWS = 16  # A step with fewer rows says nothing about prompts.
LARGE_ROWS = 256  # The fixed time of a step with so many rows is a small part.
NUM_LARGE = 20  # The latest of them count.
HELD_UP = 3.0  # A step that takes so many times the median's time per token was held up.
# Seconds for which each step of a speed keeps it from becoming old. So one slow step keeps prompts
# away for 10 s, and a worker that is really slow is soon tried only every 200 s.
KEPT_S = 10.0
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
        self._latest = 0.0
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
        self._latest = now
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
        if self._large_tokens > self._tokens / 2:
            return self._mean_of_large()
        plain = self._tokens / self._seconds
        spread = self._weight * self._squares - self._tokens * self._tokens
        growth = self._weight * self._products - self._tokens * self._seconds
        # The steps are too alike to separate the fixed time from the rest.
        if spread <= 0.01 * self._tokens * self._tokens or growth <= 0:
            return plain
        return min(MAX_GAIN * plain, max(plain, spread / growth))

    def is_old(self, now: float) -> bool:
        """True if there were steps, but the last one was longer ago than their number allows."""
        return 0 < KEPT_S * self._weight < now - self._latest

    def _mean_of_large(self) -> float:
        most = HELD_UP * median_low(seconds / work for work, seconds in self._large)
        kept = [(work, seconds) for work, seconds in self._large if seconds <= most * work]
        return sum(work for work, _ in kept) / sum(seconds for _, seconds in kept)
