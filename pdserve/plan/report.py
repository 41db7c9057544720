"""Shows a plan as a table in a terminal, and as one HTML file that needs no others.

This module knows no simulations. `cli` calls it.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.replay.charts import Curve, Guide, curves
from pdserve.bench.replay.page import STYLE
from pdserve.bench.tables import print_table
from pdserve.plan.layouts.layout import Layout, Slo
from pdserve.plan.loads import Load
from pdserve.plan.search.bottleneck import bottleneck
from pdserve.plan.search.goodput import Goodput
from pdserve.plan.simulation.jobs import Percentiles

WIDTH = 150  # characters of the table
COLUMNS = (
    "#",
    "layout",
    "GPUs",
    "goodput req/s",
    "per GPU",
    "TTFT p50/90/99 ms",
    "TPOT p50/90/99 ms",
    "serves it",
    "step times",
    "what limits it",
)
MOST_CURVES = 6


@dataclass(frozen=True)
class Planned:
    layout: Layout
    goodput: Goodput

    @property
    def per_gpu(self) -> float:
        return self.goodput.rate / self.layout.num_gpus


@dataclass(frozen=True)
class Plan:
    """All that a report shows."""

    planned: list[Planned]  # the best one first
    load: Load
    slo: Slo
    model: str
    device: str  # name of the profile's device
    notes: list[str]  # remarks for the reader

    @property
    def best(self) -> Planned:
        return self.planned[0]


def ranked(planned: Sequence[Planned], rate: float) -> list[Planned]:
    """Ranks layouts. Those that serve the wanted rate come first, ordered by fewest GPUs and then
    by goodput. The others follow, ordered by goodput."""

    def order(one: Planned) -> tuple[bool, float, float]:
        serves = one.goodput.rate >= rate
        return not serves, one.layout.num_gpus if serves else 0, -one.goodput.rate

    return sorted(planned, key=order)


def show(plan: Plan) -> None:
    rows = [_cells(number, one, plan) for number, one in enumerate(plan.planned, 1)]
    print_table(_title(plan), COLUMNS, rows, WIDTH, left=("layout", "what limits it"))
    for note in plan.notes:
        print(note)


def page(plan: Plan) -> str:
    lines = [
        Curve(
            f"{one.layout} ({one.layout.num_gpus} GPUs)",
            [(p.rate, 100 * p.outcome.kept) for p in one.goodput.points if p.outcome.is_whole],
        )
        for one in plan.planned
    ]
    drawn = [line for line in lines if line.points][:MOST_CURVES]
    guide = Guide(100 * plan.slo.share, f"{plan.slo.share:.0%}")
    parts = [
        "<h1>Predicted goodput</h1>",
        f"<p>{html.escape(_title(plan))}</p>",
        *(f"<p>{html.escape(note)}</p>" for note in plan.notes),
    ]
    if drawn:
        chart = curves(
            "Attainment over rate", drawn, "requests/s", "% that keep both promises", guide
        )
        parts.append(f'<div class="plots">{chart}</div>')
    parts.append('<div class="wide"><table><tr>')
    parts += [f"<th>{name}</th>" for name in COLUMNS]
    parts.append("</tr>")
    for number, one in enumerate(plan.planned, 1):
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(number, one, plan))
        parts.append(f"<tr>{cells}</tr>")
    parts.append("</table></div>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Predicted goodput</title>'
        f"<style>{STYLE}</style></head>\n<body>" + "\n".join(parts) + "</body></html>\n"
    )


def _title(plan: Plan) -> str:
    return (
        f"{plan.model} on {plan.device}: {plan.load.name}; {plan.slo.share:.0%} of requests keep "
        f"TTFT <= {plan.slo.ttft_ms:g} ms and TPOT <= {plan.slo.tpot_ms:g} ms"
    )


def _cells(number: int, one: Planned, plan: Plan) -> list[str]:
    best = one.goodput.best
    outcome = best.outcome if best is not None else None
    return [
        str(number),
        str(one.layout),
        str(one.layout.num_gpus),
        f"{one.goodput.rate:.3g}",
        f"{one.per_gpu:.3g}",
        "-" if outcome is None else _three(outcome.ttft_ms, ".0f"),
        "-" if outcome is None else _three(outcome.tpot_ms, ".2f"),
        "yes" if one.goodput.rate >= plan.load.rate else "no",
        "measured" if one.layout.is_measured else "scaled",
        bottleneck(one.layout, one.goodput),
    ]


def _three(values: Percentiles, form: str) -> str:
    return "-" if values is None else " / ".join(format(value, form) for value in values)
