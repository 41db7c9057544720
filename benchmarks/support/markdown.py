"""Writes tables as Markdown."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, *rows]
    cells = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([cells[0], "|" + "---|" * len(head), *cells[1:]])
