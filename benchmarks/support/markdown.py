"""Writes tables as Markdown, and the figures in them."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, *rows]
    cells = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([cells[0], "|" + "---|" * len(head), *cells[1:]])


def number(value: float | None) -> str:
    """A figure with three to four digits that count."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"
