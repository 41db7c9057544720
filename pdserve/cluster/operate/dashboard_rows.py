"""The dashboard's rows about requests and routers, and the order of all rows.

One list serves both sources. tests/cluster/test_dashboard.py checks each query against metrics that
exist.
"""

from pdserve.cluster.operate.dashboard_panels import (
    Panel,
    Query,
    Row,
    router_quantiles,
    router_rate,
    share,
    worker_rate,
)
from pdserve.cluster.operate.dashboard_workers import (
    CACHES,
    DECODE_ROW,
    HAND_OFF,
    POOL,
    PREFILL_ROW,
)

LOAD = Row(
    "Load",
    (
        Panel(
            "Prompts per second, by outcome",
            "reqps",
            (Query(router_rate("requests_total", "outcome"), "{{outcome}}"),),
        ),
        Panel(
            "Tokens per second",
            "short",
            (
                Query(router_rate("prompt_tokens_total"), "prompt"),
                Query(router_rate("cached_prompt_tokens_total"), "prompt, cached"),
                Query(router_rate("generation_tokens_total"), "generated"),
            ),
        ),
        Panel(
            "Prompts being answered, and prompt tokens not yet computed",
            "short",
            (
                Query("sum(P@pdserve_router_num_requests_running)", "prompts"),
                Query("sum(P@pdserve_router_queued_tokens)", "tokens"),
            ),
        ),
        Panel(
            "Refused per second",
            "reqps",
            (Query(router_rate("rejections_total", "status", "reason"), "{{status}} {{reason}}"),),
        ),
        Panel(
            "Choices per second, by finish reason",
            "short",
            (
                Query(
                    router_rate("request_success_total", "finished_reason"), "{{finished_reason}}"
                ),
            ),
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
        Panel(
            "Time to first token",
            "s",
            router_quantiles("time_to_first_token_seconds", 0.5, 0.9, 0.99),
        ),
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
            "See docs/use/timeline.md.",
            stacked=True,
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
            "Attempts per second, by plan and reason",
            "short",
            (
                Query(
                    router_rate("split_decisions_total", "plan", "reason"), "{{plan}}: {{reason}}"
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Workers, by role",
            "short",
            (Query("max by (role) (P@pdserve_router_workers)", "{{role}}"),),
            "The largest number that a router sees.",
        ),
    ),
)

FAILOVERS = Row(
    "Failovers",
    (
        Panel(
            "Failovers per second, by reason",
            "short",
            (Query(router_rate("failovers_total", "reason"), "{{reason}}"),),
        ),
        Panel("Pause that clients saw", "s", router_quantiles("failover_pause_seconds", 0.5, 0.99)),
        Panel(
            "Pulls given up while bytes could still arrive",
            "short",
            (Query(worker_rate("kv_transfers_unsettled_total", "worker"), "{{worker}}"),),
        ),
    ),
)

SLO = Row(
    "SLO",
    (
        Panel(
            "Goodput: share of prompts that met all targets",
            "percentunit",
            (
                Query(
                    share(
                        router_rate('slo_requests_total{missed="none"}'),
                        router_rate("slo_requests_total"),
                    ),
                    "prompts",
                ),
                Query(
                    share(
                        router_rate('slo_tokens_total{missed="none"}'),
                        router_rate("slo_tokens_total"),
                    ),
                    "their tokens",
                ),
            ),
            "Empty if the configuration has no targets (slo).",
        ),
        Panel(
            "Prompts per second, by missed targets",
            "reqps",
            (Query(router_rate("slo_requests_total", "missed"), "{{missed}}"),),
            stacked=True,
        ),
        Panel(
            "Targets, and what was reached",
            "s",
            (
                Query(
                    "max by (target) (P@pdserve_router_slo_target_seconds)", "{{target}} promised"
                ),
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

ROWS = (LOAD, LATENCY, PREFILL_ROW, DECODE_ROW, HAND_OFF, CACHES, SPLIT, FAILOVERS, SLO, POOL)
