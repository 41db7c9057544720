"""Builds a model and fills its weights: from safetensors, or at random for benchmarks.

It is all or nothing: a weight that stays unfilled, a checkpoint tensor that nobody takes, or
numbers that cannot be right are an error that names file, tensor and cure. This file knows no
architecture (models/registry.py) and no fused matrices (models/weights.py). `engine.components`
calls it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from pdserve.kernels.experts.placement import Placements
from pdserve.kernels.ops import Ops
from pdserve.models.checkpoint import (
    INDEX_FILE,
    LoadFormat,
    resolve_folder,
    tensor_entries,
    weight_files,
)
from pdserve.models.config import ModelSpec
from pdserve.models.families import FAMILIES
from pdserve.models.formats.headers import is_kv_scale
from pdserve.models.registry import CausalLM, builder_of
from pdserve.models.sources.source import DOWNLOAD, TensorError
from pdserve.models.weights import WeightSet
from pdserve.parallel.dims import ParallelDims

PROGRESS_BYTES = 1 << 30  # smaller checkpoints load in a moment and show no progress bar
Report = Callable[[int, int], None]  # takes the number of loaded bytes, and of all bytes
# Tensors for which the model may have no place: rope tables that older tools stored, and the output
# matrix of a tied model.
HARMLESS = ("rotary_emb.inv_freq", "lm_head.weight")
BARE = "embed_tokens.weight"
NAMED_TENSORS = 8  # number of tensors that an error names of a long list


def load_model(
    path: str,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    dims: ParallelDims | None = None,
    report: Report | None = None,
    placements: Placements | None = None,
) -> CausalLM:
    """Returns the model of `spec` on `device`, computing in `dtype`, with the weights of folder (or
    Hub id) `path`.

    load_format: "dummy" reads no file and draws weights from `seed` on the device, equal on every
        device.
    report: is called after each tensor.
    placements: for each mixture, which ranks hold which experts; None: all hold a part of each.
    ValueError names the file and the tensors that are missing, unexpected, damaged, or of another
    shape than config.json says, and the cure.
    """
    model = builder_of(spec)(spec, dtype, device, ops, dims or ParallelDims(), placements)
    tell = report or (lambda done, total: None)
    if load_format == "dummy":
        _draw(model.weights, seed, tell)
    else:
        files = weight_files(resolve_folder(path, load_format))
        _fill(model.weights, files, tell, FAMILIES[spec.architecture].prefix)
    model.weights.finish()
    return model


class _Tensor:
    """Implements models.weights.StoredTensor for a tensor of an open file; reads when asked."""

    def __init__(self, file: Any, name: str) -> None:
        self._file = file
        self._name = name
        self._slice = file.get_slice(name)
        self.shape = tuple(self._slice.get_shape())
        self.dtype: str = self._slice.get_dtype()

    def read(self, window: tuple[slice, ...]) -> torch.Tensor:
        """Reads the window, without a copy if it is the whole tensor."""
        if all(part == slice(0, n) for part, n in zip(window, self.shape, strict=True)):
            tensor: torch.Tensor = self._file.get_tensor(self._name)
        else:
            tensor = self._slice[window]
        return tensor


def _draw(weights: WeightSet, seed: int, report: Report) -> None:
    total = sum(weight.num_bytes for weight in weights.all)
    done = 0
    for weight in weights.all:
        weight.draw(seed)
        done += weight.num_bytes
        report(done, total)


def _fill(weights: WeightSet, files: list[Path], report: Report, family_prefix: str) -> None:
    prefix = f"{family_prefix}model." if _is_bare(files) else ""
    unused: list[str] = []
    file_of: dict[str, Path] = {}
    total = sum(file.stat().st_size for file in files)
    done = 0
    report(0, total)
    for file in _with_progress(files):
        num_bytes = {entry.name: entry.end - entry.start for entry in tensor_entries(file)}
        with _opened(file) as tensors:
            for stored in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                name = f"{prefix}{stored}"
                if file_of.setdefault(name, file) is not file:
                    raise ValueError(
                        f"{name} is in two files of {file.parent}, {file_of[name].name} and "
                        f"{file.name}: remove the one that does not belong to the model"
                    )
                if name in weights.by_name:
                    with _place_named(file_of, name, prefix):
                        weights.by_name[name].load(name, _Tensor(tensors, stored))
                    done += num_bytes[stored]
                    report(done, total)
                elif not _is_harmless(stored, prefix, weights, tensors):
                    unused.append(name)
    cure = f"{DOWNLOAD}, or correct config.json"
    if unused := weights.find_unknown(unused):
        file = file_of[min(unused)]
        here = [name for name in unused if file_of[name] is file]
        raise ValueError(
            f"{file}: the model has no place for {_named(here, prefix)}: {cure}, which describes a "
            "model without them"
        )
    if missing := weights.missing():
        raise ValueError(
            f"{_place_of_all(files)}: the model needs {_named(missing, prefix)}, which the "
            f"checkpoint lacks: {cure}"
        )


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}): {DOWNLOAD}") from error


@contextmanager
def _place_named(file_of: Mapping[str, Path], loaded: str, prefix: str) -> Iterator[None]:
    """Puts the file before the message of a ValueError: that of the tensor at fault, or else that
    of the tensor that is loaded."""
    try:
        yield
    except TensorError as error:
        stored = error.name.removeprefix(prefix)
        raise ValueError(f"{file_of[error.name]}: tensor {stored} {error.problem}") from error
    except ValueError as error:
        raise ValueError(f"{file_of[loaded]}: {error}") from error


def _place_of_all(files: list[Path]) -> Path:
    """Returns the file that says which tensors there are: the index, or the only file."""
    index = files[0].parent / INDEX_FILE
    return index if index.is_file() else files[0]


def _is_bare(files: list[Path]) -> bool:
    """True if a decoder was saved without the modules around it, as embedding models are. Then the
    names of its tensors lack the first part."""
    return any(entry.name == BARE for file in files for entry in tensor_entries(file))


def _is_harmless(name: str, prefix: str, weights: WeightSet, tensors: Any) -> bool:
    """True if the model needs no place for the tensor. GPTQ's tools give every matrix a bias, which
    is all zeros if the model has none."""
    module, _, last = name.rpartition(".")
    if last == "bias" and f"{prefix}{module}.qweight" in weights.by_name:
        return not bool(tensors.get_tensor(name).any())
    return name.endswith(HARMLESS) or is_kv_scale(name)


def _with_progress(files: list[Path]) -> "tqdm[Path]":
    large = sum(file.stat().st_size for file in files) >= PROGRESS_BYTES
    # None shows the bar on a terminal only.
    return tqdm(files, desc="loading weights", unit="file", disable=not large or None)


def _named(names: list[str], prefix: str) -> str:
    rest = len(names) - NAMED_TENSORS
    some = ", ".join(name.removeprefix(prefix) for name in sorted(names)[:NAMED_TENSORS])
    some += f" and {rest} more" if rest > 0 else ""
    return f"tensor {some}" if len(names) == 1 else f"the tensors {some}"
