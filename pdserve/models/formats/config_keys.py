"""Keys: a part of a configuration file, which is read with errors that name file and key. This file
also finds the places where a model's folder says how it is quantised.

It knows no method.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

USE_16_BITS = "use the 16-bit weights of the model, or a checkpoint in a supported format"

# Keys of config.json, with what they imply. Older tools of compressed-tensors wrote the second one.
KEYS: dict[str, dict[str, Any]] = {
    "quantization_config": {},
    "compression_config": {"quant_method": "compressed-tensors"},
}
# Files beside config.json, with the method that each belongs to.
FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}


@dataclass(frozen=True)
class Keys:
    """The values below `path` (empty: at the top) of a JSON file."""

    file: Path
    path: str
    values: Mapping[str, Any]

    @property
    def place(self) -> str:
        """The file's name and the path in it, which are the same on all hosts."""
        return f"{self.file.name}: {self.path}" if self.path else self.file.name

    def where(self, key: str) -> str:
        return f"{self.file}: {self.path}.{key}" if self.path else f"{self.file}: {key}"

    def refuse(self, key: str, problem: str, cure: str = USE_16_BITS) -> ValueError:
        """Returns an error that names file, key and value; `problem` follows the value."""
        said = f"={self.values[key]!r}" if key in self.values else ""
        return ValueError(f"{self.where(key)}{said} {problem}: {cure}")

    def has(self, key: str) -> bool:
        """True if the key has a value other than null."""
        return self.values.get(key) is not None

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "must be true or false", "correct the file")
        return value

    def key_of(self, *names: str) -> str:
        """Returns the first name of a key that is present, or the first of all if none is."""
        return next((name for name in names if self.has(name)), names[0])

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.refuse(key, "is missing", "restore the file from the model's source")
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refuse(key, "must be a whole number", "correct the file")
        return value

    def word(self, key: str, default: str) -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(key, "must be a word", "correct the file")
        return value

    def words(self, key: str) -> tuple[str, ...]:
        """Returns a list of strings; () if the key is missing."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.refuse(key, "must be a list of names", "correct the file")
        return tuple(value)

    def below(self, key: str) -> "Keys | None":
        """Returns the mapping under `key`; None if there is none or it is null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(key, "must be a mapping", "correct the file")
        return Keys(self.file, f"{self.path}.{key}" if self.path else key, value)

    def only(self, key: str, allowed: Sequence[object], default: object) -> object:
        """Returns the value, which must be one of `allowed`."""
        value = default if self.values.get(key) is None else self.values[key]
        if value not in allowed:
            names = " or ".join(json.dumps(each) for each in allowed)
            raise self.refuse(key, f"is not supported, only {names} is")
        return value

    def pattern(self, key: str, pattern: str) -> str:
        """Returns `pattern`, an expression found under `key`, if it is valid."""
        try:
            re.compile(pattern)
        except re.error as error:
            raise self.refuse(
                key, f"has no valid expression {pattern!r} ({error})", "correct the file"
            ) from error
        return pattern


def find_keys(folder: Path, config: Mapping[str, Any]) -> list[Keys]:
    """Finds all places in which the model in `folder`, with this config.json, says how it is
    quantised. Those in config.json come first. Raises ValueError if one is not a JSON mapping."""
    file = folder / "config.json"
    top = Keys(file, "", config)
    found = []
    for key, method in KEYS.items():
        keys = top.below(key)
        if keys is not None and keys.values:
            said = {**method, **keys.values}
            found.append(Keys(file, key, said))
    for name, implied in FILES.items():
        if not (folder / name).is_file():
            continue
        values = _mapping(folder / name)
        found.append(Keys(folder / name, "", {"quant_method": implied, **values}))
    return found


def _mapping(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): download it again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} is not a JSON mapping: download it again")
    return values
