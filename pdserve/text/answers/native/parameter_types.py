"""Converts a parameter that a model wrote as plain text to JSON, by its JSON schema.

The text is taken as JSON if it is JSON of a type that the schema allows. Otherwise it is a string.
A parameter without a type in the schema is a string. docs/use/tools.md has the rules as a table.
`qwen_xml` calls this module.
"""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

_MAX_DEPTH = 8  # nested references and alternatives that are followed

_WORDS = {
    "true": ("boolean", "true"),
    "false": ("boolean", "false"),
    "null": ("null", "null"),
    "none": ("null", "null"),
}


def kinds_of(schema: Mapping[str, Any] | None, parameter: str) -> frozenset[str]:
    """Returns the JSON types that a parameter may have. Empty: the schema names none.

    - schema: The schema of all parameters. The function looks into type, enum, const, anyOf, oneOf,
      allOf and references within the schema. For a parameter without an entry it looks into
      additionalProperties.
    """
    if not isinstance(schema, Mapping):
        return frozenset()
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and parameter in properties:
        return frozenset(_kinds(properties[parameter], schema, _MAX_DEPTH))
    return frozenset(_kinds(schema.get("additionalProperties"), schema, _MAX_DEPTH))


def json_of(text: str, kinds: frozenset[str]) -> str:
    """Returns the text as JSON. The characters of a number, an array or an object are kept."""
    stripped = text.strip()
    kind, word = _WORDS.get(stripped.lower(), ("", ""))
    if kind in kinds:
        return word
    kinds_here = _kinds_of_text(stripped)
    if kinds_here & kinds or (kinds_here and "string" not in kinds):
        return stripped
    return json.dumps(text, ensure_ascii=False)


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or not depth:
        return set()
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)}
    if isinstance(schema.get("enum"), list):
        return set().union(*(kinds_of_value(value) for value in schema["enum"]))
    if "const" in schema:
        return kinds_of_value(schema["const"])
    if isinstance(schema.get("$ref"), str):
        return _kinds(_target(schema["$ref"], root), root, depth - 1)
    found: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        for part in parts if isinstance(parts, list) else ():
            found |= _kinds(part, root, depth - 1)
    return found


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """Returns the value that a reference such as "#/$defs/City" points to. None: the schema has no
    such value."""
    place: Any = root if reference.startswith("#/") else None
    for part in reference[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        place = place.get(key) if isinstance(place, Mapping) else None
    return place


def _kinds_of_text(text: str) -> set[str]:
    """Returns the types of the text's JSON value. Empty: the text is not JSON."""
    try:
        return kinds_of_value(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return set()


def kinds_of_value(value: Any) -> set[str]:
    """Returns the JSON types that a value has: a whole number has two."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"integer", "number"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
