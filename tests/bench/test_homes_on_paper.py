"""Homes in lock step on paper, beside the rows measured on two H200s."""

import re
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("captured", "rates"),
    [(8192, ("4,250.2", "10,175.8")), (3072, ("4,033.9", "9,861.9"))],
)
def test_the_measured_rows_are_reproduced_within_a_tenth(
    captured: int, rates: tuple[str, str]
) -> None:
    assert [f"{measured(n, captured)['tokens/s']:,}" for n in (64, 512)] == list(rates)
    ran = run("--captured", str(captured))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert all(f"({rate} measured" in ran.stdout for rate in rates)


def test_steps_of_another_length_are_off() -> None:
    ran = run("--together", "1.6", "--seeds", "1")
    assert ran.returncode == 1, "steps in which both homes have prompts do not matter"


@pytest.mark.slow
def test_no_step_runs_eagerly_if_large_ones_have_graphs() -> None:
    counts = []
    for captured in ("3072", "8192"):
        ran = run("--seeds", "1", "--captured", captured)
        counts.append([int(n) for n in re.findall(r"(\d+) of them eager", ran.stdout)])
    (_, many), few = counts
    assert many > 50 and few == [0, 0]
