"""JSON schemas in the form that llguidance takes, and the keywords that it cannot enforce.

llguidance enforces the keywords in `ENFORCED`. It reports by itself what depends on values, such as
an unknown format or a oneOf whose branches overlap. `json_text` writes out what llguidance reads
otherwise than the standard says: patterns, exclusive bounds and numbers of properties. This module
knows no requests. `grammar_of`, `tools` and `tags` call it.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from pdserve.text.grammars.json_schemas.exact_numbers import (
    check_numbers,
    closed_bounds,
    leaves,
    multiples_fit,
)
from pdserve.text.grammars.json_schemas.patterns import searched
from pdserve.text.grammars.json_schemas.property_counts import counted
from pdserve.text.grammars.limits import check_bytes, check_schema_size

# Whitespace between JSON's tokens: nothing, a space, or a line break and an indentation. Without a
# bound, models write whitespace until max_tokens.
WHITESPACE = r"(?: |\n[ \t]{0,24})?"
# What may follow a backslash in a string. Every string has only one spelling then, so that no key
# can be written twice, once with escapes. Control characters without a short escape and U+007F,
# which llguidance writes as \u00XX, cannot be written.
ESCAPES = '"\\bfnrt'
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")

ENFORCED = frozenset(
    {"type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf"}
    | {"properties", "required", "additionalProperties", "patternProperties"}
    | {"minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems"}
    | {"minLength", "maxLength", "pattern", "format"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    | {"additionalItems"}  # only beside a list of items, in older drafts; otherwise left out
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
# keywords that llguidance must see together
_OF_OBJECTS = ("properties", "patternProperties", "additionalProperties")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_ONE = ("items", "additionalItems", "additionalProperties")
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
    client's own options ("x-guidance") are dropped. Raises ValueError if the text is too long, or
    if the schema has a pattern or a number that cannot be enforced."""
    options = {
        "whitespace_pattern": WHITESPACE if whitespace is None else whitespace,
        "json_allowed_escapes": ESCAPES,
        "lenient": not strict,
    }
    parts = {id(part): part for part in subschemas(schema)}
    try:
        for part in parts.values():
            check_numbers(part)
            _check_texts(part)
        written = changed(schema, parts, _for_llguidance)
    except ValueError as error:
        raise ValueError(f"{field} cannot be enforced: {error}") from error
    try:
        text = json.dumps({**written, "x-guidance": options})
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{field} is not JSON ({error}): send a JSON schema") from error
    check_bytes(text, field)
    return text


def _check_texts(schema: Mapping[str, Any]) -> None:
    """Raises ValueError if a text that is asked for cannot be written."""
    for name in ("const", "enum"):
        for value in leaves(schema.get(name)):
            if isinstance(value, str) and _UNWRITABLE.search(value):
                raise ValueError(
                    f"{name} holds {value!r:.80}, and its control character cannot be written: "
                    "leave it out"
                )


def changed(
    value: Any, schemas: Collection[int], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> Any:
    """Returns the value with `change` applied to all schemas in it, inner ones first. `schemas` are
    their ids, because data, such as a const, may look like a schema."""
    if isinstance(value, list):
        return [changed(item, schemas, change) for item in value]
    if not isinstance(value, Mapping):
        return value
    found = {name: changed(item, schemas, change) for name, item in value.items()}
    return change(found) if id(value) in schemas else found


def _for_llguidance(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema as llguidance reads it. Its parts are so already."""
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = searched(schema["pattern"])
    patterns = schema.get("patternProperties")
    if isinstance(patterns, Mapping):
        found = {searched(name): part for name, part in patterns.items()}
        if len(found) < len(patterns):
            raise ValueError("patternProperties holds patterns that are the same: join them")
        schema["patternProperties"] = found
    if not isinstance(schema.get("items"), list):
        schema.pop("additionalItems", None)
    return _joined(counted(closed_bounds(schema))[0])


def _joined(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with patternProperties and additionalProperties next to properties.
    llguidance reads them as one if no $ref, anyOf or the like stands in between."""
    names = [name for name in _OF_OBJECTS if name in schema]
    if len(names) < 2:
        return schema
    first = "properties" if "properties" in schema else next(n for n in schema if n in names)
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name == first:
            found |= {name: schema[name] for name in names}
        elif name not in names:
            found[name] = value
    return found


def unenforced_keywords(schema: Mapping[str, Any]) -> set[str]:
    """Returns the keywords in the schema that constrain values and are not enforced. Names of
    properties, values of enums and the like are not keywords."""
    parts = list(subschemas(schema))
    names = {name for part in parts for name in part} - ENFORCED - ANNOTATIONS
    names |= set().union(*(counted(part)[1] for part in parts))
    return names if multiples_fit(parts) else names | {"multipleOf"}


def subschemas(
    schema: Mapping[str, Any], root: Mapping[str, Any] | None = None
) -> Iterator[Mapping[str, Any]]:
    """Returns all schemas in the schema, and those that it refers to, each once. References are to
    the document `root`, by default the schema itself."""
    left: list[Any] = [schema]
    seen: set[int] = set()
    while left:
        part = left.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        for name in _BY_NAME:
            if isinstance(part.get(name), Mapping):
                left += part[name].values()
        left += [part[name] for name in _ONE if name in part]
        for name in _LISTS:
            if isinstance(part.get(name), list):
                left += part[name]
        if isinstance(part.get("$ref"), str):
            left.append(target(part["$ref"], schema if root is None else root))


def can_end(schema: Mapping[str, Any]) -> bool:
    """False if every value that fits would be infinite, for example an object that requires another
    of its own kind. True also if that is unknown, that is with more than MAX_REFERENCES references
    or with references to other documents."""
    targets = {part["$ref"] for part in subschemas(schema) if isinstance(part.get("$ref"), str)}
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
    for part in subschemas(schema):
        if part.keys() & {"properties", "patternProperties"} and isinstance(part, dict):
            part.setdefault("additionalProperties", False)
