"""Lark rules for arguments that are written one by one between tags, as by Qwen3-Coder.

A value is plain text if the schema allows a string, and JSON otherwise. The parser's `kinds_of`
decides this, so that both sides agree. Parameters stand in the schema's order. `tools` calls this
module.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from pdserve.text.answers.native.call_form import ParameterForm
from pdserve.text.answers.native.parameter_types import kinds_of
from pdserve.text.grammars import lark
from pdserve.text.grammars.json_schemas.schemas import changed, json_text, subschemas
from pdserve.text.grammars.parameters.plain_text import plain_text

_KEY = "/[A-Za-z_][A-Za-z0-9_.\\-]{0,63}/"
_FORBIDDEN = "<>\n"
# keywords of the schema of all arguments that restrict objects, beside those that are followed
_OF_ALL = frozenset({"$ref", "allOf", "anyOf", "oneOf", "enum", "const", "patternProperties"})
_OF_DOCUMENTS = ("$id", "id", "$schema")
_SHARED = "tool"  # name under which a parameter's schema holds what it refers to


@dataclass(frozen=True)
class ParameterRules:
    """Lark rules of all parameters, and the keywords of their schema that the rules leave out."""

    lines: list[str]
    unenforced: frozenset[str]


def parameter_rules(
    form: ParameterForm, schema: Mapping[str, Any], field: str, name: str, strict: bool = False
) -> ParameterRules:
    """Returns the rules of all parameters, of which the first is called `name`. Raises ValueError
    if a parameter cannot be written in this form, or if `strict` and a keyword is left out."""
    writer = _Writer(form, schema, field, strict)
    parts: list[str] = []
    lines: list[str] = []
    for number, (key, part) in enumerate(writer.named.items()):
        rule, is_needed = f"{name}_{number}", key in writer.needed
        if part is False and not is_needed:
            continue
        lines += writer.parameter(rule, key, part)
        parts.append(rule if is_needed else f"{rule}?")
    if writer.has_more:
        lines += writer.more(name)
        parts.append(f"{name}_more*")
    unenforced = frozenset(writer.unenforced)
    if strict and unenforced:
        raise ValueError(
            f"{field} uses {', '.join(sorted(unenforced))}, which cannot be enforced in this "
            "model's form of calls: leave it out, or send strict: false"
        )
    return ParameterRules([f"{name}: " + (" ".join(parts) or '""'), *lines], unenforced)


class _Writer:
    def __init__(
        self, form: ParameterForm, schema: Mapping[str, Any], field: str, strict: bool
    ) -> None:
        self._form, self._schema, self._field, self._strict = form, schema, field, strict
        properties, required = schema.get("properties"), schema.get("required")
        named = dict(properties) if isinstance(properties, Mapping) else {}
        self._further = schema.get("additionalProperties", True)
        self.has_more = not named and self._further is not False
        names = required if isinstance(required, list) else []
        self.needed = {name for name in names if isinstance(name, str)}
        # schemas of the parameters that have names, by name
        self.named = named | {key: self._further for key in sorted(self.needed - named.keys())}
        self.unenforced = set(_OF_ALL & schema.keys()) | self._uncounted()

    def _uncounted(self) -> set[str]:
        """Returns keywords for the number of properties, unless every call has the right one."""
        found = set()
        least, most = self._schema.get("minProperties"), self._schema.get("maxProperties")
        if isinstance(least, int) and least > len(self.needed):
            found.add("minProperties")
        if isinstance(most, int) and (self.has_more or most < len(self.named)):
            found.add("maxProperties")
        return found

    def parameter(self, rule: str, key: str, part: Any) -> list[str]:
        """Returns the rule of one parameter, and the rules that it needs."""
        if not key or any(char in key for char in _FORBIDDEN):
            raise ValueError(
                f"{self._field}: the parameter {key!r:.80} cannot be written here: rename it"
            )
        begin = lark.string(self._form.begin + key + self._form.before_value)
        value, *rules = self._value(rule, key, part)
        return [f"{rule}: {begin} {value}", *rules]

    def more(self, name: str) -> list[str]:
        """Returns rules of parameters with any name, each by the schema of additional
        properties."""
        value, *rules = self._value(f"{name}_free", "", self._further)
        begin, before = lark.string(self._form.begin), lark.string(self._form.before_value)
        key = f"{name}_key".upper()
        return [f"{name}_more: {begin} {key} {before} {value}", f"{key}: {_KEY}", *rules]

    def _value(self, rule: str, key: str, part: Any) -> list[str]:
        """Returns the Lark that follows the parameter's begin, and then the rules that it needs."""
        end = lark.string(self._form.end)
        kinds = kinds_of(self._schema, key)
        if kinds and "string" not in kinds:
            return [f"%json {self._json(part)} {end}"]
        try:
            text = plain_text(part, self._schema, kinds, self._form.end.strip())
        except ValueError as error:
            raise ValueError(f"{self._field}: the parameter {key!r:.80}: {error}") from error
        if not text.expression:
            raise ValueError(
                f"{self._field}: no value of the parameter {key!r:.80} can be written in this "
                "model's form: send others"
            )
        self.unenforced |= text.unenforced
        upper = f"{rule}_text".upper()
        lines = [f"{rule}_text[lazy]: {upper} {end}", f"{upper}: {text.expression}"]
        return [f"{rule}_text", *lines]

    def _json(self, part: Any) -> str:
        """Returns the text of one parameter's schema, with all that it refers to."""
        part = part if isinstance(part, Mapping) else {}
        schemas = {id(found): found for found in subschemas(part, self._schema)}
        places = {_place(found.get("$ref")) for found in schemas.values()} - {None}
        if not places:
            return json_text(part, self._field, self._strict)
        shared = {
            name: value
            for name, value in self._schema.items()
            if (name in places or "" in places) and name not in _OF_DOCUMENTS
        }
        ids = schemas.keys() | {id(shared)} | {id(found) for found in subschemas(self._schema)}
        definitions = {_SHARED: changed(shared, ids, _moved)}
        document = changed(part, ids, _moved) | {"$defs": definitions}
        return json_text(document, self._field, self._strict)


def _place(reference: Any) -> str | None:
    """Returns the keyword of the document in which a reference ends; "" if that is the document.
    None: it is no path within the document."""
    if reference == "#":
        return ""
    is_path = isinstance(reference, str) and reference.startswith("#/")
    return unquote(reference[2:].split("/")[0]) if is_path else None


def _moved(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with references as `_json` needs them."""
    if _place(schema.get("$ref")) is not None:
        schema["$ref"] = f"#/$defs/{_SHARED}{schema['$ref'][1:]}"
    return schema
