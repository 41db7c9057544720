"""The newest figures of each case: medians over the rows of the newest commit that has it."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.places import RESULTS
from benchmarks.targets import newest
from benchmarks.targets.newest import Case, newest_figures
from pdserve.bench.record import Json
from pdserve.plan.costs.step import Degrees

FILE = "two-gpus-h200.jsonl"


def line(commit: str, time: str, median: float, **other: Any) -> str:
    figures = {"seconds": {"median": median, "min": 0.0}, "num_cached_kernels": 404}
    row: Json = {"benchmark": "targets", "device": "NVIDIA H200"}
    row |= {"model": "m", "row": "batch-64"}
    row |= {"engine": {"tensor_parallel": 2}, "commit": commit, "time": time, "figures": figures}
    return json.dumps(row | other)


def test_a_figure_is_the_median_over_the_newest_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines are in any order, and each number of GPUs has a case of its own."""
    lines = [
        line("new", "2026-11-27T03:00:00Z", 9.0),
        line("new", "2026-11-27T01:00:00Z", 5.0),
        line("new", "2026-11-27T02:00:00Z", 7.0),
        line("old", "2026-11-26T00:00:00Z", 1.0),
        line("old", "2026-11-26T00:00:00Z", 3.0, engine={}),
        line("other", "2026-11-28T00:00:00Z", 2.0, benchmark="serve"),
    ]
    (tmp_path / FILE).write_text("\n".join(lines))
    monkeypatch.setattr(newest, "RESULTS", tmp_path)
    found = newest_figures([FILE])
    assert {case.degrees: measured for case, measured in found.items()} == {
        Degrees(tp=2): ({"seconds": 7.0}, f"{FILE}, new"),
        Degrees(): ({"seconds": 3.0}, f"{FILE}, old"),
    }


def test_the_saved_rows_have_their_newest_commit() -> None:
    rows = [json.loads(text) for text in (RESULTS / FILE).read_text().splitlines()]
    ours = [
        row
        for row in rows
        if row.get("row") == "prefill-8k"
        and row["model"] == "llama-3.1-8b"
        and row["engine"].get("tensor_parallel") == 2
    ]
    assert len({row["commit"] for row in ours}) > 1
    last = max(ours, key=lambda row: str(row["time"]))
    case = Case("NVIDIA H200", "llama-3.1-8b", Degrees(tp=2), "prefill-8k")
    figures, source = newest_figures([FILE])[case]
    assert source == f"{FILE}, {last['commit']}"
    assert figures["prefill_ms"] == pytest.approx(last["figures"]["prefill_ms"]["median"], rel=0.02)
