"""Tests shapes, prompts, arrivals and summaries."""

import random
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

from pdserve.bench.record import append, circumstances, percentiles, repeated
from pdserve.bench.workload import Lengths, Shape, draw_work, poisson_arrivals


def test_a_shape_is_read_and_written() -> None:
    shape = Shape.parse("64x512-1024x256")
    assert shape == Shape(64, Lengths(512, 1024), Lengths(256, 256))
    assert str(shape) == "64x512-1024x256"
    assert shape.max_tokens == 1280


@pytest.mark.parametrize(
    "text", ["", "64", "64x1024", "64x1024x256x1", "0x8x8", "-1x8x8", "4xax8", "4x8-x8", "1.5x8x8"]
)
def test_a_bad_shape_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="must look like"):
        Shape.parse(text)


@pytest.mark.parametrize("text", ["0", "9-8", "0-4"])
def test_a_bad_length_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="at least 1 and a range must rise"):
        Lengths.parse(text)


def test_work_follows_from_the_seed_and_keeps_to_its_lengths() -> None:
    shape = Shape.parse("200x5-9x2-3")
    works = draw_work(shape, 100, seed=1)
    assert works == draw_work(shape, 100, seed=1) != draw_work(shape, 100, seed=2)
    assert {len(work.prompt_token_ids) for work in works} == {5, 6, 7, 8, 9}
    assert {work.output_len for work in works} == {2, 3}
    tokens = {token for work in works for token in work.prompt_token_ids}
    assert min(tokens) == 0 and max(tokens) == 99


def test_arrivals_are_a_poisson_process() -> None:
    times = poisson_arrivals(20.0, 20_000, seed=3)
    assert times == poisson_arrivals(20.0, 20_000, seed=3) != poisson_arrivals(20.0, 20_000, seed=4)
    gaps = np.diff([0.0, *times])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.05)  # of an exponential, spread equals mean
    per_second = np.histogram(times, bins=np.arange(0, int(times[-1])))[0]
    # of a Poisson count, variance equals mean
    assert per_second.var() == pytest.approx(20, rel=0.15)


def test_percentiles_are_numpys_in_milliseconds() -> None:
    values = [random.Random(5).expovariate(3.0) for _ in range(999)]
    random.Random(6).shuffle(values)
    found = percentiles(values)
    assert found["p50"] == pytest.approx(1e3 * statistics.median(values), abs=1e-3)
    assert found["p99"] == pytest.approx(1e3 * float(np.percentile(values, 99)), abs=1e-3)
    assert found["mean"] == pytest.approx(1e3 * statistics.fmean(values), abs=1e-3)
    assert percentiles([1.0, 2.0])["p99"] == pytest.approx(1990)
    assert percentiles([]) == {"p50": None, "p99": None, "mean": None}


def test_repeats_have_median_and_spread() -> None:
    assert repeated([3.0, 1.0, 2.5]) == {"median": 2.5, "spread": 2.0}


def test_lines_are_appended(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    append(out, {"a": 1})
    append(out, {"b": 2})
    append(None, {"c": 3})
    assert out.read_text() == '{"a": 1}\n{"b": 2}\n'


def test_circumstances_hold_the_given_commit_and_no_absolute_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["/opt/somewhere/pdserve", "bench", "--model", "/models/x", "--shape", "1x2x3"]
    )
    facts = circumstances("abc1234")
    assert facts["commit"] == "abc1234" and facts["torch"]
    assert facts["command"] == "pdserve bench --model x --shape 1x2x3"
