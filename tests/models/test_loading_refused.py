"""Faults that only the content of tensors shows, or only the model that is built: each is refused
while weights are loaded, with an error that names the file, the tensor, and the cure."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import make_embedding, make_tiny

from demo.storing import WAYS, Tensors, write_quantised
from pdserve.kernels.ops import ops_for
from pdserve.models.config import read_spec
from pdserve.models.loader import load_model

CPU = torch.device("cpu")
UP = "model.layers.1.mlp.up_proj"
BEHIND = "model.layers.3.mlp.up_proj"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
AGAIN = "download the file again"
CONFIG = "correct config.json"


@dataclass(frozen=True)
class Faulty:
    """A checkpoint of `way` (None: 16 bits) whose tensors are changed, and what the error must say:
    tensors, what is wrong with them, and the cure. is_absent: no file has them."""

    way: str | None
    change: Callable[[Tensors], object]
    tensors: tuple[str, ...]
    problem: str
    cure: str = AGAIN
    is_absent: bool = False


def put(name: str, value: float | int, at: int = 5) -> Callable[[Tensors], object]:
    """Replaces number `at` of the tensor. For a tensor of bytes, value is the code."""

    def change(tensors: Tensors) -> None:
        flat = tensors[name].view(-1)
        (flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat)[at] = value

    return change


def cut_rows(name: str, rows: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name][:rows].clone()})


def without(module: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if module in name]


def again_as(module: str) -> Callable[[Tensors], object]:
    """Stores the module UP a second time, by another name."""
    return lambda tensors: tensors.update(
        {name.replace(UP, module): x.clone() for name, x in tensors.items() if UP in name}
    )


NOT_SCALES = "has numbers that cannot be scales"
NOT_NUMBERS = "has codes that are not numbers"
NAN = float("nan")
FAULTY: dict[str, Faulty] = {
    "fp8 scale that is not a number": Faulty(
        "fp8", put(f"{UP}.weight_scale", NAN, 0), (f"{UP}.weight_scale",), NOT_SCALES
    ),
    "fp8 scale below 0": Faulty(
        "ct-fp8-rows", put(f"{UP}.weight_scale", -1.0), (f"{UP}.weight_scale",), NOT_SCALES
    ),
    "infinite scale of a block": Faulty(
        "fp8-blocks",
        put(f"{UP}.weight_scale_inv", float("inf"), 1),
        (f"{UP}.weight_scale_inv",),
        NOT_SCALES,
    ),
    "awq scale that is not a number": Faulty(
        "awq", put(f"{UP}.scales", NAN), (f"{UP}.scales",), NOT_SCALES
    ),
    "gptq scale that is not a number": Faulty(
        "gptq", put(f"{UP}.scales", NAN), (f"{UP}.scales",), NOT_SCALES
    ),
    "packed scale that is not a number": Faulty(
        "ct-int4", put(f"{UP}.weight_scale", NAN), (f"{UP}.weight_scale",), NOT_SCALES
    ),
    "e4m3 code that is not a number": Faulty(
        "fp8", put(f"{UP}.weight", 0x7F), (f"{UP}.weight",), NOT_NUMBERS
    ),
    "e4m3 code with a sign that is not a number": Faulty(
        "fp8-blocks", put(f"{UP}.weight", 0xFF, -1), (f"{UP}.weight",), NOT_NUMBERS
    ),
    "gptq columns in order of activations": Faulty(
        "gptq",
        lambda tensors: tensors.update({f"{UP}.g_idx": tensors[f"{UP}.g_idx"].flip(0)}),
        (f"{UP}.g_idx",),
        "says that columns of a group are not neighbours",
        "quantise the model again with desc_act=False",
    ),
    "packed matrix of another size": Faulty(
        "ct-int4",
        put(f"{UP}.weight_shape", 159, 0),
        (f"{UP}.weight_shape",),
        "is [159, 64], but config.json says [160, 64]",
    ),
    "quantised matrix of another size than the model's": Faulty(
        "fp8",
        cut_rows(f"{UP}.weight", 152),
        (f"{UP}.weight",),
        "has shape [152, 64] in the checkpoint; config.json says [160, 64]",
        CONFIG,
    ),
    "matrix of another size": Faulty(
        None,
        cut_rows(f"{UP}.weight", 152),
        (f"{UP}.weight",),
        "has shape [152, 64] in the checkpoint; config.json says [160, 64]",
        CONFIG,
    ),
    "norm of integers": Faulty(
        None,
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}),
        ("model.norm.weight",),
        "is I32 in the checkpoint; config.json says F64 or F32 or F16 or BF16",
        CONFIG,
    ),
    "missing tensor": Faulty(
        None,
        without("model.norm.weight"),
        ("model.norm.weight",),
        "which the checkpoint lacks",
        is_absent=True,
    ),
    "missing module": Faulty(
        "awq",
        without(UP),
        (f"{UP}.qweight", f"{UP}.qzeros", f"{UP}.scales"),
        "which the checkpoint lacks",
        is_absent=True,
    ),
    "module of a layer that the model has not": Faulty(
        None, again_as(BEHIND), (f"{BEHIND}.weight",), "the model has no place for", CONFIG
    ),
    "quantised module that the model has not": Faulty(
        "fp8-blocks",
        again_as(BEHIND),
        (f"{BEHIND}.weight",),
        "the model has no place for",
        CONFIG,
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama3", tmp_path_factory.mktemp("plain"), intermediate_size=160)


def refused(folder: Path) -> str:
    """Returns the error by which loading fails; the configuration and the headers are right."""
    spec = read_spec(str(folder))
    with pytest.raises(ValueError) as caught:
        load_model(str(folder), spec, torch.float32, CPU, ops_for(CPU))
    return str(caught.value)


def split(folder: Path) -> dict[str, Path]:
    """Puts the tensors into two files, of each module some into one and some into the other.
    Returns the file of each tensor."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    files = [folder / f"model-{part}-of-2.safetensors" for part in (1, 2)]
    for part, file in enumerate(files):
        save_file({name: tensors[name] for name in sorted(tensors)[part::2]}, file)
    file_of = {name: files[place % 2] for place, name in enumerate(sorted(tensors))}
    names = {name: file.name for name, file in file_of.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    return file_of


def write_faulty(plain: Path, folder: Path, case: Faulty) -> Path:
    if case.way is None:
        shutil.copytree(plain, folder, dirs_exist_ok=True)
    else:
        write_quantised(plain, folder, WAYS[case.way])
    tensors = load_file(folder / SINGLE)
    case.change(tensors)
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    return folder


@pytest.mark.parametrize("is_split", [False, True], ids=["one file", "two files"])
@pytest.mark.parametrize("kind", FAULTY)
def test_a_faulty_checkpoint_is_refused(
    kind: str, is_split: bool, plain: Path, tmp_path: Path
) -> None:
    case = FAULTY[kind]
    folder = write_faulty(plain, tmp_path, case)
    place = folder / SINGLE
    if is_split:
        file_of = split(folder)
        place = folder / INDEX if case.is_absent else file_of[case.tensors[0]]
    message = refused(folder)
    assert message.startswith(f"{place}: "), message
    assert "tensor" in message and all(name in message for name in case.tensors)
    assert case.problem in message and case.cure in message


def test_a_file_with_bytes_of_no_tensor(plain: Path, tmp_path: Path) -> None:
    folder = write_quantised(plain, tmp_path, WAYS["fp8"])
    with (folder / SINGLE).open("ab") as file:
        file.write(b"\0" * 8)
    message = refused(folder)
    assert message.startswith(f"{folder / SINGLE} is damaged") and AGAIN in message


def test_names_are_those_of_the_file(tmp_path: Path) -> None:
    """A decoder that was saved without the modules around it has shorter names."""
    folder = make_embedding(tmp_path, tie_word_embeddings=True)
    tensors = load_file(folder / SINGLE)
    save_file({**tensors, "norm.weight": torch.ones(65)}, folder / SINGLE)
    assert refused(folder).startswith(f"{folder / SINGLE}: tensor norm.weight has shape [65]")
    del tensors["norm.weight"]
    save_file(tensors, folder / SINGLE)
    assert "the model needs tensor norm.weight, which" in refused(folder)
    save_file({**tensors, "norm.weight": torch.ones(64), "x.y": torch.ones(1)}, folder / SINGLE)
    assert "the model has no place for tensor x.y: " in refused(folder)
