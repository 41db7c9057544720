"""Method: what a configuration says in one of the known ways, which have a file each here."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.models.checkpoint import TensorEntry
from pdserve.models.formats.config_keys import Keys
from pdserve.models.formats.rules import Rule
from pdserve.models.formats.source_format import GROUP_SIZES, SourceFormat


@dataclass(frozen=True)
class Method:
    """A configuration that was read.

    rules: which modules are stored how, in order of precedence.
    is_complete: a rule excludes every module that stays in 16 bits, so any other module in 16 bits
        is an error.
    """

    keys: Keys
    rules: tuple[Rule, ...]
    is_complete: bool

    def resolve(self, said: SourceFormat, tensors: Mapping[str, TensorEntry]) -> SourceFormat:
        """Completes what `said` leaves open by the module's tensors, named as after the module's
        name."""
        names = (*said.tensors, *(name for name in said.optional if name in tensors))
        return said.model_copy(update={"tensors": names, "optional": ()})


def group_of(keys: Keys, key: str) -> tuple[int, int]:
    """Returns SourceFormat.group for the number of inputs under `key` (-1: all)."""
    size = keys.integer(key)
    if size != -1 and size not in GROUP_SIZES:
        names = ", ".join(map(str, GROUP_SIZES))
        raise keys.refuse(key, f"is not supported, only {names} and -1 are")
    return (1, max(size, 0))
