"""Tests benchmarks/goodput_check.py: the windows that it simulates, and how it judges."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import goodput_check
from benchmarks.goodput import BEFORE, LAYOUTS, LOADS
from benchmarks.support.places import RESULTS
from pdserve.plan.profile.profile import DEFAULT, read_profile


def test_windows_are_those_that_are_sent() -> None:
    profile, traces = read_profile(DEFAULT), goodput_check.traces()
    for name, load in LOADS.items():
        for layout in ("auto", "always", "whole"):
            rate = float(load.rates[layout].split(",")[0])
            job = goodput_check.job(traces[name], name, layout, rate, profile)
            assert len(job.requests) == round(rate * load.seconds)
            assert job.requests[-1].at_s == pytest.approx(load.seconds, rel=0.2)
            assert sum(pool.count for pool in job.pools) == 2
            assert (job.split == "never") == (layout == "whole") == (len(job.pools) == 1)
            longest = max(sum(count for _, count in each.prefixes) for each in job.requests)
            assert longest == (15000 if name == "trace" else 2048)


def test_every_window_has_a_prediction_that_was_kept() -> None:
    rows = [
        json.loads(line) for line in (RESULTS / "goodput-predicted.jsonl").read_text().splitlines()
    ]
    wanted = {
        (name, layout, float(rate))
        for name, load in LOADS.items()
        for layout in LAYOUTS
        if layout != BEFORE
        for rate in load.rates[layout].split(",")
    }
    found = {(row["load"], row["layout"], row["rate"]) for row in rows}
    assert not wanted - found, "older windows keep theirs"
    assert all(0 < row["kept"] <= 1 for row in rows)


def test_what_is_off_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def result(rate: float, share: float, ttft: float) -> SimpleNamespace:
        figures = {"p50": ttft, "p90": 2 * ttft}
        made = SimpleNamespace(rate=rate, attainment=share, ttft_ms=figures, tpot_ms=figures)
        return SimpleNamespace(result=made)

    def row(rate: float, kept: float, ttft: float) -> dict[str, Any]:
        figures = {"p50": ttft, "p90": 2 * ttft}
        latencies = {"ttft_ms": figures, "tpot_ms": figures}
        return {"load": "trace", "layout": "auto", "rate": rate, "kept": kept} | latencies

    measured = [result(1.0, 0.95, 100.0), result(2.0, 0.85, 200.0), result(3.0, 0.3, 900.0)]
    (tmp_path / "trace.jsonl").touch()
    monkeypatch.setattr(goodput_check, "Store", lambda path: SimpleNamespace(runs=[]))
    series = SimpleNamespace(name="auto", runs=measured)
    monkeypatch.setattr(goodput_check, "series_of", lambda runs, name: [series])
    good = [row(1.0, 0.95, 110.0), row(2.0, 0.86, 190.0), row(3.0, 0.6, 100.0)]
    assert goodput_check.compare(good, tmp_path) == 0, "a rate with few in time is not judged"
    assert "goodput: predicted 1.56, measured 1.50 = 1.04\n" in capsys.readouterr().out
    slow = [row(1.0, 0.95, 120.0), *good[1:]]
    assert goodput_check.compare(slow, tmp_path) == 4, "p50 and p90 of both"
    early = [row(1.0, 0.91, 110.0), row(2.0, 0.5, 190.0), good[2]]
    assert goodput_check.compare(early, tmp_path) == 1
    # at other rates than were measured, too, and a bound may be off or tell too little
    assert goodput_check.compare([*good[:2], row(1.9, 0.91, 190.0)], tmp_path) == 1
    capsys.readouterr()
    assert goodput_check.compare([row(2.0, 0.91, 190.0)], tmp_path) == 1
    assert "predicted > 2.0, measured 1.50 = 1.33 to inf !" in capsys.readouterr().out
    assert goodput_check.compare([row(1.0, 0.91, 110.0)], tmp_path) == 0
    assert "predicted > 1.0, measured 1.50 = 0.67 to inf, not judged" in capsys.readouterr().out
    assert goodput_check.compare([row(2.0, 0.89, 190.0)], tmp_path) == 0
    assert "predicted 0.00 to 2.00, measured 1.50" in capsys.readouterr().out
