"""The plain texts that a parameter may have, as a Lark terminal.

The parser takes a text as JSON if it reads as JSON of a type that the schema allows, and as a
string otherwise (`parameter_types`). So a text must fit the schema as what it is taken for. `rules`
calls this module.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.text.answers.native.parameter_types import json_of
from pdserve.text.grammars import lark
from pdserve.text.grammars.json_schemas.patterns import whole
from pdserve.text.grammars.parameters.alternatives import Alternative, Resolver

_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
# texts that the parser may take for a value of a type, if the schema allows that type
_TAKEN_FOR = {
    "null": "(?i:null|none)",
    "boolean": "(?i:true|false)",
    "integer": _NUMBER,
    "number": _NUMBER,
    "array": r"\[(?s:.*)\]",
    "object": r"\{(?s:.*)\}",
    "string": r"\x22(?:[^\x22\x5c\x00-\x1f]|\x5c[\x22\x5c\x2fbfnrt]|\x5cu[0-9a-fA-F]{4})*\x22",
}
# texts of all values of a type
_WRITTEN = {
    "null": "/null/",
    "boolean": "/true|false/",
    "integer": "/-?(?:0|[1-9][0-9]*)/",
    "number": f"/{_NUMBER}/",
    "array": f"/{_TAKEN_FOR['array']}/",
    "object": f"/{_TAKEN_FOR['object']}/",
}
_SPACE = r"[\s\x1c-\x1f]*"  # what Python's strip removes
_ANY = "/(?s:.*)/"
_KEYWORDS = {
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "additionalItems"},
    "object": {"properties", "required", "additionalProperties", "patternProperties"}
    | {"minProperties", "maxProperties"},
}
_KEYWORDS["number"] = _KEYWORDS["integer"]


@dataclass(frozen=True)
class PlainText:
    expression: str  # right side of a terminal; "": no text fits
    unenforced: frozenset[str]  # keywords that the texts need not follow


def plain_text(
    schema: Any, root: Mapping[str, Any], kinds: frozenset[str], without: str
) -> PlainText:
    """Returns the texts that the parser reads as values of the schema.

    - root: The document of the schema, to which its references refer.
    - kinds: The parser's `kinds_of` the parameter: "string" and other types. Empty: "string".
    - without: A text that none of them may hold.

    Raises ValueError for a pattern that cannot be read and for an unknown type.
    """
    writer = _Writer(schema, root, kinds, without)
    return PlainText(" | ".join(writer.options()), frozenset(writer.unenforced))


class _Writer:
    def __init__(
        self, schema: Any, root: Mapping[str, Any], kinds: frozenset[str], without: str
    ) -> None:
        if unknown := kinds - _TAKEN_FOR.keys():
            raise ValueError(f"its type {min(unknown)!r:.80} is unknown: send one of JSON's")
        resolver = Resolver(root)
        self._alternatives = resolver.alternatives(schema)
        self._kinds = kinds or frozenset({"string"})
        self._others = sorted(kinds - {"string"})
        self._without = without
        self.unenforced = resolver.unenforced

    def options(self) -> Iterator[str]:
        """Returns expressions of which a text matches one."""
        free = [kind for kind in self._others if any(self._free(kind))]
        for alternative in self._alternatives:
            self.unenforced |= self._left_out(alternative)
        if free == self._others and any(a.takes_all_strings for a in self._alternatives):
            yield lark.without(self._without)
            return
        if strings := [text for a in self._alternatives if (text := self._strings(a))]:
            parts = [lark.without(self._without), *self._only_strings(), f"({' | '.join(strings)})"]
            yield " & ".join(parts)
        for alternative in self._alternatives:
            yield from self._other_values(alternative)
        for kind in free:
            yield f"{lark.without(self._without)} & {_WRITTEN[kind]}"
        if {"array", "object"} & set(free):  # JSON or a string: a terminal cannot tell
            self.unenforced |= self._restricting()

    def _free(self, kind: str) -> Iterator[bool]:
        return (kind in a.types and a.values is None for a in self._alternatives)

    def _left_out(self, alternative: Alternative) -> set[str]:
        """Returns the alternative's keywords that no text is made to follow."""
        found = {name for name in alternative.others if name.startswith("format ")}
        found = found if "string" in alternative.types else set()
        for kind in self._kinds & alternative.types & _KEYWORDS.keys():
            found |= alternative.others & _KEYWORDS[kind]
        return found

    def _restricting(self) -> set[str]:
        """Returns the keywords that restrict strings."""
        found: set[str] = set()
        for a in self._alternatives:
            given = {"enum": a.values is not None, "pattern": bool(a.patterns)}
            given |= {"minLength": bool(a.least), "maxLength": a.most is not None}
            found |= {name for name, is_given in given.items() if is_given}
        return found

    def _strings(self, alternative: Alternative) -> str:
        """Returns the expression of strings that fit; "" if there are none."""
        if "string" not in alternative.types:
            return ""
        found = []
        if alternative.values is not None:
            texts = [v for v in alternative.values.values() if isinstance(v, str)]
            texts = [v for v in texts if self._without not in v and alternative.fits_length(v)]
            if not texts:
                return ""
            options = (lark.string(text) or '""' for text in texts)
            found.append(f"({' | '.join(options)})")
        elif alternative.least or alternative.most is not None:
            most = "" if alternative.most is None else alternative.most
            found.append(f"/(?s:.){{{alternative.least},{most}}}/")
        for pattern in alternative.patterns:
            expression = whole(pattern)
            if expression is None:
                self.unenforced.add("pattern")
            else:
                found.append(lark.regex(expression))
        return " & ".join(found) or _ANY

    def _only_strings(self) -> list[str]:
        """Returns expressions of what is not taken for JSON."""
        if not self._others:
            return []
        return [f"~/{_SPACE}{_TAKEN_FOR[kind]}{_SPACE}/" for kind in sorted(self._kinds)]

    def _other_values(self, alternative: Alternative) -> Iterator[str]:
        """Returns expressions of values that are written as JSON, among them strings that plain
        text would not give back."""
        values = alternative.values if self._others else None
        for value in (values or {}).values():
            shown = json.dumps(value, ensure_ascii=False)
            if isinstance(value, str):
                is_plain = json_of(value, self._kinds) == shown
                if is_plain or not alternative.fits_length(value):
                    continue
                self.unenforced |= {"pattern"} if alternative.patterns else set()
            if self._without not in shown and json_of(shown, self._kinds) == shown:
                yield lark.string(shown)
