"""Formats: how each module of one checkpoint is stored. It is a value that goes to every rank with
the ModelSpec.

A checkpoint may have tens of thousands of modules, so the facts of the headers are kept by pattern.
A pattern is a name with "*" for its numbers. A module that differs from the others of its pattern
is kept by name.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from pdserve.models.formats.rules import Rule, apply_rules
from pdserve.models.formats.source_format import DENSE, SourceFormat

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Formats(BaseModel):
    """The formats of all modules.

    place: file and key that say that the checkpoint is quantised.
    kinds: all formats in it.
    patterns, exceptions: index into kinds for each pattern, and for each module that differs.
    rules: those of the configuration, used if there are no headers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    place: str
    kinds: tuple[SourceFormat, ...] = ()
    patterns: Mapping[str, int] = {}
    exceptions: Mapping[str, int] = {}
    rules: tuple[Rule, ...] = ()

    def of(self, module: str) -> SourceFormat:
        """Returns how the module is stored; 16 bits if nothing says otherwise."""
        if self.rules:
            return apply_rules(self.rules, module)
        index = self.exceptions.get(module, self.patterns.get(pattern_of(module)))
        return DENSE if index is None else self.kinds[index]

    @property
    def quantised(self) -> tuple[SourceFormat, ...]:
        """All formats that it has, except for 16 bits."""
        kinds = self.kinds or tuple(dict.fromkeys(rule.format for rule in self.rules))
        return tuple(kind for kind in kinds if kind.kind != "dense")

    def changed(self, change: Callable[[SourceFormat], SourceFormat]) -> "Formats":
        """Returns the same with each format changed."""
        rules = [rule.model_copy(update={"format": change(rule.format)}) for rule in self.rules]
        kinds = tuple(map(change, self.kinds))
        return self.model_copy(update={"kinds": kinds, "rules": tuple(rules)})


def formats_of_modules(place: str, found: Mapping[str, SourceFormat]) -> Formats:
    """Makes the value that answers for each of these modules as given."""
    kinds = sorted(set(found.values()), key=lambda kind: kind.model_dump_json())
    number = {kind: index for index, kind in enumerate(kinds)}
    members: dict[str, list[str]] = defaultdict(list)
    for module in sorted(found):
        members[pattern_of(module)].append(module)
    patterns: dict[str, int] = {}
    exceptions: dict[str, int] = {}
    for pattern, modules in sorted(members.items()):
        patterns[pattern] = number[_most_common([found[module] for module in modules])]
        for module in modules:
            if (index := number[found[module]]) != patterns[pattern]:
                exceptions[module] = index
    return Formats(place=place, kinds=tuple(kinds), patterns=patterns, exceptions=exceptions)


def pattern_of(module: str) -> str:
    return NUMBER.sub("*", module)


def _most_common(formats: Sequence[SourceFormat]) -> SourceFormat:
    """Returns the most common format, and the first of equals."""
    [(format, _)] = Counter(formats).most_common(1)
    return format
