"""Parts of a matrix: `make test` runs some of its cases, `make test-all` all of them."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_of(step: int, cases: Iterable[Any]) -> list[Any]:
    """Cases for parametrize, of which each `step`-th is run by make test; the others are slow."""
    marked = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marks = [] if number % step == 0 else [pytest.mark.slow]
        marked.append(pytest.param(*values, marks=marks))
    return marked
