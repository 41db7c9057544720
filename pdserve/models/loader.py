"""Builds a model and fills its weights: from safetensors, or at random for benchmarks.

It is all or nothing: a weight that stays unfilled, or a checkpoint tensor that nobody takes, is an
error that names it. This file knows no architecture (models/registry.py) and no fused matrices
(models/weights.py). `engine.components` calls it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tqdm import tqdm

from pdserve.kernels.experts.placement import Placements
from pdserve.kernels.ops import Ops
from pdserve.models.checkpoint import LoadFormat, resolve_folder, tensor_entries, weight_files
from pdserve.models.config import ModelSpec
from pdserve.models.families import FAMILIES
from pdserve.models.formats.headers import is_kv_scale
from pdserve.models.registry import CausalLM, builder_of
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
    ValueError names tensors that are missing, unexpected, or of another shape than config.json
    says.
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
        with safe_open(file, framework="pt") as tensors:
            for stored in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                name = f"{prefix}{stored}"
                if file_of.setdefault(name, file) is not file:
                    raise ValueError(
                        f"{name} is in two files of {file.parent}, {file_of[name].name} and "
                        f"{file.name}: remove the one that does not belong to the model"
                    )
                if name in weights.by_name:
                    weights.by_name[name].load(name, _Tensor(tensors, stored))
                    done += num_bytes[stored]
                    report(done, total)
                elif not _is_harmless(stored, prefix, weights, tensors):
                    unused.append(name)
    if unused := weights.find_unknown(unused):
        raise ValueError(
            f"the model has no place for these tensors of {files[0].parent}: {_named(unused)}"
        )
    if missing := weights.missing():
        raise ValueError(f"{files[0].parent} lacks these tensors: {_named(missing)}")


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


def _named(names: list[str]) -> str:
    rest = len(names) - NAMED_TENSORS
    return ", ".join(sorted(names)[:NAMED_TENSORS]) + (f" and {rest} more" if rest > 0 else "")
