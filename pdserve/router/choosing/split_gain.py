"""Keeps track of what splitting gains: predicted milliseconds, over the prompts of the latest
minutes that could be split.

Counts only; decides nothing. `router.choosing.choose` feeds it with each decision. The router's
metrics and reports read it, and so does `cluster.scaling.balancer`, which logs once if splitting
does not pay.
"""

from collections import deque
from dataclasses import dataclass

WINDOW_S = 120.0
BUCKET_S = 10.0
GAIN_MS = 5.0  # a smaller saving counts as none
PAYING_SHARE = 0.05  # share of the prompts that must gain for splitting to pay
LEAST_PROMPTS = 50  # fewer prompts say nothing


@dataclass(slots=True)
class _Bucket:
    since: float
    num_prompts: int = 0
    num_gaining: int = 0
    gain_ms: float = 0.0


class SplitGain:
    """A sliding window of what splitting gains. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque()
        self._began: float | None = None

    def note(self, gain_ms: float, now: float) -> None:
        """Notes a placed prompt that could be split.

        `gain_ms` says how much cheaper the split is than the best way to do the prompt whole;
        negative if it is dearer.
        """
        self._began = now if self._began is None else self._began
        self._forget(now)
        if not self._buckets or now - self._buckets[-1].since >= BUCKET_S:
            self._buckets.append(_Bucket(now))
        bucket = self._buckets[-1]
        bucket.num_prompts += 1
        bucket.num_gaining += gain_ms > GAIN_MS
        bucket.gain_ms += gain_ms

    def mean_s(self, now: float) -> float:
        """Returns seconds saved per prompt that could be split; 0 if there were none."""
        self._forget(now)
        count = self._num_prompts()
        return sum(bucket.gain_ms for bucket in self._buckets) / 1000 / count if count else 0.0

    def pays(self, now: float) -> bool | None:
        """True if splitting pays at all; None if too few prompts came to say."""
        self._forget(now)
        count = self._num_prompts()
        if self._began is None or now - self._began < WINDOW_S or count < LEAST_PROMPTS:
            return None
        gaining = sum(bucket.num_gaining for bucket in self._buckets)
        return gaining >= PAYING_SHARE * count

    def _num_prompts(self) -> int:
        return sum(bucket.num_prompts for bucket in self._buckets)

    def _forget(self, now: float) -> None:
        while self._buckets and now - self._buckets[0].since >= WINDOW_S:
            self._buckets.popleft()


def described(gain: SplitGain, now: float) -> str:
    """Returns a line for operators that says whether splitting pays."""
    saved_ms = 1000 * gain.mean_s(now)
    match gain.pays(now):
        case None:
            return "splitting: too few recent prompts to say whether it pays"
        case True:
            return f"splitting pays: it saves {saved_ms:.1f} ms per prompt that could be split"
        case False:
            return (
                f"splitting does not pay here: it saves {saved_ms:.1f} ms per prompt that could be "
                "split; workers that do whole requests (mode: aggregated) would serve as well"
            )
