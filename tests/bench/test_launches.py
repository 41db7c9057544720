"""Counts what the host starts in a step with a prompt. If it becomes more, prompts over several
GPUs are slower (benchmarks/results/log.md, "Fewer pieces for narrow models")."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.places import SHAPES

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


def started(model: str, *options: str) -> dict[str, Any]:
    """Returns what the benchmark prints, in a process that interprets no kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine.launches", "--model", SHAPES / model, *options],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "options", "launches", "products"),
    [
        ("llama-3.1-8b", [], 5 * 32 + 1, 4 * 32),
        # o and down are multiplied in four pieces, and summed beside that
        ("llama-3.1-8b", ["--ranks", "2"], 19 * 32 + 1, 10 * 32),
        # up to 1,024 rows are read where they were made; more rows are sent by another kernel
        ("llama-3.1-8b", ["--ranks", "2", "--rows", "1024"], 5 * 32 + 1, 4 * 32),
        ("llama-3.1-8b", ["--ranks", "2", "--rows", "1025"], 7 * 32 + 1, 4 * 32),
        ("qwen3-30b-a3b", [], 9 * 48 + 1, 2 * 48),
        ("qwen3-30b-a3b", ["--ranks", "2"], 11 * 48 + 1, 2 * 48),
        ("qwen3-30b-a3b", ["--ranks", "2", "--experts"], 12 * 48 + 1, 2 * 48),
    ],
)
def test_a_step_starts_no_more_than_it_must(
    model: str, options: list[str], launches: int, products: int
) -> None:
    figures = started(model, *options)
    assert (figures["launches"], figures["products"]) == (launches, products)
    assert figures["others"] <= (49 if "--experts" in options else 1), figures["by_operation"]
    assert figures["launches"] == sum(figures["by_kernel"].values())


def test_models_over_latents_are_counted() -> None:
    figures = started("deepseek-v2-lite", "--rows", "128")
    assert figures["by_kernel"]["rope_write_latent_kernel"] == 27
