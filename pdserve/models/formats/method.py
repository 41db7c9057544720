"""Method: what a configuration says in one of the known ways. Each of them has a file beside this
one."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.models.checkpoint import TensorEntry
from pdserve.models.formats.config_keys import Keys
from pdserve.models.formats.rules import Rule
from pdserve.models.formats.source_format import GROUP_SIZES, SourceFormat


@dataclass(frozen=True)
class Method:
    """rules: which modules are stored how, in order. is_complete: whether every module that is kept
    in 16 bits is excluded by a rule, so that one that is not is an error."""

    keys: Keys
    rules: tuple[Rule, ...]
    is_complete: bool

    def resolve(self, said: SourceFormat, tensors: Mapping[str, TensorEntry]) -> SourceFormat:
        """What `said` leaves open, as the module's tensors (by name after the module's) say it."""
        names = (*said.tensors, *(name for name in said.optional if name in tensors))
        return said.model_copy(update={"tensors": names, "optional": ()})


def group_of(keys: Keys, key: str) -> tuple[int, int]:
    """SourceFormat.group for the number of inputs under `key` (-1: all)."""
    size = keys.integer(key)
    if size != -1 and size not in GROUP_SIZES:
        names = ", ".join(map(str, GROUP_SIZES))
        raise keys.refuse(key, f"is not supported, only {names} and -1 are")
    return (1, max(size, 0))
