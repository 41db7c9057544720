"""Measures this worker's load: the share of time in which it computes prompts, and how long a
running sequence waits for its next token.

Both fade with FADE_S. So a snapshot per second shows neither a single step nor the state of a
minute ago. `worker.status` feeds it with every turn, and Snapshots report it; the autoscaler reads
it there (docs/design/elasticity.md). Times are monotonic seconds.
"""

import math

FADE_S = 5.0


class LoadMeter:
    def __init__(self, now: float) -> None:
        self._at = now
        self._busy = self._span = 0.0
        self._intervals = self._steps = 0.0
        # End of the previous step; None if the engine has rested since.
        self._last_end: float | None = None

    def turned(
        self,
        began: float,
        ended: float,
        stepped: bool,
        mostly_prompt: bool = False,
        share: float = 1.0,
    ) -> None:
        """Notes a turn that computed a step, or had nothing to compute.

        `mostly_prompt` is as `prefill_speed` defines it. `share` is the share of the running
        sequences that the step was for.
        """
        self._fade(ended)
        if not stepped:
            self._last_end = None
            return
        if mostly_prompt:
            self._busy += FADE_S * (1 - math.exp((began - ended) / FADE_S))
        self._intervals += ended - (began if self._last_end is None else self._last_end)
        self._steps += share
        self._last_end = ended

    def busy(self, now: float) -> float:
        """Returns a share from 0 to 1.

        Decoding does not count: a worker that decodes at all does so all the time.
        """
        self._fade(now)
        return min(1.0, self._busy / self._span) if self._span > 0 else 0.0

    @property
    def token_interval_s(self) -> float:
        """Time between two tokens of a running sequence; 0 before the first step."""
        return self._intervals / self._steps if self._steps else 0.0

    def _fade(self, now: float) -> None:
        seconds = max(0.0, now - self._at)
        kept = math.exp(-seconds / FADE_S)
        self._busy *= kept
        self._span = self._span * kept + FADE_S * (1 - kept)
        self._intervals *= kept
        self._steps *= kept
        self._at = max(self._at, now)
