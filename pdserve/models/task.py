"""Decides what a checkpoint is for: generating tokens, or embedding texts.

A checkpoint in sentence-transformers' form says so itself. modules.json names the modules after the
decoder, and 1_Pooling/config.json says which row becomes the embedding. This file needs no torch
and reads small files alone. The engine and routers call it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pdserve.configs.embedding import EmbeddingModel
from pdserve.models.config import read_hidden_size

MODULES = "modules.json"
POOLING = "config.json"
TAKEN = ("Transformer", "Pooling", "Normalize")

Task = Literal["auto", "generate", "embed"]


def read_embedding(folder: Path, task: Task) -> EmbeddingModel | None:
    """Returns how the model in `folder` embeds; None for a model that generates.

    task: "auto": the model embeds if modules.json has a pooling module, or if config.json names the
        bare decoder ("Qwen3Model"). "embed": any decoder embeds.
    Raises ValueError, which names the file, if its embeddings cannot be served.
    """
    if task == "generate":
        return None
    modules = _modules(folder)
    raw = _read(folder / "config.json") or {}
    names = raw.get("architectures") or []
    is_bare = bool(names) and str(names[0]).endswith("Model")
    if task == "auto" and "Pooling" not in modules and not is_bare:
        return None
    for kind in modules:
        if kind not in TAKEN:
            raise ValueError(
                f"{folder / MODULES} has a module {kind!r}: only {', '.join(TAKEN)} are supported"
            )
    if "Pooling" in modules:
        _check_pooling(folder / modules["Pooling"] / POOLING)
    allowed = raw.get("matryoshka_dimensions") or ()
    return EmbeddingModel(
        size=read_hidden_size(folder),
        normalizes="Normalize" in modules or not modules,
        dimensions=tuple(sorted(int(size) for size in allowed)),
    )


def _modules(folder: Path) -> dict[str, str]:
    """Returns the folder of each module by the last part of its type; empty without the file."""
    found = _read(folder / MODULES)
    if found is None:
        return {}
    try:
        return {str(each["type"]).rpartition(".")[2]: str(each.get("path", "")) for each in found}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MODULES} is not a list of modules: {error!r}") from error


def _check_pooling(file: Path) -> None:
    """Raises ValueError unless the last token's row is the embedding."""
    facts = _read(file)
    if not isinstance(facts, Mapping):
        raise ValueError(f"{file} is missing: it says which row is the embedding")
    modes = [name for name, value in facts.items() if name.startswith("pooling_mode_") and value]
    named = facts.get("pooling_mode")
    if named is not None:
        modes = [f"pooling_mode_{name}" for name in ([named] if isinstance(named, str) else named)]
    if modes != ["pooling_mode_lasttoken"]:
        said = ", ".join(modes) or "no pooling mode"
        raise ValueError(
            f"{file} says {said}: only pooling_mode_lasttoken is supported, with which decoders "
            "are trained"
        )


def _read(file: Path) -> Any:
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
