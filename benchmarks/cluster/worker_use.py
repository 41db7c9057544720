"""Shows what each worker did during a load: its device's busy time, steps, and the tokens that it
computed, by the counters that the router's /metrics page has of it.

`benchmarks.cluster.http_share` and `benchmarks.targets` measure it.
"""

from collections.abc import Mapping, Sequence

from benchmarks.support.markdown import table
from benchmarks.support.served_cluster import metrics
from pdserve.bench.record import Json

COUNTED = {
    "pdserve_engine_steps_total": "steps",
    "pdserve_engine_step_seconds_sum": "busy_s",
    "pdserve_engine_prompt_tokens_total": "prompt_tokens",
    "pdserve_engine_generation_tokens_total": "generated_tokens",
    "pdserve_engine_prompt_rows_beside_decodes_total": "prompt_tokens_beside_decodes",
    "pdserve_engine_slack_seconds_total": "slack_s",
}
Counts = Mapping[tuple[str, str], Mapping[str, float]]


def worker_counts(url: str) -> Counts:
    """Returns the counters of each (role, worker) so far."""
    counts: dict[tuple[str, str], dict[str, float]] = {}
    for sample in metrics(url, "pdserve_engine_"):
        if name := COUNTED.get(sample.name):
            key = sample.labels["role"], sample.labels["worker"]
            counts.setdefault(key, dict.fromkeys(COUNTED.values(), 0.0))[name] = sample.value
    return counts


def uses(before: Counts, after: Counts, seconds: float) -> list[Json]:
    """Returns what each worker did in so many seconds, a dictionary per worker. Workers that came
    meanwhile are left out."""
    return [
        {"role": role, "worker": worker, "seconds": round(seconds, 3)}
        | {name: round(value - before[role, worker][name], 4) for name, value in counts.items()}
        for (role, worker), counts in sorted(after.items())
        if (role, worker) in before
    ]


def report(rows: Sequence[Json]) -> str:
    """Returns a Markdown table with one line per load and worker. rows: shares of http_share."""
    lines = []
    for row in rows:
        for use in row["workers"]:
            steps = use["steps"]
            mean_ms = f"{1e3 * use['busy_s'] / steps:.2f}" if steps else "-"
            lines.append(
                [
                    str(row["load"]),
                    str(use["role"]),
                    f"{use['busy_s'] / use['seconds']:.1%}",
                    f"{steps:,.0f}",
                    mean_ms,
                    f"{use['prompt_tokens']:,.0f}",
                    f"{use['prompt_tokens_beside_decodes']:,.0f}",
                    f"{use['slack_s']:.2f}",
                    f"{use['generated_tokens']:,.0f}",
                ]
            )
    head = ["load", "worker", "device busy", "steps", "mean step, ms", "prompt tokens"]
    return table([*head, "of them beside decodes", "time they added, s", "generated tokens"], lines)
