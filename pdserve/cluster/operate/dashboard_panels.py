"""What a panel of the dashboard is, and the PromQL that panels are made of.

P@ stands where the metrics' prefix belongs. Knows Grafana's units and PromQL; no panel.
"""

from dataclasses import dataclass

WINDOW = "[$__rate_interval]"

PREFILL = 'role=~"prefill|both"'
DECODE = 'role=~"decode|both"'


@dataclass(frozen=True)
class Query:
    """expr: PromQL with P@ where the names' prefix belongs. legend: of each series, in Grafana's
    form."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """unit: Grafana's name of it."""

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
    """Of a counter, a second, over all routers. metric: may have a filter behind it."""
    return total(f"rate(P@pdserve_router_{metric}{WINDOW})", *by)


def worker_rate(metric: str, *by: str, where: str = "", apart: tuple[str, ...] = ()) -> str:
    """Of a counter, a second, over the workers that `where` selects. apart: its labels beside those
    of `by`."""
    return _over_workers(f"rate(P@pdserve_{metric}{_braces(where)}{WINDOW})", by, apart)


def worker_value(metric: str, *by: str, where: str = "") -> str:
    """Of a gauge, as `worker_rate`."""
    return _over_workers(f"P@pdserve_{metric}{_braces(where)}", by, ())


def _braces(where: str) -> str:
    return f"{{{where}}}" if where else ""


def _over_workers(expr: str, by: tuple[str, ...], apart: tuple[str, ...]) -> str:
    labels = tuple(dict.fromkeys((*by, *apart, "worker")))
    each = f"max by ({', '.join(labels)}) ({expr})"
    return each if labels == by else total(each, *by)


def share(part: str, whole: str, each: bool = False) -> str:
    """Nothing while there is nothing to divide by. each: several parts of one whole."""
    return f"{part} / {'on () group_left () ' if each else ''}({whole} > 0)"


def router_quantiles(metric: str, *quantiles: float) -> tuple[Query, ...]:
    """Of a histogram, over all routers."""
    buckets = router_rate(f"{metric}_bucket", "le")
    return tuple(Query(f"histogram_quantile({q:g}, {buckets})", _percentile(q)) for q in quantiles)


def worker_quantiles(
    metric: str, *quantiles: float, where: str = "", by: tuple[str, ...] = ()
) -> tuple[Query, ...]:
    """Of a histogram, over the workers that `where` selects; one each of the values of the labels
    `by`."""
    buckets = worker_rate(f"{metric}_bucket", "le", *by, where=where)
    legend = "".join(f" {{{{{label}}}}}" for label in by)
    return tuple(
        Query(f"histogram_quantile({q:g}, {buckets})", _percentile(q) + legend) for q in quantiles
    )


def _percentile(quantile: float) -> str:
    return f"p{quantile * 100:g}"
