"""The form that a request asks for: OpenAI's response_format, vLLM's structured_outputs and its
older guided_* fields, read into one StructuredRequest.

This module defines the fields and checks that only one of them is used. `grammar_of` makes the
grammar. It knows no HTTP. The router's bodies, the Python client and `LLM.generate` call it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pdserve.text.grammars.limits import check_members, flag_of

Kind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]

KINDS: tuple[Kind, ...] = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
# vLLM's older fields
ALIASES: dict[str, Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
WHITESPACE_ALIAS = "guided_whitespace_pattern"
# fields of a request that ask for a form, under the names that errors use
FIELDS = ("response_format", "structured_outputs", *ALIASES, WHITESPACE_ALIAS)
# fields of vLLM's structured_outputs that are true or false
SWITCHES = ("disable_any_whitespace", "disable_additional_properties")
# fields of vLLM's structured_outputs that choose how its backends work
IGNORED = ("disable_fallback", "_backend", "_backend_was_auto")
_FORMATS = "text, json_object, json_schema or structural_tag"


@dataclass(frozen=True)
class StructuredRequest:
    """The form that a request asks for."""

    kind: Kind  # how `value` is to be read
    value: Any  # for json_object: True, or the object's schema
    field: str  # its place in the request, for errors
    strict: bool = False  # True refuses keywords of a JSON schema that cannot be enforced
    # regular expression of the whitespace between JSON's tokens; None: `schemas.WHITESPACE`
    whitespace_pattern: str | None = None
    # True: objects whose schema says nothing of additional properties have none
    is_closed: bool = False


def structured_of(fields: Mapping[str, Any]) -> StructuredRequest | None:
    """Returns the form that a request asks for, or None if it allows any text.

    - fields: Values of FIELDS. None: not given.

    Raises ValueError, which begins with the field's name.
    """
    given = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
    pattern = _whitespace(given.pop(WHITESPACE_ALIAS, None), WHITESPACE_ALIAS)
    found = [asked for name, value in given.items() if (asked := _asked(name, value)) is not None]
    if len(found) > 1:
        names = " and ".join(asked.field for asked in found)
        raise ValueError(f"{found[1].field}: {names} exclude each other: send one of them")
    if not found:
        if pattern is not None:
            raise ValueError(f"{WHITESPACE_ALIAS} is only for JSON: send guided_json with it")
        return None
    asked = found[0]
    if pattern is not None:
        if asked.whitespace_pattern is not None:
            raise ValueError(
                f"{WHITESPACE_ALIAS} and the whitespace that structured_outputs sets exclude each "
                "other: send one of them"
            )
        asked = replace(asked, whitespace_pattern=pattern)
    if asked.whitespace_pattern is not None and asked.kind not in ("json", "json_object"):
        raise ValueError(
            f"{asked.field}: a rule for whitespace is only for JSON: leave it out, or ask for json"
        )
    if asked.is_closed and asked.kind != "json":
        raise ValueError(
            f"{asked.field}: disable_additional_properties is only for JSON by a schema: leave it "
            "out, or send json"
        )
    return asked


def structured_outputs(value: Any) -> StructuredRequest:
    """Returns the form that a dict such as {"json": schema} or {"choice": ["yes", "no"]} asks for.
    Python callers pass such dicts. Raises ValueError if it asks for nothing."""
    found = structured_of({"structured_outputs": value})
    if found is None:
        raise ValueError(f"structured_outputs is empty: set one of {', '.join(KINDS)}")
    return found


def _asked(name: str, value: Any) -> StructuredRequest | None:
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        return _structured_outputs(value)
    return StructuredRequest(ALIASES[name], value, name)


def _response_format(value: Any) -> StructuredRequest | None:
    field = "response_format"
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        check_members(value, ("type",), field)
        return None
    if kind == "json_object":
        return json_object_of(value, field)
    if kind == "json_schema":
        check_members(value, ("type", "json_schema"), field)
        return _json_schema(value.get("json_schema"))
    if kind == "structural_tag":
        return StructuredRequest("structural_tag", dict(value), field)
    raise ValueError(f"{field} must be an object whose type is {_FORMATS}, not {value!r:.80}")


def json_object_of(value: Mapping[str, Any], field: str) -> StructuredRequest:
    """Returns the form that {"type": "json_object"} asks for: an object, by its `schema` if it has
    one. `field` is its place in the request."""
    check_members(value, ("type", "schema"), field)
    if value.get("schema") is None:
        return StructuredRequest("json_object", True, field)
    return StructuredRequest("json_object", value["schema"], f"{field}.schema")


def _json_schema(value: Any) -> StructuredRequest:
    field = "response_format.json_schema"
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{field} must be an object with the schema under `schema`, not {value!r:.80}"
        )
    # pydantic calls the schema json_schema where it does not write vLLM's name for it
    schema_name = "json_schema" if value.get("schema") is None else "schema"
    check_members(value, ("name", "description", schema_name, "strict"), field)
    strict = flag_of(value.get("strict"), f"{field}.strict")
    schema = value.get(schema_name)
    if schema is None:
        raise ValueError(f"{field}.schema is missing: send the JSON schema there")
    return StructuredRequest("json", schema, f"{field}.schema", strict)


def _structured_outputs(value: Any) -> StructuredRequest | None:
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{name} must be an object with one of {', '.join(KINDS)}, not {value!r:.80}"
        )
    given = {key: item for key, item in value.items() if item is not None and key not in IGNORED}
    pattern = _whitespace(given.pop("whitespace_pattern", None), f"{name}.whitespace_pattern")
    is_compact, is_closed = (flag_of(given.pop(key, None), f"{name}.{key}") for key in SWITCHES)
    if is_compact and pattern is not None:
        raise ValueError(
            f"{name}.disable_any_whitespace and {name}.whitespace_pattern exclude each other: send "
            "one of them"
        )
    pattern = "" if is_compact else pattern
    for key in given:
        if key not in KINDS:
            raise ValueError(f"{name}.{key:.80} is unknown: use one of {', '.join(KINDS)}")
    if not flag_of(given.get("json_object", True), f"{name}.json_object"):
        del given["json_object"]
    if len(given) > 1:
        names = ", ".join(given)
        raise ValueError(f"{name} sets {names}, which exclude each other: send one of them")
    for kind in KINDS:
        if kind in given:
            return StructuredRequest(
                kind, given[kind], f"{name}.{kind}", whitespace_pattern=pattern, is_closed=is_closed
            )
    if pattern is not None or is_closed:
        asked = next(key for key in ("whitespace_pattern", *SWITCHES) if value.get(key) is not None)
        raise ValueError(f"{name}.{asked} is only for JSON: send json with it")
    return None


def _whitespace(value: Any, field: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{field} must be a regular expression, not {value!r:.80}")
    return value
