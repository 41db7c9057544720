"""Repeats a process's metrics to Ray's exporter, once in a few seconds: the same names behind Ray's
prefix `ray_`.

A counter goes as a Ray counter, by what it gained since the last time. A histogram goes as gauges:
its `_bucket` (with `le`), `_sum` and `_count` under the names a Prometheus histogram has, so that
queries are the same. Ray's own Histogram takes single observations and its agent replays each at
its bucket's middle: a call and a loop turn a token, and sums that are not true. Gauges that are not
set for two of Ray's report intervals vanish, so those of a dead process do.

Knows no families by name. Used by `cluster.deployments.router_replica` and
`cluster.deployments.worker_replica`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ray.util.metrics import Counter, Gauge

from pdserve.background.tasks import every
from pdserve.protocol.metric_families import MetricFamily, Sample

PERIOD_S = 2.5  # Ray reports every 10 s by default, what was set since the last time


@dataclass(frozen=True, slots=True)
class Exposed:
    """Families and the labels that each of their samples gets."""

    families: Iterable[MetricFamily]
    labels: dict[str, str]


class MetricsBridge:
    """source: what to repeat now; None: there is nothing new. Make it inside the event loop."""

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
        key = sample.name, tuple(sample.labels.values())  # not the process's: a role may change
        gained = sample.value - self._told.get(key, 0.0)
        if gained <= 0:  # Ray refuses zero, and a counter does not sink
            return
        if family.name not in self._counters:
            self._counters[family.name] = Counter(family.name, family.help, tuple(labels))
        self._counters[family.name].inc(gained, labels)
        self._told[key] = sample.value

    def _set(self, family: MetricFamily, sample: Sample, labels: dict[str, str]) -> None:
        if sample.name not in self._gauges:
            self._gauges[sample.name] = Gauge(sample.name, family.help, tuple(labels))
        self._gauges[sample.name].set(sample.value, labels)
