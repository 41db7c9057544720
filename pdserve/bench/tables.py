"""Prints tables, also in narrow terminals: there each row becomes a paragraph.

Knows no figures. Torch-free. Used by bench.replay and plan.
"""

from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    left: Collection[str] = (),
) -> None:
    """Prints a table under its title.

    Parameters:
    - columns: Names of the columns. rows: A text for each of them; an empty one is left out of a
      paragraph.
    - width: Characters that the uncut table needs. A file or pipe always gets it.
    - left: Columns that are aligned to the left, instead of to the right.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=width)
    if console.width < width:
        console.print(title, markup=False)
        for row in rows:
            named = [f"{name} {cell}" for name, cell in zip(columns, row, strict=True) if cell]
            console.print("- " + "; ".join(named), markup=False)
        return
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
