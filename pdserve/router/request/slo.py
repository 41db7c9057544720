"""Goodput: counts whether requests got what `slo` promises, as their users measured it.

    answered --every target met--> none | ttft | tpot | both missed
    failed --> failed      429 --> refused
    its client left --a target was missed by then--> as above; else it is not counted: nobody knows

Counts only; refuses nothing (`router.admission` does). Called once per prompt, by
`router.request.run_report` or `router.request.service`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge

from pdserve.configs.router import SloConfig
from pdserve.router.errors import ApiError


class Goodput:
    """Counts prompts by the targets they missed. Without targets its families have no samples."""

    def __init__(self, slo: SloConfig, registry: CollectorRegistry) -> None:
        self._slo = slo
        self._requests = Counter(
            "pdserve_router_slo_requests",
            "Prompts by the SLO targets they missed.",
            ["missed"],
            registry=registry,
        )
        self._tokens = Counter(
            "pdserve_router_slo_tokens",
            "Generated tokens of prompts, by the SLO targets these missed.",
            ["missed"],
            registry=registry,
        )
        targets = Gauge(
            "pdserve_router_slo_target_seconds",
            "Promised times, by target.",
            ["target"],
            registry=registry,
        )
        for name, target_ms in (("ttft", slo.ttft_ms), ("tpot", slo.tpot_ms)):
            if target_ms is not None:
                targets.labels(name).set(target_ms / 1000)

    def ended(
        self,
        outcome: str,
        elapsed_s: float,
        ttft_s: float | None,
        tpot_s: float | None,
        num_tokens: int,
    ) -> None:
        """Counts a prompt that has ended.

        - `outcome` is "ok", "cancelled" (by its client), or the kind of its failure.
        - `elapsed_s` is the time since the request came.
        - `ttft_s` is the time to the first token of any choice; None if there is none.
        - `tpot_s` is that of the slowest choice; None if none has two tokens.
        """
        if not self._is_promised:
            return
        missed = self._missed(elapsed_s if ttft_s is None else ttft_s, tpot_s)
        if outcome not in ("ok", "cancelled"):
            missed = "failed"
        elif outcome == "cancelled" and missed == "none":
            return
        self._requests.labels(missed).inc()
        self._tokens.labels(missed).inc(num_tokens)

    @contextmanager
    def refusals(self, num_prompts: int) -> Iterator[None]:
        """Counts prompts that are refused within for lack of time (429), as the promise was made
        to them too."""
        try:
            yield
        except ApiError as error:
            if error.status == 429 and self._is_promised:
                self._requests.labels("refused").inc(num_prompts)
            raise

    @property
    def _is_promised(self) -> bool:
        return self._slo.ttft_ms is not None or self._slo.tpot_ms is not None

    def _missed(self, ttft_s: float, tpot_s: float | None) -> str:
        late = self._slo.ttft_ms is not None and 1000 * ttft_s > self._slo.ttft_ms
        slow = (
            self._slo.tpot_ms is not None
            and tpot_s is not None
            and 1000 * tpot_s > self._slo.tpot_ms
        )
        if late:
            return "both" if slow else "ttft"
        return "tpot" if slow else "none"
