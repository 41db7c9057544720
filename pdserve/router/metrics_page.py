"""Makes the page of metrics: the router's own counters, and every worker's last snapshot.

The page is in Prometheus' text format. Workers' families keep their names and get the labels worker
and role. Knows no HTTP. Shown by `router.http.app`.
"""

from collections.abc import Iterable

from prometheus_client import generate_latest

from pdserve.protocol.metric_families import MetricFamily, Sample
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.metrics import RouterMetrics


def exposition(metrics: RouterMetrics, fleet: Fleet) -> str:
    """Returns the whole /metrics page."""
    metrics.look_at(fleet)
    families: dict[str, tuple[MetricFamily, list[str]]] = {}
    for worker in fleet.workers:
        labels = {"worker": worker.worker_id, "role": worker.role}
        for family in worker.snapshot.metrics if worker.snapshot is not None else ():
            _, lines = families.setdefault(family.name, (family, []))
            lines.extend(_line(sample, labels) for sample in family.samples)
    return generate_latest(metrics.registry).decode() + "".join(_families(families.values()))


def _families(families: Iterable[tuple[MetricFamily, list[str]]]) -> Iterable[str]:
    for family, lines in families:
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        yield f"# HELP {name} {text}\n# TYPE {name} {family.kind}\n" + "".join(lines)


def _line(sample: Sample, labels: dict[str, str]) -> str:
    pairs = ",".join(
        f'{name}="{_escape(value)}"' for name, value in (sample.labels | labels).items()
    )
    return f"{sample.name}{{{pairs}}} {_number(sample.value)}\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return repr(float(value)).replace("inf", "Inf").replace("nan", "NaN")
