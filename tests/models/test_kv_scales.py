"""Scales of a KV cache: from a checkpoint's tensors, and from a file."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.quantised import write_kv_scales
from support.tiny_models import make_tiny

from pdserve.models.config import read_spec
from pdserve.models.kv_scales import KvScales, power_of_two, save_scales

LAYERS, HEADS = 3, 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny("llama3", tmp_path / "model")


def add(folder: Path, **tensors: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({**load_file(file), **named}, file, {"format": "pt"})


def test_powers_of_two_are_not_below() -> None:
    for scale in (1e-30, 0.003, 0.25, 0.2501, 1.0, 447.0, 3e38):
        found = power_of_two(scale)
        assert found == 2.0 ** round(torch.tensor(found).log2().item())
        assert scale <= found < 2 * scale or found in (2.0**-64, 2.0**64)
    assert power_of_two(0) == 1.0


def test_scales_by_head_and_layer(folder: Path) -> None:
    assert read_spec(str(folder)).kv_scales is None
    plain = read_spec(str(folder)).fingerprint()
    stored = write_kv_scales(folder)
    spec = read_spec(str(folder))
    assert spec.kv_scales is not None and spec.fingerprint() != plain
    assert spec.kv_scales.k[0] == spec.kv_scales.v[0] == (1.0, 1.0)
    for name, values in stored.items():
        layer, plane = int(name.split(".")[2]), name[-7]
        found = getattr(spec.kv_scales, plane)[layer]
        assert found == tuple(power_of_two(x) for x in values.tolist())
    assert type(spec).model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("name", "planes"),
    [
        ("self_attn.k_scale", "k"),
        ("attn.v_scale", "v"),
        ("self_attn.kv_scale", "kv"),
        ("self_attn.k_proj.k_scale", "k"),
        ("self_attn.v_proj.output_scale", "v"),
        ("self_attn.qkv_proj.v_scale", "v"),
        ("self_attn.q_scale", ""),
        ("self_attn.prob_scale", ""),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_names_and_dtypes(folder: Path, name: str, planes: str, dtype: torch.dtype) -> None:
    add(folder, **{f"model__layers__1__{name}": torch.tensor([0.3], dtype=dtype)})
    scales = read_spec(str(folder)).kv_scales
    if not planes:
        assert scales is None
        return
    assert scales is not None
    for plane in "kv":
        wanted = 0.5 if plane in planes else 1.0
        assert getattr(scales, plane)[1] == (wanted,) * HEADS
        assert getattr(scales, plane)[0] == getattr(scales, plane)[2] == (1.0,) * HEADS


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.tensor(float("nan")), "not above 0"),
        (torch.tensor(0.0), "not above 0"),
        (torch.tensor([0.5, -1.0]), "not above 0"),
        (torch.ones(3), r"F32 \[3\], not one number or one for each of 2"),
        (torch.ones(2, dtype=torch.int32), "I32"),
    ],
)
def test_tensors_that_are_no_scales(folder: Path, tensor: torch.Tensor, problem: str) -> None:
    name = "model.layers.1.self_attn.k_scale"
    add(folder, **{name: tensor})
    with pytest.raises(ValueError, match=f"model.safetensors: tensor {name} .*{problem}.*again"):
        read_spec(str(folder))


def of_all(scale: float) -> KvScales:
    rows = ((scale,) * HEADS,) * LAYERS
    return KvScales(k=rows, v=rows)


def test_a_file_goes_before_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    write_kv_scales(folder)
    file = tmp_path / "scales.json"
    save_scales(file, of_all(0.5), read_spec(str(folder)).weights, {"tokens": 7})
    assert read_spec(str(folder), kv_scales=str(file)).kv_scales == of_all(0.5)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda said: said.update(weights="of another"), "belongs to another model"),
        (lambda said: said["scales"].update(k=[[1.0, 1.0]]), "belongs to another model"),
        (lambda said: said["scales"]["v"][1].append(1.0), "belongs to another model"),
        (
            lambda said: said["scales"]["v"][1].__setitem__(0, 0.3),
            "scales that are not powers of two",
        ),
        (
            lambda said: said["scales"]["v"][1].__setitem__(0, -1.0),
            "scales that are not powers of two",
        ),
        (lambda said: said.pop("scales"), "holds no scales"),
    ],
)
def test_files_that_do_not_fit(change, problem: str, folder: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "scales.json"
    with pytest.raises(ValueError, match=r"scales.json cannot be read .*calibrate-kv"):
        read_spec(str(folder), kv_scales=str(file))
    save_scales(file, of_all(0.5), read_spec(str(folder)).weights, {})
    said = json.loads(file.read_text())
    change(said)
    file.write_text(json.dumps(said))
    with pytest.raises(ValueError, match=f"scales.json .*{problem}.*calibrate-kv"):
        read_spec(str(folder), kv_scales=str(file))


def test_of_largest_numbers() -> None:
    scales = KvScales.of_largest([[448.0, 449.0]], [[0.0, 7.0]])
    assert scales.k == ((1.0, 2.0),) and scales.v == ((1.0, 2.0**-6),)
