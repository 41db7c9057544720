"""How fast this worker computes prompts: tokens a second, over its latest steps that were mostly
prompt.

A step takes fixed time and time for each token; the latter is what a queue of prompts costs, and
the same for workers that happened to get short prompts and those that got long ones, so a line is
fitted through the steps. Fed and read by `worker.status`; routers predict queues with it.
"""

KEPT = 0.95  # of the sums at each step: the latest 20 count
LEAST_ROWS = 16  # a step of fewer says nothing of prompts
# the line's speed is at most so much above tokens by seconds: a few steps may lie anyhow
MAX_GAIN = 4.0


def is_mostly_prompt(num_rows: int, num_sequences: int) -> bool:
    """Of a step of so many tokens for so many sequences: one that decodes has a row for each."""
    return num_rows >= 2 * num_sequences


class PrefillSpeed:
    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def observe(self, num_rows: int, num_sequences: int, seconds: float) -> None:
        """A step of so many tokens for so many sequences. One that is mostly decoding is left
        out."""
        if num_rows < LEAST_ROWS or not is_mostly_prompt(num_rows, num_sequences):
            return
        self._weight = KEPT * self._weight + 1
        self._tokens = KEPT * self._tokens + num_rows
        self._seconds = KEPT * self._seconds + seconds
        self._squares = KEPT * self._squares + num_rows * num_rows
        self._products = KEPT * self._products + num_rows * seconds

    @property
    def tokens_per_s(self) -> float:
        """0 before the first such step."""
        if not self._seconds:
            return 0.0
        plain = self._tokens / self._seconds
        spread = self._weight * self._squares - self._tokens * self._tokens
        growth = self._weight * self._products - self._tokens * self._seconds
        # too alike to tell the fixed time from the rest
        if spread <= 0.01 * self._tokens * self._tokens or growth <= 0:
            return plain
        return min(MAX_GAIN * plain, max(plain, spread / growth))
