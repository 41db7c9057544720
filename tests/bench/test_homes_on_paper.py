"""Homes in lock step on paper, beside the rows measured on two H200s."""

import subprocess
import sys

import pytest

from benchmarks.costs.homes_on_paper import measured
from benchmarks.support.places import BENCHMARKS

pytestmark = [pytest.mark.processes, pytest.mark.lengthy]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, because it patches the clocks."""
    command = [sys.executable, "-m", "benchmarks.costs.homes_on_paper", *options]
    return subprocess.run(
        command, cwd=BENCHMARKS.parent, capture_output=True, text=True, check=False
    )


def test_the_measured_rows_are_reproduced_within_a_tenth() -> None:
    assert measured(64)["tokens/s"] == 3330.4
    ran = run()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "(3,330.4 measured" in ran.stdout and "(8,745.1 measured" in ran.stdout


def test_launches_of_another_length_are_off() -> None:
    ran = run("--eager-ms", "40", "--seeds", "1")
    assert ran.returncode == 1, "steps without graphs do not matter"
