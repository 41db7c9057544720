"""The types of the dashboard's panels, and the PromQL that panels are made of.

P@ stands for the prefix of the metrics' names. Knows Grafana's units and PromQL; no panel.
"""

from dataclasses import dataclass

WINDOW = "[$__rate_interval]"

PREFILL = 'role=~"prefill|both"'
DECODE = 'role=~"decode|both"'


@dataclass(frozen=True)
class Query:
    """A PromQL expression with P@ for the names' prefix, and the legend of each series in Grafana's
    form."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel. `unit` is Grafana's name of the unit."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    text: str = ""
    stacked: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def total(expr: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) ({expr})" if by else f"sum({expr})"


def router_rate(metric: str, *by: str) -> str:
    """Returns PromQL for the per-second rate of a counter, summed over routers.

    `metric` may end with a filter.
    """
    return total(f"rate(P@pdserve_router_{metric}{WINDOW})", *by)


def worker_rate(metric: str, *by: str, where: str = "", apart: tuple[str, ...] = ()) -> str:
    """Returns PromQL for the per-second rate of a counter, over the workers that `where` selects.

    `apart` names the counter's further labels, besides those in `by`.
    """
    return _over_workers(f"rate(P@pdserve_{metric}{_braces(where)}{WINDOW})", by, apart)


def worker_value(metric: str, *by: str, where: str = "") -> str:
    """Returns PromQL for a gauge, over the workers that `where` selects."""
    return _over_workers(f"P@pdserve_{metric}{_braces(where)}", by, ())


def _braces(where: str) -> str:
    return f"{{{where}}}" if where else ""


def _over_workers(expr: str, by: tuple[str, ...], apart: tuple[str, ...]) -> str:
    labels = tuple(dict.fromkeys((*by, *apart, "worker")))
    each = f"max by ({', '.join(labels)}) ({expr})"
    return each if labels == by else total(each, *by)


def share(part: str, whole: str, each: bool = False) -> str:
    """Returns PromQL for part / whole, which has no value while the whole is 0.

    `each` means that there are several parts of one whole.
    """
    return f"{part} / {'on () group_left () ' if each else ''}({whole} > 0)"


def router_quantiles(metric: str, *quantiles: float) -> tuple[Query, ...]:
    """Makes queries for quantiles of a histogram, over all routers."""
    buckets = router_rate(f"{metric}_bucket", "le")
    return tuple(Query(f"histogram_quantile({q:g}, {buckets})", _percentile(q)) for q in quantiles)


def worker_quantiles(
    metric: str, *quantiles: float, where: str = "", by: tuple[str, ...] = ()
) -> tuple[Query, ...]:
    """Makes queries for quantiles of a histogram, over the workers that `where` selects.

    There is one series for each combination of values of the labels `by`.
    """
    buckets = worker_rate(f"{metric}_bucket", "le", *by, where=where)
    legend = "".join(f" {{{{{label}}}}}" for label in by)
    return tuple(
        Query(f"histogram_quantile({q:g}, {buckets})", _percentile(q) + legend) for q in quantiles
    )


def _percentile(quantile: float) -> str:
    return f"p{quantile * 100:g}"
