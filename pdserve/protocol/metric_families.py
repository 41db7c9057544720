"""Defines the form of a worker's metrics on the wire, as prometheus families."""

from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One exposed sample of a metric: its name with suffix (`_bucket`, `_total` ...), labels and
    value."""

    name: str
    labels: dict[str, str]
    value: float


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    name: str
    kind: str
    help: str
    samples: tuple[Sample, ...]


def families_of(source: CollectorRegistry | Collector) -> tuple[MetricFamily, ...]:
    """Returns everything that the source collects now, in the form that messages carry."""
    return tuple(
        MetricFamily(metric.name, metric.type, metric.documentation, tuple(_samples(metric)))
        for metric in source.collect()
    )


def _samples(metric: Metric) -> Iterator[Sample]:
    for sample in metric.samples:
        if not sample.name.endswith("_created"):
            yield Sample(sample.name, dict(sample.labels), float(sample.value))
