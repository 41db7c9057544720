"""Copies a process's metrics to Ray's exporter every few seconds, under the same names with Ray's
prefix `ray_`.

A counter becomes a Ray counter and is increased by what it gained since the last time. A histogram
becomes gauges: its `_bucket` (with `le`), `_sum` and `_count`, named as a Prometheus histogram
names them, so that queries are the same. Ray's own Histogram does not fit: it takes single
observations, and its agent replays each at the middle of its bucket. That costs a call and a loop
per token, and its sums are not exact. Gauges that are not set for two of Ray's report intervals
vanish, and so do those of a dead process.

Knows no families by name. Used by `cluster.deployments.router_replica` and
`cluster.deployments.worker_replica`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ray.util.metrics import Counter, Gauge

from pdserve.background.tasks import every
from pdserve.protocol.metric_families import MetricFamily, Sample

PERIOD_S = 2.5  # by default Ray reports every 10 s what was set since its last report


@dataclass(frozen=True, slots=True)
class Exposed:
    """Metric families, and the labels that each of their samples gets."""

    families: Iterable[MetricFamily]
    labels: dict[str, str]


class MetricsBridge:
    """Calls `source` for the metrics to copy; None means that there is nothing new.

    Make it inside the event loop.
    """

    def __init__(self, source: Callable[[], Exposed | None]) -> None:
        self._source = source
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}
        self._task = every("metrics bridge", PERIOD_S, self.publish, longest_pause_s=60.0)

    def close(self) -> None:
        self._task.cancel()

    def publish(self) -> None:
        exposed = self._source()
        if exposed is None:
            return
        for family in exposed.families:
            for sample in family.samples:
                labels = sample.labels | exposed.labels
                if family.kind == "counter":
                    self._count(family, sample, labels)
                else:
                    self._set(family, sample, labels)

    def _count(self, family: MetricFamily, sample: Sample, labels: dict[str, str]) -> None:
        # The process's own labels are left out of the key, because a role may change.
        key = sample.name, tuple(sample.labels.values())
        gained = sample.value - self._told.get(key, 0.0)
        if gained <= 0:  # Ray refuses zero, and a counter never falls
            return
        if family.name not in self._counters:
            self._counters[family.name] = Counter(family.name, family.help, tuple(labels))
        self._counters[family.name].inc(gained, labels)
        self._told[key] = sample.value

    def _set(self, family: MetricFamily, sample: Sample, labels: dict[str, str]) -> None:
        if sample.name not in self._gauges:
            self._gauges[sample.name] = Gauge(sample.name, family.help, tuple(labels))
        self._gauges[sample.name].set(sample.value, labels)
