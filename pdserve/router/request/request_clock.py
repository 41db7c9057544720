"""Measures the times of one prompt's tokens, for the metrics, its report, and Goodput.

Counts into `router.metrics` as tokens come. Knows no workers and no text.
`router.request.request_run` keeps one per prompt.
"""

import time

from pdserve.router.metrics import RouterMetrics
from pdserve.router.request.record import RequestRecord

JUST_NOW_MS = 1e-3  # since a first token that was accepted at this moment


class RequestClock:
    """The times of one request's tokens, which it adds to the metrics."""

    def __init__(self, metrics: RouterMetrics, n: int, received: float) -> None:
        self._metrics = metrics
        self._received = received
        self.started = time.perf_counter()
        self.ended: float | None = None
        self.outcome: str | None = None
        self._first: list[float | None] = [None] * n
        self._last = [0.0] * n
        self._counts = [0] * n
        self._pausing: set[int] = set()

    @property
    def first_token_s(self) -> float | None:
        """Seconds from admission to the first token of any choice; None before there is one."""
        known = [first for first in self._first if first is not None]
        return min(known) - self.started if known else None

    @property
    def worst_tpot_s(self) -> float | None:
        """Seconds per token of the slowest choice; None if no choice has two tokens."""
        return max(self._means(), default=None)

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token over the choices with two tokens or more; None without any."""
        means = self._means()
        return sum(means) / len(means) if means else None

    @property
    def waited_ms(self) -> float:
        """Milliseconds since the call arrived."""
        return 1000 * (time.perf_counter() - self._received)

    def first_ms_ago(self, choice: int) -> float:
        """Milliseconds since the choice's first token was accepted; 0 before there is one, and more
        than 0 afterwards, also at the same moment."""
        first = self._first[choice]
        return 0.0 if first is None else max(JUST_NOW_MS, 1000 * (time.perf_counter() - first))

    def accepted(self, choice: int, num_tokens: int) -> None:
        now = time.perf_counter()
        if self._first[choice] is None:
            self._first[choice] = now
            self._metrics.ttft.observe(now - self._received)
        else:
            self._metrics.itl.observe(now - self._last[choice])
        if self._pausing:
            self._resumed(choice, now)
        self._last[choice] = now
        self._counts[choice] += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)

    def failed_over(self) -> None:
        """Notes that choices which have tokens now wait for more from another worker."""
        self._pausing = {choice for choice, first in enumerate(self._first) if first is not None}

    def _resumed(self, choice: int, now: float) -> None:
        if choice in self._pausing:
            self._pausing.discard(choice)
            self._metrics.pause.observe(now - self._last[choice])

    def begin(self, num_prompt_tokens: int) -> None:
        self._metrics.running.inc()
        self._metrics.prompt_tokens.inc(num_prompt_tokens)
        self._metrics.prompt_lengths.observe(num_prompt_tokens)

    def end(self, outcome: str, record: RequestRecord) -> None:
        self.ended = time.perf_counter()
        self.outcome = outcome
        metrics = self._metrics
        metrics.running.dec()
        metrics.requests.labels(outcome).inc()
        metrics.cached_tokens.inc(record.cached_tokens or 0)
        metrics.generation_lengths.observe(record.num_tokens)
        for choice in record.choices:
            unfinished = "abort" if outcome == "cancelled" else "error"
            metrics.successes.labels(choice.finish_reason or unfinished).inc()
        for mean in self._means():
            metrics.tpot.observe(mean)

    def _means(self) -> list[float]:
        """Seconds per token after the first, for each choice that has more than one token."""
        timed = zip(self._first, self._last, self._counts, strict=True)
        return [
            (last - first) / (count - 1)
            for first, last, count in timed
            if first is not None and count > 1
        ]
