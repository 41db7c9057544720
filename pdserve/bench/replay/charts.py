"""Draws plots as inline SVG: curves, points over time, histograms.

Each function returns the text of one `<svg>` element without links, scripts or fonts of its own.
Colours are CSS variables and classes of page.py. Knows no requests and no servers. Called by
page.py.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 620, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 24, 42
NUM_TICKS = 5
NUM_BINS = 40
NUM_COLOURS = 6  # the classes c0 to c5 of page.py

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """A line through points; the legend shows its name."""

    name: str
    points: Points


@dataclass(frozen=True)
class Guide:
    """A dashed line that crosses the plot at a value of the y axis (in a histogram, of the x
    axis)."""

    value: float
    name: str


def curves(title: str, lines: Sequence[Curve], x_label: str, y_label: str, guide: Guide) -> str:
    """Draws curves over one pair of axes that begin at 0; the y axis includes the guide."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    plot = _Plot(max(xs), max(*ys, guide.value))
    parts = [plot.axes(title, x_label, y_label), plot.across(guide)]
    for number, line in enumerate(lines):
        colour = f"c{number % NUM_COLOURS}"
        placed = [(plot.x(x), plot.y(y)) for x, y in sorted(line.points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline class="line {colour}" points="{path}"/>')
        for (x, y), (at_x, at_y) in zip(sorted(line.points), placed, strict=True):
            hint = html.escape(f"{line.name}: {y:.3g} at {x:g}")
            parts.append(
                f'<circle class="dot {colour}" cx="{at_x:.1f}" cy="{at_y:.1f}" r="4">'
                f"<title>{hint}</title></circle>"
            )
        parts.append(_legend(number, colour, line.name))
    return _svg(title, parts)


def timeline(
    title: str,
    kept: Points,
    missed: Points,
    lost: Sequence[float],
    x_label: str,
    y_label: str,
    guide: Guide,
) -> str:
    """Draws one point for each request; those in `missed` stand out in colour and shape.

    `lost` are the x values of requests without a y. They become strokes at the upper edge.
    """
    both = [*kept, *missed]
    top = max([guide.value, *(y for _, y in both)])
    plot = _Plot(max([*(x for x, _ in both), *lost], default=1.0), top)
    parts = [plot.axes(title, x_label, y_label), plot.across(guide)]
    for x, y in kept:
        parts.append(f'<circle class="kept" cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="2.5"/>')
    for x, y in missed:
        at_x, at_y = plot.x(x), plot.y(y)
        parts.append(f'<path class="missed" d="M{at_x - 3:.1f},{at_y - 3:.1f}l6,6m0,-6l-6,6"/>')
    parts += [f'<path class="missed" d="M{plot.x(x):.1f},{TOP}v7"/>' for x in lost]
    return _svg(title, parts)


def histogram(title: str, values: Sequence[float], x_label: str, guide: Guide) -> str:
    """Draws how many values lie in each of equally wide bins from 0 to the largest.

    Bars that lie wholly above the guide stand out.
    """
    top = max([guide.value, *values]) or 1.0
    counts = [0] * NUM_BINS
    for value in values:
        counts[min(NUM_BINS - 1, int(value / top * NUM_BINS))] += 1
    plot = _Plot(top, max(1, *counts))
    parts = [plot.axes(title, x_label, "requests")]
    for number, count in enumerate(counts):
        if count:
            low, high = (top * (number + step) / NUM_BINS for step in (0, 1))
            kind = "bad" if low >= guide.value else "good"
            parts.append(
                f'<rect class="{kind}" x="{plot.x(low):.1f}" y="{plot.y(count):.1f}" '
                f'width="{plot.x(high) - plot.x(low) - 1:.1f}" '
                f'height="{plot.y(0) - plot.y(count):.1f}">'
                f"<title>{count} from {low:.4g} to {high:.4g}</title></rect>"
            )
    parts.append(plot.down(guide))
    return _svg(title, parts)


class _Plot:
    """A pair of linear axes that begin at 0 and have room for x and y."""

    def __init__(self, x: float, y: float) -> None:
        self._x_ticks = ticks(x)
        self._y_ticks = ticks(y)
        self._x_top = max(x * 1.02, self._x_ticks[1])
        self._y_top = max(y * 1.05, self._y_ticks[1])

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self._x_top

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self._y_top

    def axes(self, title: str, x_label: str, y_label: str) -> str:
        floor = HEIGHT - BOTTOM
        parts = [
            f'<text class="title" x="{LEFT}" y="15">{html.escape(title)}</text>',
            f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">'
            f"{html.escape(x_label)}</text>",
            f'<text x="12" y="{(TOP + floor) / 2:.0f}" text-anchor="middle" '
            f'transform="rotate(-90 12 {(TOP + floor) / 2:.0f})">{html.escape(y_label)}</text>',
        ]
        for tick in self._x_ticks:
            if tick <= self._x_top:
                parts.append(
                    f'<text x="{self.x(tick):.1f}" y="{floor + 16}" text-anchor="middle">'
                    f"{tick:g}</text>"
                )
        for tick in self._y_ticks:
            if tick <= self._y_top:
                at = self.y(tick)
                parts.append(
                    f'<path class="grid" d="M{LEFT},{at:.1f}H{WIDTH - RIGHT}"/>'
                    f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>'
                )
        return "".join(parts)

    def across(self, guide: Guide) -> str:
        at = self.y(guide.value)
        return (
            f'<path class="guide" d="M{LEFT},{at:.1f}H{WIDTH - RIGHT}"/>'
            f'<text class="guide-name" x="{WIDTH - RIGHT}" y="{at - 4:.1f}" text-anchor="end">'
            f"{html.escape(guide.name)}</text>"
        )

    def down(self, guide: Guide) -> str:
        at = self.x(guide.value)
        end, shift = ("end", -4) if at > WIDTH / 2 else ("start", 4)
        return (
            f'<path class="guide" d="M{at:.1f},{TOP}V{HEIGHT - BOTTOM}"/>'
            f'<text class="guide-name" x="{at + shift:.1f}" y="{TOP + 10}" text-anchor="{end}">'
            f"{html.escape(guide.name)}</text>"
        )


def ticks(top: float) -> list[float]:
    """Returns round numbers from 0 to at least `top`, in about NUM_TICKS steps.

    A step is 1, 2 or 5 times a power of ten.
    """
    if top <= 0:
        return [0.0, 1.0]
    raw = top / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return [round(step * number, 12) for number in range(math.ceil(top / step - 1e-9) + 1)]


def _legend(number: int, colour: str, name: str) -> str:
    at = HEIGHT - BOTTOM - 12 - 16 * number
    return (
        f'<circle class="dot {colour}" cx="{LEFT + 14}" cy="{at - 4}" r="4"/>'
        f'<text x="{LEFT + 24}" y="{at}">{html.escape(name)}</text>'
    )


def _svg(title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f"{''.join(parts)}</svg>"
    )
