"""JSON schemas in the form that llguidance takes, and the keywords that it cannot enforce.

llguidance enforces the keywords in `ENFORCED`. It reports by itself what depends on values, such as
an unknown format or a oneOf whose branches overlap. This module knows no requests. `grammar_of` and
`tools` call it.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from pdserve.text.grammars.limits import check_bytes, check_schema_size

# Whitespace between JSON's tokens: nothing, a space, or a line break and an indentation. Without a
# bound, models write whitespace until max_tokens.
WHITESPACE = r"(?: |\n[ \t]{0,24})?"

ENFORCED = frozenset(
    {"type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf"}
    | {"properties", "required", "additionalProperties", "patternProperties"}
    | {"minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems"}
    | {"minLength", "maxLength", "pattern", "format"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
# keywords that constrain nothing
ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
    }
    | {"$comment", "$schema", "$id", "$anchor", "id", "$defs", "definitions", "$vocabulary"}
    | {"contentEncoding", "contentMediaType", "contentSchema"}
)
MAX_REFERENCES = 200
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_ONE = ("items", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")


def schema_of(value: Any, field: str) -> dict[str, Any]:
    """Returns the schema as a dict. `value` is a JSON value or its text. Raises ValueError that
    names the field."""
    if isinstance(value, str):
        check_bytes(value, field)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{field} is not valid JSON ({error}): send a JSON schema") from error
    if value is True:
        return {}
    if value is False:
        raise ValueError(f"{field} is false, which nothing fits: send a schema")
    if not isinstance(value, Mapping):
        raise ValueError(f"{field} must be a JSON schema (an object), not {value!r:.80}")
    check_schema_size(value, field)
    return {name: _whole(part) for name, part in value.items()}


def _whole(value: Any) -> Any:
    """Replaces whole floats by integers, because JSON has only one kind of number, and the grammar
    writes 2.0 as 2."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    if isinstance(value, Mapping):
        return {name: _whole(part) for name, part in value.items()}
    return [_whole(part) for part in value] if isinstance(value, list) else value


def json_text(
    schema: Mapping[str, Any], field: str, strict: bool = False, whitespace: str | None = None
) -> str:
    """Returns the schema as JSON for `%json` or "json_schema", with llguidance's options in it. A
    client's own options ("x-guidance") are dropped. Raises ValueError if the text is too long."""
    options = {"whitespace_pattern": WHITESPACE if whitespace is None else whitespace}
    try:
        text = json.dumps({**schema, "x-guidance": options | {"lenient": not strict}})
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{field} is not JSON ({error}): send a JSON schema") from error
    check_bytes(text, field)
    return text


def unenforced_keywords(schema: Mapping[str, Any]) -> set[str]:
    """Returns the keywords in the schema that constrain values and are not enforced. Names of
    properties, values of enums and the like are not keywords."""
    return {name for part in _subschemas(schema) for name in part} - ENFORCED - ANNOTATIONS


def _subschemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        if not isinstance(part, Mapping):
            continue
        yield part
        for name in _BY_NAME:
            if isinstance(part.get(name), Mapping):
                left += part[name].values()
        left += [part[name] for name in _ONE if name in part]
        for name in _LISTS:
            if isinstance(part.get(name), list):
                left += part[name]


def can_end(schema: Mapping[str, Any]) -> bool:
    """False if every value that fits would be infinite, for example an object that requires another
    of its own kind. True also if that is unknown, that is with more than MAX_REFERENCES references
    or with references to other documents."""
    targets = {part["$ref"] for part in _subschemas(schema) if isinstance(part.get("$ref"), str)}
    if len(targets) > MAX_REFERENCES:
        return True
    found = {name: target(name, schema) for name in targets}
    ending = {name for name, value in found.items() if value is None}
    while more := {n for n, value in found.items() if n not in ending and _ends(value, ending)}:
        ending |= more
    return _ends(schema, ending)


def target(reference: str, root: Mapping[str, Any]) -> Any:
    """Returns the value that a reference such as "#/$defs/City" points to. None: the schema has no
    such value."""
    if reference == "#":
        return root
    place: Any = root if reference.startswith("#/") else None
    for part in reference[2:].split("/"):
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        else:
            place = place.get(key) if isinstance(place, Mapping) else None
    return place


def _ends(schema: Any, ending: Collection[str]) -> bool:
    """True if a value of the schema can be finite, given that values of the references in `ending`
    can be."""
    if not isinstance(schema, Mapping):
        return schema is not False
    if "enum" in schema or "const" in schema:
        return True
    if isinstance(schema.get("$ref"), str) and schema["$ref"] not in ending:
        return False
    for name in ("anyOf", "oneOf"):
        parts = schema.get(name)
        if isinstance(parts, list) and not any(_ends(part, ending) for part in parts):
            return False
    parts = schema.get("allOf")
    if isinstance(parts, list) and not all(_ends(part, ending) for part in parts):
        return False
    kinds = schema.get("type")
    if kinds in ("object", ["object"]):
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, Mapping) and isinstance(required, list):
            names = [name for name in required if isinstance(name, str) and name in properties]
            return all(_ends(properties[name], ending) for name in names)
    if kinds in ("array", ["array"]) and isinstance(schema.get("minItems"), int):
        first = schema.get("prefixItems")
        least = schema["minItems"]
        given = first[:least] if isinstance(first, list) else []
        rest = [schema.get("items", True)] if least > len(given) else []
        return all(_ends(part, ending) for part in [*given, *rest])
    return True


def close_objects(schema: dict[str, Any]) -> None:
    """Forbids additional properties where a schema describes properties and does not mention
    additional ones. Changes the schema and its parts."""
    for part in _subschemas(schema):
        if part.keys() & {"properties", "patternProperties"} and isinstance(part, dict):
            part.setdefault("additionalProperties", False)
