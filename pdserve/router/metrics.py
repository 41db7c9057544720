"""Defines the router's own counters, whose names begin with `pdserve_router_`.

Knows no HTTP. `router.request` counts, and `router.metrics_page` shows the counts.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import pdserve
from pdserve.background.tasks import FAILURES
from pdserve.protocol.events import LegTimes
from pdserve.protocol.metric_families import MetricFamily, families_of
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.times import parts_of_time

_LATENCY_S = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)
_PAUSE_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_S = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    1.0,
    5.0,
)
_TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)


class QuickCounter(Collector):
    """A counter without labels for one thread, in use for every token.

    It takes no lock, and a tenth of the time of prometheus_client's counter.
    """

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self.value = 0.0
        registry.register(self)

    def inc(self, amount: float) -> None:
        self.value += amount

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._text, self.value)


class QuickHistogram(Collector):
    """A histogram like QuickCounter. `bounds` are the buckets' upper ends, in ascending order and
    without infinity."""

    def __init__(
        self, name: str, text: str, bounds: tuple[float, ...], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        labels = [floatToGoString(bound) for bound in (*self._bounds, math.inf)]
        buckets = list(zip(labels, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class RouterMetrics:
    """All metrics of a router, in one registry. Times are in seconds.

    `model_name` is the name that clients send.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(FAILURES)
        info = Gauge(
            "pdserve_router_info",
            "The model that is served, and the version that serves it.",
            ["model_name", "version"],
            registry=self.registry,
        )
        info.labels(model_name, pdserve.__version__).set(1)
        self.requests = self._counter("requests", "Prompts by how they ended.", "outcome")
        self.rejections = self._counter(
            "rejections",
            "HTTP requests answered with an error, by status and reason.",
            "status",
            "reason",
        )
        self.successes = self._counter(
            "request_success",
            "Choices by why they ended: stop, length; abort (the client left), error.",
            "finished_reason",
        )
        self.split_decisions = self._counter(
            "split_decisions",
            "Routing decisions by plan (split over prefill and decode, or whole) and by reason.",
            "plan",
            "reason",
        )
        self.split_gain = Gauge(
            "pdserve_router_split_gain_seconds",
            "Predicted saving by splitting, per prompt that could be split, over the last minutes.",
            registry=self.registry,
        )
        self.failovers = self._counter(
            "failovers", "Attempts that failed and were tried again, by reason.", "reason"
        )
        self.arrivals = self._counter(
            "kv_arrivals",
            "Arrivals of the KV of this router's prompts at workers, by source.",
            "source",
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.cached_tokens = self._counter(
            "cached_prompt_tokens", "Prompt tokens taken from a prefix cache."
        )
        self.generation_tokens = QuickCounter(
            "pdserve_router_generation_tokens", "Accepted generated tokens.", self.registry
        )
        self.running = Gauge(
            "pdserve_router_num_requests_running", "Prompts being answered.", registry=self.registry
        )
        self.queued = Gauge(
            "pdserve_router_queued_tokens",
            "Prompt tokens that are not computed yet.",
            registry=self.registry,
        )
        self.body_bytes = Gauge(
            "pdserve_router_body_bytes",
            "Bytes of request bodies that are not prompts yet.",
            registry=self.registry,
        )
        self.held_bytes = Gauge(
            "pdserve_router_held_bytes",
            "Bytes held for slow readers and whole answers.",
            registry=self.registry,
        )
        self.cuts = QuickCounter(
            "pdserve_router_cut_clients",
            "Requests cut off because too much was held for them.",
            self.registry,
        )
        self.caution = Gauge(
            "pdserve_router_slo_caution",
            "Factor by which forecasts of first tokens are multiplied.",
            registry=self.registry,
        )
        self.stale_events = QuickCounter(
            "pdserve_router_stale_events", "Events of legs that had ended.", self.registry
        )
        self.cache_resyncs = QuickCounter(
            "pdserve_router_cache_resyncs",
            "Prefix cache states asked for again, after a gap.",
            self.registry,
        )
        self.workers = Gauge(
            "pdserve_router_workers", "Workers by role.", ["role"], registry=self.registry
        )
        self.unenforced = self._counter(
            "unenforced_keywords",
            "Requests whose JSON schema uses a keyword that is not enforced, by keyword.",
            "keyword",
        )
        self.traces = self._counter(
            "traces",
            "Traced calls by result: exported, failed (the receiver did not take the spans), "
            "dropped (too many spans waited).",
            "result",
        )
        self.ttft = self._seconds(
            "time_to_first_token",
            "Time from a call's arrival to a choice's first token.",
            _LATENCY_S,
        )
        self.itl = self._seconds(
            "inter_token_latency", "Time between two messages of a choice.", _TOKEN_S
        )
        self.tpot = self._seconds(
            "request_time_per_output_token",
            "Mean time per token of a choice after its first token.",
            _TOKEN_S,
        )
        self.e2e = self._seconds(
            "e2e_request_latency",
            "Time from a call's arrival to its answer's last byte.",
            _LATENCY_S,
        )
        self.pause = self._seconds(
            "failover_pause",
            "Time from a choice's last token before a failover to its next token.",
            _PAUSE_S,
        )
        self.prompt_lengths = self._histogram(
            "request_prompt_tokens", "Tokens of prompts.", _TOKENS
        )
        self.generation_lengths = self._histogram(
            "request_generation_tokens", "Tokens generated for a prompt.", _TOKENS
        )
        self._overdrawn = 0.0
        self.time = self._counter(
            "request_time_seconds",
            "Time of answered calls of one prompt, by the part of the work that took it.",
            "part",
        )

    def took(
        self, total_s: float, admission_s: float, legs: Collection[LegTimes], complete: bool = True
    ) -> None:
        """Counts the time of an answered call of one prompt, by what it went into.

        `total_s` lasts to the last byte, `admission_s` until the prompt was sent to a worker. The
        parts add up to `total_s`. Time that neither admission nor a worker took is transport:
        messages both ways, this event loop, text and JSON, and the client's own pace. A worker
        knows a request's arrival only to half a step, so that rest may be negative; then the next
        request's rest becomes smaller.

        `complete` is True if every worker has reported where its time went. If not (a stop string
        was found here while the worker went on, or a worker was lost), the rest includes workers'
        time and counts as "unreported".
        """
        parts, rest = parts_of_time(total_s, admission_s, legs)
        rest -= self._overdrawn
        self._overdrawn = max(0.0, -rest)
        parts["transport" if complete else "unreported"] = max(0.0, rest)
        for part, seconds in parts.items():
            # a counter refuses negative values, which must not fail an answer that is done
            self.time.labels(part).inc(max(0.0, seconds))

    def look_at(self, fleet: Fleet) -> None:
        """Copies the fleet's own counts; called before a page is made."""
        self.stale_events.value = float(fleet.intake.num_stale_events)
        self.cache_resyncs.value = float(fleet.intake.num_resyncs)
        for role in ("prefill", "decode", "both"):
            self.workers.labels(role).set(sum(worker.role == role for worker in fleet.workers))

    def families(self, fleet: Fleet) -> tuple[MetricFamily, ...]:
        """Returns this router's own families, in the form of messages."""
        self.look_at(fleet)
        return families_of(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pdserve_router_{name}", text, labels, registry=self.registry)

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...]) -> QuickHistogram:
        return self._histogram(f"{name}_seconds", text, buckets)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> QuickHistogram:
        return QuickHistogram(f"pdserve_router_{name}", text, buckets, self.registry)
