"""Corrupt quantised checkpoints: each is refused before anything is served, with an error that
names the file, the tensor, and the cure."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.quantised import change_config, refused
from support.tiny_models import make_tiny

from demo.storing import WAYS, Tensors, write_quantised

UP = "model.layers.1.mlp.up_proj"
DOWN = "model.layers.1.mlp.down_proj"
WEIGHTS = "model.safetensors"
AGAIN = "quantise the model again"
DOWNLOAD = "download the file again"
RESTORE = "restore"

Config = dict[str, Any]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama3", tmp_path_factory.mktemp("plain"), intermediate_size=160)


@dataclass(frozen=True)
class Corrupt:
    """A checkpoint of `way` whose tensors are changed, and what the error must say: a tensor, what
    is wrong with it, the cure, and whether config.json too."""

    way: str
    change: Callable[[Tensors], object]
    tensor: str
    problem: str
    cure: str = AGAIN
    names_config: bool = True


def set_to(name: str, *shape: int, dtype: torch.dtype) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape).to(dtype)})


def without(*endings: str) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(endings)]:
            del tensors[name]

    return change


def rename(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def in_16_bits(*modules: str) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        for name, tensor in list(tensors.items()):
            module, _, last = name.rpartition(".")
            if modules and module not in modules:
                continue
            if last == "weight_scale":
                del tensors[name]
            elif last == "weight":
                tensors[name] = tensor.to(torch.bfloat16)

    return change


F32, F16, I32, I64 = torch.float32, torch.float16, torch.int32, torch.int64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CORRUPT: dict[str, Corrupt] = {
    "fp8 without a scale": Corrupt(
        "fp8", without(f"{UP}.weight_scale"), f"{UP}.weight_scale", "missing"
    ),
    "fp8 scale of another shape": Corrupt(
        "fp8", set_to(f"{UP}.weight_scale", 3, dtype=F32), f"{UP}.weight_scale", "has shape [3]"
    ),
    "fp8 scale of integers": Corrupt(
        "fp8", set_to(f"{UP}.weight_scale", dtype=I32), f"{UP}.weight_scale", "is I32, not F32"
    ),
    "fp8 with five bits of exponent": Corrupt(
        "fp8",
        set_to(f"{UP}.weight", 160, 64, dtype=E5M2),
        f"{UP}.weight",
        "is F8_E5M2, not F8_E4M3",
    ),
    "int8 that is called fp8": Corrupt(
        "fp8", set_to(f"{UP}.weight", 160, 64, dtype=torch.int8), f"{UP}.weight", "is I8, not"
    ),
    "fp8 of one dimension": Corrupt(
        "fp8", set_to(f"{UP}.weight", 160, dtype=E4M3), f"{UP}.weight", "which is not a matrix"
    ),
    "scales of blocks without blocks in the configuration": Corrupt(
        "fp8",
        rename(f"{UP}.weight_scale", f"{UP}.weight_scale_inv"),
        f"{UP}.weight_scale",
        "missing among weight, weight_scale_inv",
    ),
    "blocks of another size": Corrupt(
        "fp8-blocks",
        set_to(f"{UP}.weight_scale_inv", 3, 1, dtype=F32),
        f"{UP}.weight_scale_inv",
        "has shape [3, 1], not [2, 1]",
    ),
    "blocks without scales": Corrupt(
        "fp8-blocks", without(f"{UP}.weight_scale_inv"), f"{UP}.weight_scale_inv", "missing"
    ),
    "a second scale": Corrupt(
        "fp8",
        set_to(f"{UP}.weight_scale_2", dtype=F32),
        f"{UP}.weight_scale_2",
        "does not belong to this format",
    ),
    "static activations without a scale": Corrupt(
        "fp8-static", without(f"{UP}.input_scale"), f"{UP}.input_scale", "missing"
    ),
    "dynamic activations with a scale": Corrupt(
        "fp8",
        set_to(f"{UP}.input_scale", dtype=F32),
        f"{UP}.input_scale",
        "does not belong to this format",
    ),
    "16 bits where the configuration says fp8": Corrupt(
        "fp8", in_16_bits(UP), f"{UP}.weight", "is BF16, but"
    ),
    "lm_head in fp8": Corrupt(
        "fp8",
        set_to("lm_head.weight", 256, 64, dtype=E4M3),
        "lm_head.weight",
        "not supported",
        names_config=False,
    ),
    "embeddings with a scale": Corrupt(
        "fp8",
        set_to("model.embed_tokens.weight_scale", 256, 1, dtype=F32),
        "model.embed_tokens.weight_scale",
        "not supported",
        names_config=False,
    ),
    "a router in fp8": Corrupt(
        "fp8",
        set_to("model.layers.1.mlp.gate.weight", 8, 64, dtype=E4M3),
        "model.layers.1.mlp.gate.weight",
        "not supported",
        names_config=False,
    ),
    "awq without numbers": Corrupt("awq", without(f"{UP}.qweight"), f"{UP}.qweight", "missing"),
    "awq with zeros of 64 bits": Corrupt(
        "awq", set_to(f"{UP}.qzeros", 2, 20, dtype=I64), f"{UP}.qzeros", "is I64, not I32"
    ),
    "awq with scales of other outputs": Corrupt(
        "awq", set_to(f"{UP}.scales", 2, 152, dtype=F16), f"{UP}.scales", "[2, 152], not [2, 160]"
    ),
    "awq with groups of another size": Corrupt(
        "awq", set_to(f"{UP}.scales", 1, 160, dtype=F16), f"{UP}.scales", "[1, 160], not [2, 160]"
    ),
    "awq of one dimension": Corrupt(
        "awq", set_to(f"{UP}.qweight", 64, dtype=I32), f"{UP}.qweight", "which is not a matrix"
    ),
    "gptq with too few groups' numbers": Corrupt(
        "gptq", set_to(f"{UP}.g_idx", 32, dtype=I32), f"{UP}.g_idx", "has shape [32], not [64]"
    ),
    "gptq without zeros": Corrupt("gptq", without(f"{UP}.qzeros"), f"{UP}.qzeros", "missing"),
    "gptq with inputs that are no whole groups": Corrupt(
        "gptq",
        set_to(f"{DOWN}.qweight", 18, 64, dtype=I32),
        f"{DOWN}.qweight",
        "has 144 inputs, which are not whole groups of 32",
    ),
    "gptq with outputs that fill no words": Corrupt(
        "gptq",
        set_to(f"{UP}.qweight", 8, 156, dtype=I32),
        f"{UP}.qweight",
        "has 156 outputs, which is not a multiple of 8",
        cure=f"leave {UP} in 16 bits",
    ),
    "packed numbers of 64 bits": Corrupt(
        "ct-int4", set_to(f"{UP}.weight_packed", 160, 8, dtype=I64), f"{UP}.weight_packed", "is I64"
    ),
    "packed without a shape": Corrupt(
        "ct-int4", without(f"{UP}.weight_shape"), f"{UP}.weight_shape", "missing"
    ),
    "packed without zeros": Corrupt(
        "ct-int4-zeros", without(f"{UP}.weight_zero_point"), f"{UP}.weight_zero_point", "missing"
    ),
    "symmetric with zeros": Corrupt(
        "ct-int4",
        set_to(f"{UP}.weight_zero_point", 20, 2, dtype=I32),
        f"{UP}.weight_zero_point",
        "does not belong to this format",
    ),
    "packed in order of activations": Corrupt(
        "ct-int4",
        set_to(f"{UP}.weight_g_idx", 64, dtype=I32),
        f"{UP}.weight_g_idx",
        "does not belong to this format",
    ),
    "a scale per tensor instead of per row": Corrupt(
        "ct-fp8-rows",
        set_to(f"{UP}.weight_scale", 1, dtype=F32),
        f"{UP}.weight_scale",
        "has shape [1], not [160, 1]",
    ),
}


@pytest.mark.parametrize("kind", CORRUPT)
def test_a_corrupt_checkpoint_is_refused(kind: str, plain: Path, tmp_path: Path) -> None:
    case = CORRUPT[kind]
    folder = write_quantised(plain, tmp_path, WAYS[case.way])
    tensors = load_file(folder / WEIGHTS)
    case.change(tensors)
    save_file(tensors, folder / WEIGHTS)
    message = refused(folder)
    assert str(folder / WEIGHTS) in message
    assert f"tensor {case.tensor}" in message and case.problem in message
    assert case.cure in message
    if case.names_config:
        assert f"{folder / 'config.json'}: quantization_config" in message


def test_there_are_thirty_kinds() -> None:
    assert len(CORRUPT) >= 30


@pytest.mark.parametrize("way", ["fp8", "awq", "gptq", "ct-int4"])
def test_a_module_that_the_configuration_excludes_must_not_be_quantised(
    way: str, plain: Path, tmp_path: Path
) -> None:
    folder = write_quantised(plain, tmp_path, WAYS[way])
    key, value = {
        "fp8": ("ignored_layers", [UP]),
        "awq": ("modules_to_not_convert", ["layers.1.mlp.up"]),
        "gptq": ("dynamic", {r"-:.*\.1\.mlp\.up": {}}),
        "ct-int4": ("ignore", ["lm_head", r"re:.*layers\.1\.mlp\.up_proj"]),
    }[way]
    change_config(folder, (key,), value)
    message = refused(folder)
    assert str(folder / WEIGHTS) in message and f"tensor {UP}." in message
    assert f"{folder / 'config.json'}: quantization_config says that it is not" in message
    assert AGAIN in message


@pytest.mark.parametrize("way", ["awq", "fp8"])
def test_tensors_of_one_way_and_the_configuration_of_another(
    way: str, plain: Path, tmp_path: Path
) -> None:
    folder = write_quantised(plain, tmp_path, WAYS[way])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = WAYS["gptq"].config
    (folder / "config.json").write_text(json.dumps(config))
    message = refused(folder)
    assert str(folder / WEIGHTS) in message and "is stored as GPTQ int4" in message
    assert "tensor model.layers." in message and AGAIN in message


def test_a_configuration_without_quantised_tensors(plain: Path, tmp_path: Path) -> None:
    folder = write_quantised(plain, tmp_path, WAYS["gptq"], dense=("model",))
    message = refused(folder)
    assert f"{folder / 'config.json'}: quantization_config says that the model is" in message
    assert f"no tensor of {folder} is" in message and AGAIN in message


def test_quantised_tensors_without_a_configuration(plain: Path, tmp_path: Path) -> None:
    folder = write_quantised(plain, tmp_path, WAYS["awq"])
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    message = refused(folder)
    assert str(folder / WEIGHTS) in message and ".qweight (I32)" in message
    assert f"{folder / 'config.json'} has no quantization_config: {RESTORE}" in message


def test_a_name_in_two_files(plain: Path, tmp_path: Path) -> None:
    folder = write_quantised(plain, tmp_path, WAYS["fp8"])
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    parts = {"a.safetensors": tensors, "b.safetensors": {f"{UP}.weight": tensors[f"{UP}.weight"]}}
    for name, part in parts.items():
        save_file(part, folder / name)
    index = {"weight_map": dict.fromkeys(tensors, "a.safetensors") | {"x": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refused(folder)
    assert f"tensor {UP}.weight is in {folder / 'a.safetensors'} and again in" in message
    assert str(folder / "b.safetensors") in message and "remove the file" in message


def rewrite_header(file: Path, change: Callable[[Config], object]) -> None:
    """The header of a safetensors file, changed; its bytes stay as they are."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    written = json.dumps(header).encode()
    file.write_bytes(len(written).to_bytes(8, "little") + written + content[8 + length :])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda header: header[f"{UP}.weight"].update(shape=[160, 65]), "has 10240 bytes"),
        (lambda header: header[f"{UP}.weight"].pop("dtype"), "which is not valid"),
        (lambda header: header[f"{UP}.weight"].update(data_offsets=[1]), "which is not valid"),
        (lambda header: header.update({f"{UP}.weight": None}), "which is not valid"),
    ],
    ids=["shape", "no dtype", "one offset", "nothing"],
)
def test_a_corrupt_header(
    change: Callable[[Config], object], problem: str, plain: Path, tmp_path: Path
) -> None:
    folder = write_quantised(plain, tmp_path, WAYS["fp8"])
    rewrite_header(folder / WEIGHTS, change)
    message = refused(folder)
    assert str(folder / WEIGHTS) in message and f"tensor {UP}.weight" in message
    assert problem in message and DOWNLOAD in message


def test_a_header_that_is_no_json(plain: Path, tmp_path: Path) -> None:
    folder = write_quantised(plain, tmp_path, WAYS["fp8"])
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[8:12] = b"\xff\xff\xff\xff"
    (folder / WEIGHTS).write_bytes(content)
    message = refused(folder)
    assert str(folder / WEIGHTS) in message and "its header is not valid" in message
    assert "download it again" in message
