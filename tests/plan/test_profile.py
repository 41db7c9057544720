"""Profiles: step times fitted to points, what they say of other degrees, files, and a measurement
of the demo model on CPU."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from plan.jobs import profile

from benchmarks.support.places import DEMO, SHAPES
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.models.config import ModelSpec, read_spec
from pdserve.plan.costs.step import Degrees
from pdserve.plan.profile.measure import Grid, _fill, measure_profile
from pdserve.plan.profile.profile import (
    DEFAULT,
    DecodePoint,
    MixedPoint,
    Profile,
    PromptPoint,
    read_profile,
    write_profile,
)
from pdserve.plan.profile.scaled import scale
from pdserve.plan.profile.step_times import StepLoad, StepTimes
from pdserve.plan.simulation.paper_engine import layout_of


def made(**more: object) -> Profile:
    """Makes the profile of a device with exact times: 1 ms + 0.1 ms per row, 1 us per key, 2 ns per
    pair."""
    return Profile(
        device="paper",
        model="m",
        dtype="bfloat16",
        spec={},
        source=("by hand",),
        decodes=tuple(
            DecodePoint(batch, context, 1e-3 + 1e-4 * batch + 1e-6 * batch * context)
            for batch in (1, 10, 100)
            for context in (100, 1000)
        ),
        prompts=(
            PromptPoint(100, 0, 11e-3),
            PromptPoint(1000, 0, 101e-3),
            PromptPoint(1000, 500, 101e-3 + 2e-9 * 1000 * 500),
        ),
        mixed=(MixedPoint(100, 10, 100, 11e-3 + 1e-3 + 1e-3 + 3e-3),),
        **more,  # type: ignore[arg-type]
    )


def test_step_times_are_those_of_the_points_and_between() -> None:
    times = StepTimes(made())
    assert times.key_s == pytest.approx(1e-6)
    assert times.seconds(StepLoad(10, 10_000)) == pytest.approx(12e-3)
    assert times.seconds(StepLoad(55, 0)) == pytest.approx(6.5e-3)  # between 10 and 100
    assert times.seconds(StepLoad(200, 0)) == pytest.approx(21e-3)  # the last slope goes on
    assert times.seconds(StepLoad(0, 0, ((0, 550),))) == pytest.approx(56e-3)
    assert times.seconds(StepLoad(0, 0, ((0, 3),))) == pytest.approx(11e-3)  # its launches
    behind = times.seconds(StepLoad(0, 0, ((2000, 1000),)))
    assert behind == pytest.approx(101e-3 + 2e-9 * 1000 * 2000)
    beside = times.seconds(StepLoad(10, 1000, ((0, 100),)))
    assert beside == pytest.approx(11e-3 + 1e-3 + 1e-3 + 3e-3)
    two = times.seconds(StepLoad(0, 0, ((0, 500), (0, 500))))
    assert two == pytest.approx(101e-3 - 2e-9 * (1000**2 / 2 - 500**2))


def test_steps_with_prompts_take_the_time_of_their_graph() -> None:
    times = StepTimes(made(graph_rows=(200, 300)))
    assert times.seconds(StepLoad(0, 0, ((0, 150),))) == pytest.approx(21e-3)
    assert times.seconds(StepLoad(0, 0, ((0, 200),))) == pytest.approx(21e-3)
    assert times.seconds(StepLoad(0, 0, ((0, 201),))) == pytest.approx(31e-3)
    assert times.seconds(StepLoad(0, 0, ((0, 550),))) == pytest.approx(56e-3)
    beside = times.seconds(StepLoad(10, 1000, ((0, 150),)))
    assert beside - times.mixed_s == pytest.approx(21e-3 + 1e-3)


def test_a_gpu_that_serves_computes_prompts_more_slowly() -> None:
    cold, hot = StepTimes(made()), StepTimes(made(hot_factor=1.1, spread=0.05))
    for load in (StepLoad(0, 0, ((0, 3),)), StepLoad(10, 1000, ((0, 100),))):
        assert hot.seconds(load) == pytest.approx(1.1 * cold.seconds(load))
    assert hot.seconds(StepLoad(10, 1000)) == cold.seconds(StepLoad(10, 1000))
    assert hot.spread == 0.05


def test_reading_earlier_tokens_takes_time_by_itself() -> None:
    """A part of 100 rows reads them as long as it computes 50 rows with them."""

    def seconds(rows: int, start: int) -> float:
        return 1e-3 + 1e-4 * rows + 2e-9 * rows * start + 1e-7 * start

    points = tuple(PromptPoint(*p, seconds(*p)) for p in ((100, 0), (1000, 0)))
    deep = tuple(PromptPoint(*p, seconds(*p)) for p in ((100, 4000), (1000, 9000), (1000, 500)))
    times = StepTimes(msgspec.structs.replace(made(), prompts=points + deep))
    assert times.seconds(StepLoad(0, 0, ((8000, 100),))) == pytest.approx(seconds(100, 8000))
    two = times.seconds(StepLoad(0, 0, ((8000, 100), (2000, 900))))
    pairs = 100 * 8050 + 900 * 2450 - 1000**2 / 2
    assert two == pytest.approx(101e-3 + 2e-9 * pairs + 1e-7 * 10_000)


def test_the_shipped_profile_says_where_it_is_from() -> None:
    found = read_profile(DEFAULT)
    assert found.device == "NVIDIA H200" and len(found.source) > 1
    times = StepTimes(found)
    for point in found.decodes:
        load = StepLoad(point.batch, point.batch * point.context)
        assert times.seconds(load) == pytest.approx(point.seconds, rel=0.03)


def test_more_gpus_take_less_time_and_hold_more() -> None:
    found = profile()
    spec = ModelSpec.model_validate(found.spec)
    one = scale(found, spec, Degrees())
    two = scale(found, spec, Degrees(tp=2))
    assert one.is_measured and not two.is_measured
    assert one.profile is found
    assert two.num_kv_tokens > 2 * one.num_kv_tokens
    for ours, theirs in zip(two.profile.prompts, found.prompts, strict=True):
        assert 0.4 < ours.seconds / theirs.seconds <= 1.0
    with pytest.raises(ValueError, match="tensor_parallel"):
        scale(found, spec, Degrees(tp=64))


def test_another_model_is_scaled_and_one_that_is_too_large_refused() -> None:
    found = profile()
    large = read_spec(str(SHAPES / "llama-3.1-70b"), "dummy")
    with pytest.raises(ValueError, match="do not fit"):
        scale(found, large, Degrees())
    eight = scale(found, large, Degrees(tp=8))
    assert eight.profile.spec["num_layers"] == large.num_layers and not eight.is_measured


def test_files_come_back_and_wrong_ones_name_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, read_profile(DEFAULT))
    assert read_profile(path) == read_profile(DEFAULT)
    whole = json.loads(path.read_text())
    for name, value, says in (
        ("decodes", [{"batch": 0, "context": 9, "seconds": 1}], r"batch|>= 1"),
        ("prompts", [{"rows": 9, "start": 0, "seconds": 0}], r"> 0"),
        ("command_s", -5, r"command_s"),
        ("link_byte_per_s", 1, r"link_byte_per_s"),
        ("spec", {}, r"spec\.\w+: "),
    ):
        path.write_text(json.dumps(whole | {name: value}))
        with pytest.raises(ValueError, match=says) as caught:
            read_profile(path)
        assert "\n" not in str(caught.value) and "is no profile" in str(caught.value)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"--profile .* is no profile .*pdserve profile --model"):
        read_profile(path)
    with pytest.raises(ValueError, match=r"cannot be read .*pdserve profile --model"):
        read_profile(tmp_path / "none.json")


@pytest.mark.lengthy
def test_the_demo_is_measured_on_cpu() -> None:
    grid = Grid((1, 2), (64, 128), (32, 64), ((32, 64),), (2,), (32,), 64, 5.0)
    found = measure_profile(str(DEMO), "cpu", "auto", "auto", grid)
    assert {(point.batch, point.context) for point in found.decodes} == {
        (1, 64),
        (2, 64),
        (1, 128),
        (2, 128),
    }
    assert [(p.rows, p.start) for p in found.prompts] == [(32, 0), (64, 0), (32, 64)]
    assert len(found.mixed) == 1
    times = [p.seconds for p in found.decodes] + [p.seconds for p in found.prompts]
    assert min(*times, found.mixed[0].seconds) > 0
    spec = ModelSpec.model_validate(found.spec)
    assert scale(found, spec, Degrees()).num_kv_tokens == found.num_kv_tokens
    assert found.memory_bytes > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_rows_that_are_taken_as_computed_are_random(dtype: str) -> None:
    layout = layout_of(ModelSpec.model_validate(profile().spec), 16, dtype)
    cache = KVCache(torch.zeros(3 * layout.block_bytes, dtype=torch.uint8), layout)
    _fill(cache)
    assert not cache.data[0].any(), "the null block stays as it is"
    for group in cache.groups:
        rows = group[1:].float()
        assert rows.isfinite().all() and 0.9 < rows.std() < 1.1
