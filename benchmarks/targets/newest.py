"""The newest figures of saved rows, over the cards and degrees that they were measured with.

Processes of one commit may differ by some per cent on one machine, so a figure is the median over
the rows of the newest commit. This module measures nothing and imports no torch.
benchmarks/costs/check.py and benchmarks/performance.py use it.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from benchmarks.support.places import RESULTS
from pdserve.bench.record import Json
from pdserve.plan.costs.step import Degrees


class Case(NamedTuple):
    """A row of a table, and on which card and degrees of ranks it was measured."""

    device: str
    model: str
    degrees: Degrees
    row: str


class Measured(NamedTuple):
    """The newest figures of a case, and their file and commit."""

    figures: dict[str, float]
    source: str


def newest_figures(files: Iterable[str]) -> dict[Case, Measured]:
    """Returns the newest figures of each case in these files of benchmarks/results: medians over
    the runs of the newest commit that has it. Comparisons of two commits are not used: they are
    made beside other work, on whatever card there was, and a prompt of 2,048 tokens takes 45 ms on
    one card and 50 on another."""
    runs: dict[tuple[Case, str], list[dict[str, Any]]] = defaultdict(list)
    newest: dict[Case, tuple[str, str, str]] = {}
    for name in files:
        for line in (RESULTS / name).read_text().splitlines():
            row = json.loads(line)
            if row.get("benchmark") != "targets":
                continue
            case = Case(row["device"], row["model"], _degrees(row.get("engine", {})), row["row"])
            runs[case, row["commit"]].append(row["figures"])
            newest[case] = max(newest.get(case, ("",) * 3), (row["time"], row["commit"], name))
    found = {}
    for case, (_, commit, name) in newest.items():
        medians = [
            {k: v["median"] for k, v in figures.items() if isinstance(v, dict) and "median" in v}
            for figures in runs[case, commit]
        ]
        figures = {k: statistics.median(one[k] for one in medians) for k in medians[0]}
        found[case] = Measured(figures, f"{name}, {commit}")
    return found


def _degrees(engine: Json) -> Degrees:
    """Returns the degrees that fields of an engine ask for."""
    return Degrees(
        engine.get("tensor_parallel", 1),
        engine.get("pipeline_parallel", 1),
        engine.get("data_parallel", 1),
        engine.get("expert_parallel", False),
    )
