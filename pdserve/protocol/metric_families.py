"""A worker's metrics on the wire, as prometheus families."""

import msgspec


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One exposed sample of a metric: its name with suffix (`_bucket`, `_total` ...), labels and value."""

    name: str
    labels: dict[str, str]
    value: float


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    name: str
    kind: str
    help: str
    samples: tuple[Sample, ...]
