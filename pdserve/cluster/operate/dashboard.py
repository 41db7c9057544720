"""A Grafana dashboard of the cluster, made of our metrics; `pdserve dashboard` prints it, `pdserve up` puts it beside
Ray's own.

One list of rows for both sources: Ray's exporter (names behind `ray_`) and the routers' own pages. A router's page has
the figures of all workers, so with several routers a worker's series come several times: every query over workers takes
the largest by worker first. Knows no Ray. tests/cluster/test_dashboard checks each query against metrics that exist.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Source = Literal["ray", "routers"]

PREFIX: dict[Source, str] = {"ray": "ray_", "routers": ""}
TITLE: dict[Source, str] = {"ray": "pdserve", "routers": "pdserve (routers' own pages)"}
WINDOW = "[$__rate_interval]"
WIDTH, HEIGHT, PER_ROW = 8, 8, 3  # of Grafana's 24 columns

PREFILL = 'role=~"prefill|both"'
DECODE = 'role=~"decode|both"'


@dataclass(frozen=True)
class Query:
    """expr: PromQL with P@ where the names' prefix belongs. legend: of each series, in Grafana's form."""

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
    """Of a counter, a second, over the workers that `where` selects. apart: its labels beside those of `by`."""
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


def worker_quantiles(metric: str, *quantiles: float, where: str = "", by: tuple[str, ...] = ()) -> tuple[Query, ...]:
    """Of a histogram, over the workers that `where` selects; one each of the values of the labels `by`."""
    buckets = worker_rate(f"{metric}_bucket", "le", *by, where=where)
    legend = "".join(f" {{{{{label}}}}}" for label in by)
    return tuple(Query(f"histogram_quantile({q:g}, {buckets})", _percentile(q) + legend) for q in quantiles)


def _percentile(quantile: float) -> str:
    return f"p{quantile * 100:g}"


def _worker_row(title: str, where: str, *panels: Panel) -> Row:
    """What is asked of workers of either role, and then some."""
    queue = "From a leg's arrival at its worker to its first step; waiting for blocks and for the transfer is in it."
    return Row(
        title,
        (
            Panel(
                "Sequences running",
                "short",
                (Query(worker_value("num_requests_running", "worker", where=where), "{{worker}}"),),
            ),
            Panel(
                "Sequences waiting",
                "short",
                (Query(worker_value("num_requests_waiting", "worker", where=where), "{{worker}}"),),
            ),
            Panel(
                "KV blocks in use",
                "percentunit",
                (Query(worker_value("kv_cache_usage_perc", "worker", where=where), "{{worker}}"),),
            ),
            Panel("Queue time", "s", worker_quantiles("request_queue_time_seconds", 0.5, 0.99, where=where), queue),
            *panels,
        ),
    )


LOAD = Row(
    "Load",
    (
        Panel(
            "Prompts a second, by how they ended",
            "reqps",
            (Query(router_rate("requests_total", "outcome"), "{{outcome}}"),),
        ),
        Panel(
            "Tokens a second",
            "short",
            (
                Query(router_rate("prompt_tokens_total"), "prompt"),
                Query(router_rate("cached_prompt_tokens_total"), "prompt, cached"),
                Query(router_rate("generation_tokens_total"), "generated"),
            ),
        ),
        Panel(
            "Being answered, and prompt tokens not computed",
            "short",
            (
                Query("sum(P@pdserve_router_num_requests_running)", "prompts"),
                Query("sum(P@pdserve_router_queued_tokens)", "tokens"),
            ),
        ),
        Panel(
            "Refused a second",
            "reqps",
            (Query(router_rate("rejections_total", "status", "reason"), "{{status}} {{reason}}"),),
        ),
        Panel(
            "Choices a second, by why they ended",
            "short",
            (Query(router_rate("request_success_total", "finished_reason"), "{{finished_reason}}"),),
        ),
        Panel(
            "Lengths in tokens",
            "short",
            tuple(
                Query(query.expr, f"{name} {query.legend}")
                for name in ("prompt", "generation")
                for query in router_quantiles(f"request_{name}_tokens", 0.5, 0.95)
            ),
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Panel("Time to first token", "s", router_quantiles("time_to_first_token_seconds", 0.5, 0.9, 0.99)),
        Panel(
            "Time per output token, mean of a choice",
            "s",
            router_quantiles("request_time_per_output_token_seconds", 0.5, 0.9, 0.99),
        ),
        Panel("Between tokens", "s", router_quantiles("inter_token_latency_seconds", 0.5, 0.99)),
        Panel("Whole call", "s", router_quantiles("e2e_request_latency_seconds", 0.5, 0.9, 0.99)),
        Panel(
            "Where answered calls spend their time",
            "percentunit",
            (
                Query(
                    share(
                        router_rate("request_time_seconds_total", "part"),
                        router_rate("request_time_seconds_total"),
                        each=True,
                    ),
                    "{{part}}",
                ),
            ),
            "See docs/timeline.md.",
            stacked=True,
        ),
    ),
)

PREFILL_ROW = _worker_row(
    "Prefill workers",
    PREFILL,
    Panel("Prefill time", "s", worker_quantiles("request_prefill_time_seconds", 0.5, 0.99, where=PREFILL)),
    Panel(
        "Prompt tokens computed a second",
        "short",
        (Query(worker_rate("engine_prompt_tokens_total", "worker", where=PREFILL), "{{worker}}"),),
    ),
)

DECODE_ROW = _worker_row(
    "Decode workers",
    DECODE,
    Panel("Step", "s", worker_quantiles("engine_step_seconds", 0.5, 0.99, where=DECODE)),
    Panel(
        "Tokens sampled a second",
        "short",
        (Query(worker_rate("engine_generation_tokens_total", "worker", where=DECODE), "{{worker}}"),),
    ),
    Panel(
        "Prompt tokens computed a second",
        "short",
        (Query(worker_rate("engine_prompt_tokens_total", "worker", where=DECODE), "{{worker}}"),),
        "Whole requests, failed pulls and preemptions.",
    ),
    Panel(
        "Sequences preempted a second",
        "short",
        (Query(worker_rate("num_preemptions_total", "worker", where=DECODE), "{{worker}}"),),
    ),
)

HAND_OFF = Row(
    "Hand-off",
    (
        Panel(
            "Prompts at decode workers, by where their KV came from",
            "reqps",
            (Query(worker_rate("kv_arrivals_total", "source", "reason"), "{{source}} {{reason}}"),),
        ),
        Panel(
            "Bytes pulled a second",
            "Bps",
            (Query(worker_rate("kv_transfer_bytes_total", "transport"), "{{transport}}"),),
        ),
        Panel(
            "Pulls a second, by how they ended",
            "short",
            (Query(worker_rate("kv_transfers_total", "transport", "outcome"), "{{transport}} {{outcome}}"),),
        ),
        Panel(
            "Lag",
            "s",
            worker_quantiles("kv_transfer_lag_seconds", 0.5, 0.99),
            "From P's last row to D's last verified byte: what the hand-over adds.",
        ),
        Panel(
            "Pull",
            "s",
            worker_quantiles("kv_transfer_seconds", 0.5, 0.99),
            "From the complete ticket to the verified end.",
        ),
        Panel("Bytes a pull", "bytes", worker_quantiles("kv_transfer_size_bytes", 0.5, 0.99)),
        Panel(
            "Share of bytes that came before the prompt was complete",
            "percentunit",
            (
                Query(
                    share(
                        worker_rate("kv_transfer_early_bytes_total"),
                        worker_rate("kv_transfer_bytes_total", apart=("transport",)),
                    ),
                    "early",
                ),
            ),
        ),
        Panel(
            "Descriptors a pull",
            "short",
            (
                Query(
                    share(
                        worker_rate("kv_transfer_descriptors_total", apart=("transport",)),
                        worker_rate("kv_transfer_size_bytes_count"),
                    ),
                    "descriptors",
                ),
            ),
        ),
        Panel("Tickets a second", "short", (Query(worker_rate("kv_tickets_total", "event"), "{{event}}"),)),
    ),
)

CACHES = Row(
    "Caches",
    (
        Panel(
            "Prefix cache: share of looked-up tokens found",
            "percentunit",
            (
                Query(
                    share(
                        worker_rate("prefix_cache_hits_total", "worker"),
                        worker_rate("prefix_cache_queries_total", "worker"),
                    ),
                    "{{worker}}",
                ),
            ),
        ),
        Panel(
            "Share of prompt tokens that nobody computed",
            "percentunit",
            (Query(share(router_rate("cached_prompt_tokens_total"), router_rate("prompt_tokens_total")), "cached"),),
        ),
        Panel("KV blocks by state", "short", (Query(worker_value("kv_blocks", "state"), "{{state}}"),), stacked=True),
        Panel(
            "Fragmentation of blank blocks",
            "percentunit",
            (Query(worker_value("kv_fragmentation_perc", "worker"), "{{worker}}"),),
        ),
        Panel(
            "Device memory",
            "bytes",
            (Query(worker_value("device_memory_bytes", "worker", "use"), "{{worker}} {{use}}"),),
        ),
    ),
)

SPLIT = Row(
    "Split decisions",
    (
        Panel(
            "Share of attempts that are split",
            "percentunit",
            (
                Query(
                    share(
                        router_rate('split_decisions_total{plan="split"}'),
                        router_rate("split_decisions_total"),
                    ),
                    "split",
                ),
            ),
        ),
        Panel(
            "Attempts a second, by plan and reason",
            "short",
            (Query(router_rate("split_decisions_total", "plan", "reason"), "{{plan}}: {{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Workers, by role",
            "short",
            (Query("max by (role) (P@pdserve_router_workers)", "{{role}}"),),
            "As the router that sees most of them says.",
        ),
    ),
)

FAILOVERS = Row(
    "Failovers",
    (
        Panel(
            "Failovers a second, by reason", "short", (Query(router_rate("failovers_total", "reason"), "{{reason}}"),)
        ),
        Panel("Pause that clients saw", "s", router_quantiles("failover_pause_seconds", 0.5, 0.99)),
        Panel(
            "Pulls given up while bytes could land",
            "short",
            (Query(worker_rate("kv_transfers_unsettled_total", "worker"), "{{worker}}"),),
        ),
    ),
)

SLO = Row(
    "SLO",
    (
        Panel(
            "Goodput: share of prompts that got what is promised",
            "percentunit",
            (
                Query(
                    share(router_rate('slo_requests_total{missed="none"}'), router_rate("slo_requests_total")),
                    "prompts",
                ),
                Query(
                    share(router_rate('slo_tokens_total{missed="none"}'), router_rate("slo_tokens_total")),
                    "their tokens",
                ),
            ),
            "Nothing without targets in the configuration (slo).",
        ),
        Panel(
            "Prompts a second, by the targets they missed",
            "reqps",
            (Query(router_rate("slo_requests_total", "missed"), "{{missed}}"),),
            stacked=True,
        ),
        Panel(
            "Targets, and what is reached",
            "s",
            (
                Query("max by (target) (P@pdserve_router_slo_target_seconds)", "{{target}} promised"),
                *(
                    Query(query.expr, f"ttft {query.legend}")
                    for query in router_quantiles("time_to_first_token_seconds", 0.99)
                ),
                *(
                    Query(query.expr, f"tpot {query.legend}")
                    for query in router_quantiles("request_time_per_output_token_seconds", 0.99)
                ),
            ),
        ),
    ),
)

POOL = Row(
    "KV pool",
    (
        Panel(
            "Operations a second",
            "short",
            (Query(worker_rate("kv_pool_requests_total", "operation", "outcome"), "{{operation}} {{outcome}}"),),
        ),
        Panel("Bytes a second", "Bps", (Query(worker_rate("kv_pool_bytes_total", "operation"), "{{operation}}"),)),
        Panel("Time of an operation", "s", worker_quantiles("kv_pool_seconds", 0.5, 0.99, by=("operation",))),
        Panel(
            "Workers that do not ask it, after errors",
            "short",
            (Query("sum(max by (worker) (P@pdserve_kv_pool_breaker_open))", "workers"),),
        ),
    ),
)

ROWS = (LOAD, LATENCY, PREFILL_ROW, DECODE_ROW, HAND_OFF, CACHES, SPLIT, FAILOVERS, SLO, POOL)


def queries(source: Source) -> Iterator[str]:
    """All of the dashboard's PromQL."""
    for row in ROWS:
        for panel in row.panels:
            yield from (_with_prefix(query.expr, source) for query in panel.queries)


def dashboard(source: Source) -> dict[str, Any]:
    """As Grafana imports and provisions it. source: which pages Prometheus scrapes."""
    return {
        "uid": f"pdserve-{source}",
        "title": TITLE[source],
        "tags": ["pdserve"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-30m", "to": "now"},
        "refresh": "10s",
        "templating": {"list": [_datasource_variable()]},
        "panels": list(_panels(source)),
    }


def place(folder: Path) -> Path | None:
    """Write the dashboard of Ray's exporter into the folder that Ray's Grafana reads; None: Ray has made none."""
    if not folder.is_dir():
        return None
    path = folder / "pdserve_grafana_dashboard.json"
    path.write_text(json.dumps(dashboard("ray"), indent=1))
    return path


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "hide": 0, "multi": False}


def _panels(source: Source) -> Iterator[dict[str, Any]]:
    number, top = 1, 0
    for row in ROWS:
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": _place(0, top, 24, 1),
        }
        number, top = number + 1, top + 1
        for index, panel in enumerate(row.panels):
            column, line = index % PER_ROW, index // PER_ROW
            yield _panel(panel, number, _place(column * WIDTH, top + line * HEIGHT, WIDTH, HEIGHT), source)
            number += 1
        top += -(-len(row.panels) // PER_ROW) * HEIGHT


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, number: int, position: dict[str, int], source: Source) -> dict[str, Any]:
    datasource = {"type": "prometheus", "uid": "${datasource}"}
    custom = {"fillOpacity": 20 if panel.stacked else 0, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": datasource,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": datasource,
                "expr": _with_prefix(query.expr, source),
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _with_prefix(expr: str, source: Source) -> str:
    return expr.replace("P@", PREFIX[source])
