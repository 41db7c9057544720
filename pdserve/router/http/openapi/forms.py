"""Describes the forms that an answer may have, and rules about two fields, in JSON Schema.

Knows no dialect. Called by `router.http.openapi.document`.
"""

from typing import Any

from pdserve.router.grammars import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS
from pdserve.router.http.openapi.schemas import INTEGER, NULL, STRING, Json, closed, object_of
from pdserve.text.grammars.structured import IGNORED, SWITCHES, Kind

_SWITCH: Json = {"type": ["boolean", "null"]}
_SWITCHES_OF: dict[Kind, tuple[str, ...]] = {
    "json": SWITCHES,
    "json_object": ("disable_any_whitespace",),
}


def needs(name: str, other: str, value: Json, *without: Any) -> Json:
    """Returns the rule that a field other than null, or other than `without`, needs `other`."""
    given = {"not": {"enum": [None, *without]}}
    return {
        "if": {"properties": {name: given}, "required": [name]},
        "then": {"properties": {other: value}, "required": [other]},
    }


def answer_forms() -> dict[str, Json]:
    """Returns the fields for an answer's form, by their outer shape.

    Their content is checked when a grammar is made from it.
    """
    schema: Json = {"type": ["object", "string", "boolean"]}
    text = {"type": "string", "minLength": 1}
    texts = {"type": "array", "items": STRING, "minItems": 1}
    fields = {
        "response_format": {"anyOf": _response_formats(schema)},
        "structured_outputs": {"anyOf": _structured_outputs(schema, text, texts)},
        "guided_json": schema,
        "guided_regex": text,
        "guided_choice": texts,
        "guided_grammar": text,
        "guided_whitespace_pattern": STRING,
    }
    words = {"items": STRING | {"minLength": 1, "maxLength": MAX_BAD_WORD_CHARS}}
    return {name: {"anyOf": [form, NULL]} for name, form in fields.items()} | {
        "bad_words": words | {"maxItems": MAX_BAD_WORDS},
        "allowed_token_ids": {"items": INTEGER | {"minimum": 0}},
    }


def _response_formats(schema: Json) -> list[Json]:
    """Returns OpenAI's forms; `schema` is that of a JSON schema."""
    given = object_of(schema=schema)
    given["properties"] |= {"strict": {"type": ["boolean", "null"]}, "name": {}, "description": {}}
    named = object_of(type={"const": "json_schema"}, json_schema=closed(given))
    tagged = object_of(type={"const": "structural_tag"})
    return [*plain_formats(), closed(named), tagged]


def plain_formats() -> list[Json]:
    """Returns the forms that are the same in all of OpenAI's APIs: any text, and any object, or one
    by a schema."""
    any_object = object_of(type={"const": "json_object"})
    any_object["properties"]["schema"] = {"type": ["object", "string", "boolean", "null"]}
    return [closed(object_of(type={"const": "text"})), closed(any_object)]


def _structured_outputs(schema: Json, text: Json, texts: Json) -> list[Json]:
    """Returns vLLM's forms: an object sets one of them or none, and the others may only be null."""
    forms: dict[Kind, Json] = {
        "json": schema,
        "json_object": {"type": "boolean"},
        "regex": text,
        "choice": texts,
        "grammar": text,
        "structural_tag": {},
    }
    nothing: dict[str, Json] = {name: NULL for name in (*forms, "whitespace_pattern")}
    nothing |= {"json_object": {"enum": [False, None]}} | {name: {} for name in IGNORED}
    nothing |= {name: {"enum": [False, None]} for name in SWITCHES}
    found = []
    for kind, form in forms.items():
        is_json = kind in ("json", "json_object")
        space: Json = {"anyOf": [STRING, NULL]} if is_json else NULL
        others = nothing | {"whitespace_pattern": space} | {kind: form}
        others |= {name: _SWITCH for name in _SWITCHES_OF.get(kind, ())}
        found.append(object_of(**{kind: form}) | {"properties": others})
    found.append({"type": "object", "properties": nothing})
    return [form | {"additionalProperties": False} for form in found]
