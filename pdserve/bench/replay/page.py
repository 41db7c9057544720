"""Writes results of replayed windows as one HTML file that needs nothing else.

It has a curve of attainment over rate, a table, and for each window timelines and histograms of
TTFT and TPOT. Knows no servers. Called by commands.py.
"""

import html
from collections.abc import Callable, Sequence

from pdserve.bench.replay.charts import Curve, Guide, curves, histogram, timeline
from pdserve.bench.replay.figures import Percentiles, RequestRecord, Run
from pdserve.bench.replay.series import Series

STYLE = """
:root { --ink: #1d2733; --faint: #d8dee6; --paper: #ffffff; --good: #2f6db5; --bad: #c8402f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe5ec; --faint: #3a444f; --paper: #14191f; --good: #6aa5e8; --bad: #ff7a66; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1280px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; } h3 { font-size: 1em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25em .7em; text-align: right; border-bottom: 1px solid var(--faint); }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1em; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--ink); }
svg .title { font-weight: 600; font-size: 13px; }
.grid { stroke: var(--faint); } .guide { stroke: var(--ink); stroke-dasharray: 5 4; }
.kept { fill: var(--good); fill-opacity: .65; }
.missed { stroke: var(--bad); stroke-width: 1.6; fill: none; }
.good { fill: var(--good); } .bad { fill: var(--bad); }
.line { fill: none; stroke-width: 2; }
.c0 { stroke: #2f6db5; } .c1 { stroke: #d9822b; } .c2 { stroke: #2a9d6f; }
.c3 { stroke: #a44fb0; } .c4 { stroke: #c8402f; } .c5 { stroke: #7a7f87; }
.dot { fill: var(--paper); stroke-width: 2.5; }
"""
HEADERS = (
    "series",
    "requests/s",
    "requests",
    "attained",
    "goodput/s",
    "TTFT p50 / 90 / 99 ms",
    "TPOT p50 / 90 / 99 ms",
    "ITL p50 / 90 / 99 ms",
    "E2E p50 / 90 / 99 ms",
    "late p99 ms",
    "prompt tokens/s",
    "cached tokens",
    "refused",
    "failed",
)


def page(series: Sequence[Series], wanted: float) -> str:
    """Returns the text of the file. Raises ValueError without a series.

    `wanted` is the share of requests that must keep both promises.
    """
    if not series:
        raise ValueError("no window was replayed to its end: there is nothing to show")
    parts = [
        "<h1>Replayed traffic</h1>",
        *(f"<p>{html.escape(sentence)}</p>" for sentence in _facts(series, wanted)),
        _attainment(series, wanted),
        '<div class="wide"><table>',
        "<tr>" + "".join(f"<th>{name}</th>" for name in HEADERS) + "</tr>",
        *(_row(one.name, run) for one in series for run in one.runs),
        "</table></div>",
    ]
    for one in series:
        parts.append(f"<h2>{html.escape(one.name)}</h2>")
        parts += [_window(run) for run in one.runs]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Replayed traffic</title>'
        f"<style>{STYLE}</style></head>\n<body>" + "\n".join(parts) + "</body></html>\n"
    )


def _facts(series: Sequence[Series], wanted: float) -> list[str]:
    facts = []
    for one in series:
        result = one.runs[0].result
        kept, settings = result.promises, result.settings
        cuts = f"prompts cut at {settings.max_input}, answers at {settings.max_output} tokens"
        facts.append(
            f"{one.name}: {wanted:.0%} of requests keep TTFT ≤ {kept.ttft_ms:g} ms and TPOT ≤ "
            f"{kept.tpot_ms:g} ms up to {one.limit(wanted)}. Trace {settings.trace}, window "
            f"{settings.window} s, {cuts}, model {result.model}, seed {settings.seed}, commit "
            f"{result.circumstances.get('commit', 'unknown')}."
        )
        facts += [
            f"{one.name} at {run.result.rate:.3g} requests/s: {warning}."
            for run in one.runs
            for warning in run.result.warnings
        ]
    return facts


def _attainment(series: Sequence[Series], wanted: float) -> str:
    lines = [
        Curve(one.name, [(run.result.rate, 100 * run.result.attainment) for run in one.runs])
        for one in series
    ]
    guide = Guide(100 * wanted, f"{wanted:.0%}")
    chart = curves("Attainment over rate", lines, "requests/s", "% that keep both promises", guide)
    return f'<div class="plots">{chart}</div>'


def _row(name: str, run: Run) -> str:
    result = run.result
    late = result.late_ms["p99"]
    cells = [
        html.escape(name),
        f"{result.rate:.3g}",
        f"{result.num_requests:,}",
        f"{result.attainment:.1%}",
        f"{result.goodput_per_s:.2f}",
        *map(_three, (result.ttft_ms, result.tpot_ms, result.itl_ms, result.e2e_ms)),
        "–" if late is None else f"{late:.1f}",
        f"{result.prompt_tokens_per_s:,.0f}",
        "–" if result.cached_tokens is None else f"{result.cached_tokens:,}",
        str(result.num_refused),
        str(result.num_failed),
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _three(values: Percentiles) -> str:
    shown = (values[name] for name in ("p50", "p90", "p99"))
    return " / ".join("–" if value is None else f"{value:,.4g}" for value in shown)


def _window(run: Run) -> str:
    """Returns timelines and histograms of TTFT and TPOT of one window.

    Refused and failed requests are strokes at the upper edge.
    """
    result = run.result
    promises = result.promises
    measures: tuple[tuple[str, Callable[[RequestRecord], float | None], float], ...] = (
        ("TTFT", lambda record: record.ttft_ms, promises.ttft_ms),
        ("TPOT", lambda record: record.tpot_ms, promises.tpot_ms),
    )
    lost = [record.at_s for record in run.records if record.status != "finished"]
    plots = []
    for name, value_of, most in measures:
        guide = Guide(most, f"{most:g} ms")
        points = [
            (record.at_s, value)
            for record in run.records
            if record.status == "finished" and (value := value_of(record)) is not None
        ]
        kept = [point for point in points if point[1] <= most]
        missed = [point for point in points if point[1] > most]
        plots += [
            timeline(
                f"{name} over arrival", kept, missed, lost, "arrival, s", f"{name}, ms", guide
            ),
            histogram(f"Histogram of {name}", [value for _, value in points], f"{name}, ms", guide),
        ]
    return (
        f"<h3>{result.rate:.3g} requests/s: {result.attainment:.1%} of {result.num_requests} "
        f'requests</h3><div class="plots">{"".join(plots)}</div>'
    )
