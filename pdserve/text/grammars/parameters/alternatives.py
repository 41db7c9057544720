"""A schema as alternatives without references: what of it plain text can follow.

`type`, `enum`, `const`, `pattern` and lengths are read, also behind `$ref`, `anyOf`, `oneOf` and
`allOf`. Other keywords are collected by name. `plain_text` calls this module.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.text.answers.native.parameter_types import kinds_of_value
from pdserve.text.grammars.json_schemas.schemas import ENFORCED, target

MAX_ALTERNATIVES = 4096  # looked at for one parameter
MAX_VALUES = 1 << 17  # in these
_TYPES = ("string", "null", "boolean", "integer", "number", "array", "object")
_READ = frozenset({"type", "enum", "const", "pattern", "minLength", "maxLength"})
_FOLLOWED = frozenset({"$ref", "anyOf", "oneOf", "allOf"})


@dataclass(frozen=True)
class Alternative:
    types: frozenset[str] = frozenset(_TYPES)
    values: Mapping[str, Any] | None = None  # by their JSON text; None: all
    patterns: tuple[str, ...] = ()
    least: int = 0  # characters of a string
    most: int | None = None
    others: frozenset[str] = frozenset()  # names of further keywords

    @property
    def takes_all_strings(self) -> bool:
        """True if every string fits."""
        bounds = self.values is None, not self.patterns, not self.least, self.most is None
        return "string" in self.types and all(bounds)

    def fits_length(self, text: str) -> bool:
        return self.least <= len(text) and (self.most is None or len(text) <= self.most)

    def merged(self, other: "Alternative") -> "Alternative":
        """The alternative of what fits both."""
        values = self.values if other.values is None else other.values
        if values is not None and self.values is not None:
            values = {text: value for text, value in values.items() if text in self.values}
        mosts = [most for most in (self.most, other.most) if most is not None]
        return Alternative(
            self.types & other.types,
            values,
            self.patterns + other.patterns,
            max(self.least, other.least),
            min(mosts, default=None),
            self.others | other.others,
        )


class Resolver:
    """Reads schemas of one document. `unenforced` names the keywords that it had to leave out."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._references: list[str] = []  # those that are being followed
        self._num_made = self._num_values = 0
        self.unenforced: set[str] = set()

    def alternatives(self, schema: Any) -> list[Alternative]:
        """Returns alternatives of which a value of the schema fits one."""
        if schema is False:
            return []
        if not isinstance(schema, Mapping):
            return [Alternative()]
        found = [_own(schema)]
        for name in ("$ref", "anyOf", "oneOf", "allOf"):
            for choices in self._choices(name, schema.get(name)):
                found = self._bounded([a.merged(b) for a in found for b in choices], name)
        return [a for a in found if a.types and a.values != {}]

    def _choices(self, name: str, value: Any) -> list[list[Alternative]]:
        """Returns lists of alternatives. A value of the schema fits one of each list."""
        if name == "$ref" and isinstance(value, str):
            return [self._referred(value)]
        parts = value if isinstance(value, list) and name != "$ref" else None
        if parts is None:
            return []
        found = [self._followed(name, part) for part in parts]
        if name == "allOf":
            return found
        if name == "oneOf" and not _are_apart(found):
            self.unenforced.add(name)
        return [self._bounded([a for branch in found for a in branch], name)]

    def _referred(self, reference: str) -> list[Alternative]:
        """Returns the alternatives of a $ref's target."""
        if reference in self._references:  # it adds nothing to itself
            return []
        schema = target(reference, self._root)
        if schema is None:
            self.unenforced.add("$ref")
            return [Alternative()]
        self._references.append(reference)
        try:
            return self._followed("$ref", schema)
        finally:
            self._references.pop()

    def _followed(self, name: str, schema: Any) -> list[Alternative]:
        """Returns the alternatives of a schema to which the keyword `name` leads."""
        self._num_made += 1
        return (
            self._bounded(self.alternatives(schema), name) if self._has_room() else self._all(name)
        )

    def _bounded(self, found: list[Alternative], name: str) -> list[Alternative]:
        self._num_made += len(found)
        self._num_values += sum(len(a.values or ()) for a in found)
        return found if self._has_room() else self._all(name)

    def _has_room(self) -> bool:
        return self._num_made <= MAX_ALTERNATIVES and self._num_values <= MAX_VALUES

    def _all(self, name: str) -> list[Alternative]:
        self.unenforced.add(name)
        return [Alternative()]


def _own(schema: Mapping[str, Any]) -> Alternative:
    """Returns the alternative of the keywords that follow nothing."""
    kinds, enum = schema.get("type"), schema.get("enum")
    named = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else _TYPES
    types = {kind for kind in named if kind in _TYPES}
    types |= {"integer"} if "number" in types else set()
    values = _by_text(enum) if isinstance(enum, list) else None
    if "const" in schema:
        const = _by_text([schema["const"]])
        values = const if values is None or const.keys() <= values.keys() else {}
    if values is not None:
        values = {text: v for text, v in values.items() if kinds_of_value(v) & types}
        types &= set().union(*map(kinds_of_value, values.values()))
    least, most, pattern = (schema.get(name) for name in ("minLength", "maxLength", "pattern"))
    others = ENFORCED & schema.keys() - _READ - _FOLLOWED - {"format"}
    if isinstance(schema.get("format"), str):
        others |= {f"format {schema['format']}"}
    return Alternative(
        frozenset(types),
        values,
        (pattern,) if isinstance(pattern, str) else (),
        least if isinstance(least, int) else 0,
        most if isinstance(most, int) else None,
        frozenset(others),
    )


def _by_text(values: list[Any]) -> dict[str, Any]:
    return {json.dumps(value, sort_keys=True): value for value in values}


def _are_apart(branches: list[list[Alternative]]) -> bool:
    """True if no value can fit two of the branches. False if that is unknown."""
    values: set[str] = set()
    kinds: set[str] = set()  # of all values
    free: set[str] = set()  # types of which an earlier branch allows any value
    for branch in branches:
        listed = [a for a in branch if a.values is not None]
        mine = {text for a in listed for text in a.values or ()}
        my_kinds = {kind for a in listed for kind in a.types}
        my_free = {kind for a in branch if a.values is None for kind in a.types}
        if mine & values or my_kinds & free or my_free & (free | kinds):
            return False
        values |= mine
        kinds |= my_kinds
        free |= my_free
    return True
