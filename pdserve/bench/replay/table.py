"""Shows results of replayed windows as a table in a terminal.

Knows no files and no servers. Called by commands.py.
"""

from collections.abc import Sequence

from pdserve.bench.replay.figures import Percentiles, WindowResult
from pdserve.bench.replay.series import Series
from pdserve.bench.tables import print_table

WIDTH = 190  # characters of the table
COLUMNS = (
    "req/s",
    "requests",
    "attained",
    "goodput/s",
    "TTFT p50/90/99 ms",
    "TPOT p50/90/99 ms",
    "ITL p50/90/99 ms",
    "E2E p50/90/99 s",
    "late p99 ms",
    "in tok/s",
    "cached",
    "refused",
    "failed",
)


def show(series: Sequence[Series], wanted: float) -> None:
    """Prints a table for each series, its highest rate, and what makes figures doubtful.

    `wanted` is the share of requests that must keep both promises.
    """
    for one in series:
        print_table(one.name, COLUMNS, [_cells(run.result) for run in one.runs], WIDTH)
        promises = one.runs[0].result.promises
        print(
            f"{wanted:.0%} of requests keep TTFT <= {promises.ttft_ms:g} ms and TPOT <= "
            f"{promises.tpot_ms:g} ms: {one.limit(wanted)}"
        )
        for run in one.runs:
            for line in _remarks(run.result):
                print(f"  {run.result.rate:.3g} requests/s: {line}")


def _cells(result: WindowResult) -> list[str]:
    cached = result.cached_tokens
    share = "" if cached is None else f"{cached / max(1, result.prompt_tokens):.0%}"
    late = result.late_ms["p99"]
    return [
        f"{result.rate:.3g}",
        f"{result.num_requests:,}",
        f"{result.attainment:.1%}",
        f"{result.goodput_per_s:.2f}",
        _three(result.ttft_ms, ".0f"),
        _three(result.tpot_ms, ".2f"),
        _three(result.itl_ms, ".1f"),
        _three({name: v and v / 1e3 for name, v in result.e2e_ms.items()}, ".2f"),
        "" if late is None else f"{late:.1f}",
        f"{result.prompt_tokens_per_s:,.0f}",
        share,
        str(result.num_refused),
        str(result.num_failed),
    ]


def _three(values: Percentiles, form: str) -> str:
    shown = (values[name] for name in ("p50", "p90", "p99"))
    return " / ".join("-" if value is None else format(value, form) for value in shown)


def _remarks(result: WindowResult) -> list[str]:
    failures = [f"{count} x {message}" for message, count in result.errors.items()]
    return [*result.warnings, *failures]
