"""docs/performance.md holds the tables that the saved results make."""

import json
from pathlib import Path

import pytest

from benchmarks import performance
from benchmarks.targets import newest
from pdserve.bench.record import Json


def test_the_tables_are_up_to_date() -> None:
    page = performance.PAGE.read_text()
    assert performance.with_tables(page, performance.tables()) == page, (
        "run: python -m benchmarks.performance"
    )


def test_a_place_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="no place for the table engine"):
        performance.with_tables("# Performance", {"engine": "|a|"})


def test_every_plot_of_the_page_is_there() -> None:
    names = ["engine-speed", "pair-latency", "several-gpus", "goodput"]
    for name in names:
        assert (performance.IMAGES / f"{name}.svg").read_text().lstrip().startswith("<?xml")
        assert f"images/{name}.svg" in performance.PAGE.read_text()


def test_rows_of_two_gpus_are_the_newest_of_their_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def line(part: str, clients: int, speed: float) -> str:
        latency = {"p50": 1.0, "p99": 2.0}
        row: Json = {"benchmark": "serve", "part": part, "clients": clients}
        row |= {"ttft_ms": latency, "tpot_ms": latency, "output_tokens_per_s": speed}
        return json.dumps(row)

    lines = [line("30b-ep2-dp", 512, 3.0), line("30b-ep2-dp", 64, 4.0), line("30b-ep2-dp", 64, 5.0)]
    lines += [line("30b-2-whole", 64, 6.0), json.dumps({"part": "30b-ep2-dp"})]
    (tmp_path / performance.TWO_GPUS).write_text("\n".join(lines))
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    shown = [row.split(" | ") for row in performance.homes_table().splitlines()[2:]]
    assert [(row[0], row[-1]) for row in shown] == [("| 64", "5.00 |"), ("| 512", "3.00 |")]


def test_rows_of_several_gpus_are_medians_of_their_newest_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def line(commit: str, speed: float, **degrees: int) -> str:
        figures = {"tokens_per_s": {"median": speed, "spread": 0.0}}
        row: Json = {"benchmark": "targets", "device": "NVIDIA H200"}
        row |= {"model": "m", "row": "batch-512-in"}
        row |= {"engine": degrees, "commit": commit, "time": commit, "figures": figures}
        return json.dumps(row)

    speeds = (64_676.0, 64_558.0, 62_684.0)
    lines = [line("b", speed, tensor_parallel=2) for speed in speeds]
    lines += [line("a", 1.0, tensor_parallel=2), line("b", 1.0)]
    for name, text in zip(performance.SEVERAL_FILES, ("\n".join(lines), ""), strict=True):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(newest, "RESULTS", tmp_path)
    assert performance.several_lines() == {("m", "TP2", "2 x H200"): {"batch-512-in": 64_558.0}}
