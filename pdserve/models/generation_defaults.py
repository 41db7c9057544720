"""The sampling parameters that a model's own generation_config.json recommends, under the names of
SamplingParams.

As in vLLM they fill in what a request does not say: temperature, top_p, top_k, min_p,
repetition_penalty, and max_new_tokens. models/config.py reads the file's end-of-sequence tokens,
which always count. This file needs no torch and knows no requests. `LLM` and each router read the
parameters once.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

FILE = "generation_config.json"

# name in the file -> name in SamplingParams
TAKEN = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_generation_defaults(
    folder: str | Path, generation_config: Literal["auto", "none"]
) -> dict[str, Any]:
    """Returns what the file in `folder` says, unchecked. The result is empty without a file, and
    for "none". Raises ValueError if the file is not a JSON object.
    """
    file = Path(folder) / FILE
    if generation_config == "none" or not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(found).__name__}")
    return {name: found[key] for key, name in TAKEN.items() if found.get(key) is not None}


def described(defaults: Mapping[str, Any]) -> str:
    """Describes the defaults for the log: "temperature=0.6, top_k=20", by SamplingParams' names."""
    return ", ".join(f"{name}={value}" for name, value in defaults.items())
