"""The sampling parameters that a model's own generation_config.json recommends, under the names of
SamplingParams.

As in vLLM they stand for what a request does not say: temperature, top_p, top_k, min_p,
repetition_penalty, and max_new_tokens. The file's end-of-sequence tokens are read elsewhere
(models/config.py) and always count. Torch-free; knows no requests. Read once by `LLM` and by each
router.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

FILE = "generation_config.json"

# its name in the file -> in SamplingParams
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
    """What the file in `folder` says, unchecked; empty without a file, and for "none". ValueError
    when it is no JSON object.
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
    """For the log: "temperature=0.6, top_k=20", by the names of SamplingParams."""
    return ", ".join(f"{name}={value}" for name, value in defaults.items())
