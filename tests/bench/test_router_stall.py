"""Tests benchmarks/router/router_stall.py: rows are sent and measured, and missed targets are
reported."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.router.hostile_requests import ROWS
from benchmarks.router.router_stall import Result, misses
from benchmarks.support.served_cluster import environment

FINE = Result(
    row="infinity",
    gap_ms=40.0,
    control_gap_ms=30.0,
    health_ms=5.0,
    memory_mb=10.0,
    refusal_s=0.1,
    statuses={"400": 1},
    said="",
    seconds=0.1,
    witness_ms=1.0,
    control_witness_ms=1.0,
    engine_late_ms=1.0,
    num_lost=0,
    misses=[],
)


@pytest.mark.processes
@pytest.mark.slow
def test_two_rows(tmp_path: Path) -> None:
    """A refused request and a fair one, each beside streams that flow. Status 1: on a machine that
    runs tests, a row may miss."""
    out = tmp_path / "rows.jsonl"
    command = [
        sys.executable,
        "-m",
        "benchmarks.router.router_stall",
        "--only",
        "infinity",
        "posts-500",
        "--out",
        str(out),
    ]
    command += ["--attempts", "1", "--control-s", "0.5"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    refused, fair = [json.loads(line) for line in out.read_text().splitlines()]
    assert refused["statuses"] == {"400": 1}
    assert fair["statuses"] == {"200": 500}
    for row in (refused, fair):
        assert row["control_gap_ms"] > 10 and row["gap_ms"] > 10, (
            "streams of a token every 20 ms have such gaps"
        )
        assert (
            row["num_lost"] == 0 and row["health_ms"] > 0 and row["bare_us_per_token"]["median"] > 0
        )
    assert "of 2 rows as wanted" in done.stdout


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"gap_ms": 130.0}, ["gap 130 ms"]),
        ({"gap_ms": 130.0, "control_gap_ms": 90.0}, []),
        ({"memory_mb": 201.0}, ["memory 201 MB"]),
        ({"refusal_s": 1.2}, ["refused after 1.2 s"]),
        ({"statuses": {"500": 1}}, ["HTTP 500"]),
        ({"num_lost": 2}, ["2 streams lost"]),
        ({"statuses": {"open": 1}}, ["no answer within 30 s"]),
    ],
)
def test_what_is_not_as_wanted(changes: dict, said: list[str]) -> None:
    assert misses(ROWS["infinity"], replace(FINE, **changes), is_alive=True) == said


def test_a_fair_request_must_be_answered_and_a_router_must_live() -> None:
    assert misses(ROWS["posts-500"], FINE, is_alive=True) == ["a fair request got {'400': 1}"]
    assert (
        misses(
            ROWS["slow-bodies"], replace(FINE, statuses={"open": 64}, refusal_s=None), is_alive=True
        )
        == []
    )
    assert misses(ROWS["infinity"], FINE, is_alive=False) == ["the router died"]
