"""The dashboard's rows about workers: their load, their caches, the hand-off and the KV pool."""

from pdserve.cluster.operate.dashboard_panels import (
    DECODE,
    PREFILL,
    Panel,
    Query,
    Row,
    router_rate,
    share,
    worker_quantiles,
    worker_rate,
    worker_value,
)


def _worker_row(title: str, where: str, *panels: Panel) -> Row:
    """Makes a row with the panels that both roles have, and further ones."""
    queue = (
        "From a leg's arrival at its worker to its first step, including the time spent waiting "
        "for blocks and for the transfer."
    )
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
            Panel(
                "Queue time",
                "s",
                worker_quantiles("request_queue_time_seconds", 0.5, 0.99, where=where),
                queue,
            ),
            *panels,
        ),
    )


PREFILL_ROW = _worker_row(
    "Prefill workers",
    PREFILL,
    Panel(
        "Prefill time",
        "s",
        worker_quantiles("request_prefill_time_seconds", 0.5, 0.99, where=PREFILL),
    ),
    Panel(
        "Prompt tokens computed per second",
        "short",
        (Query(worker_rate("engine_prompt_tokens_total", "worker", where=PREFILL), "{{worker}}"),),
    ),
)

DECODE_ROW = _worker_row(
    "Decode workers",
    DECODE,
    Panel("Step", "s", worker_quantiles("engine_step_seconds", 0.5, 0.99, where=DECODE)),
    Panel(
        "Tokens sampled per second",
        "short",
        (
            Query(
                worker_rate("engine_generation_tokens_total", "worker", where=DECODE), "{{worker}}"
            ),
        ),
    ),
    Panel(
        "Prompt tokens computed per second",
        "short",
        (Query(worker_rate("engine_prompt_tokens_total", "worker", where=DECODE), "{{worker}}"),),
        "They come from whole requests, failed pulls and preemptions.",
    ),
    Panel(
        "Sequences preempted per second",
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
            "Bytes pulled per second",
            "Bps",
            (Query(worker_rate("kv_transfer_bytes_total", "transport"), "{{transport}}"),),
        ),
        Panel(
            "Pulls per second, by outcome",
            "short",
            (
                Query(
                    worker_rate("kv_transfers_total", "transport", "outcome"),
                    "{{transport}} {{outcome}}",
                ),
            ),
        ),
        Panel(
            "Lag",
            "s",
            worker_quantiles("kv_transfer_lag_seconds", 0.5, 0.99),
            "From P's last row to D's last verified byte: the time that the hand-off adds.",
        ),
        Panel(
            "Pull",
            "s",
            worker_quantiles("kv_transfer_seconds", 0.5, 0.99),
            "From the complete ticket to the last verified byte.",
        ),
        Panel("Bytes per pull", "bytes", worker_quantiles("kv_transfer_size_bytes", 0.5, 0.99)),
        Panel(
            "Share of bytes that arrived before the prompt was complete",
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
            "Descriptors per pull",
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
        Panel(
            "Tickets per second",
            "short",
            (Query(worker_rate("kv_tickets_total", "event"), "{{event}}"),),
        ),
    ),
)

CACHES = Row(
    "Caches",
    (
        Panel(
            "Prefix cache: share of looked-up tokens that were found",
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
            (
                Query(
                    share(
                        router_rate("cached_prompt_tokens_total"),
                        router_rate("prompt_tokens_total"),
                    ),
                    "cached",
                ),
            ),
        ),
        Panel(
            "KV blocks by state",
            "short",
            (Query(worker_value("kv_blocks", "state"), "{{state}}"),),
            stacked=True,
        ),
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

POOL = Row(
    "KV pool",
    (
        Panel(
            "Operations per second",
            "short",
            (
                Query(
                    worker_rate("kv_pool_requests_total", "operation", "outcome"),
                    "{{operation}} {{outcome}}",
                ),
            ),
        ),
        Panel(
            "Bytes per second",
            "Bps",
            (Query(worker_rate("kv_pool_bytes_total", "operation"), "{{operation}}"),),
        ),
        Panel(
            "Time per operation",
            "s",
            worker_quantiles("kv_pool_seconds", 0.5, 0.99, by=("operation",)),
        ),
        Panel(
            "Workers that stopped using it after errors",
            "short",
            (Query("sum(max by (worker) (P@pdserve_kv_pool_breaker_open))", "workers"),),
        ),
    ),
)
