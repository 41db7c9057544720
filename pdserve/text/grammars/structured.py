"""The form that a request asks for: OpenAI's response_format, vLLM's structured_outputs and its
older guided_* fields, read into one StructuredRequest.

This module defines the fields and checks that only one of them is used. `grammar_of` makes the
grammar. It knows no HTTP. The router's bodies, the Python client and `LLM.generate` call it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
# fields of vLLM's structured_outputs that choose how its backends work
IGNORED = (
    "disable_any_whitespace",
    "disable_additional_properties",
    "disable_fallback",
    "_backend",
    "_backend_was_auto",
)
_FORMATS = "text, json_object, json_schema or structural_tag"


@dataclass(frozen=True)
class StructuredRequest:
    """The form that a request asks for."""

    kind: Kind  # how `value` is to be read
    value: Any
    field: str  # its place in the request, for errors
    strict: bool = False  # True refuses keywords of a JSON schema that cannot be enforced
    # regular expression of the whitespace between JSON's tokens; None: `schemas.WHITESPACE`
    whitespace_pattern: str | None = None


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
                f"{WHITESPACE_ALIAS} and structured_outputs.whitespace_pattern are the same: send "
                "one of them"
            )
        asked = StructuredRequest(asked.kind, asked.value, asked.field, asked.strict, pattern)
    if asked.whitespace_pattern is not None and asked.kind not in ("json", "json_object"):
        raise ValueError(
            f"{asked.field}: a whitespace pattern is only for JSON: leave it out, or ask for json"
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
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredRequest("json_object", True, "response_format")
    if kind == "json_schema":
        return _json_schema(value.get("json_schema"))
    if kind == "structural_tag":
        return StructuredRequest("structural_tag", dict(value), "response_format")
    raise ValueError(
        f"response_format must be an object whose type is {_FORMATS}, not {value!r:.80}"
    )


def _json_schema(value: Any) -> StructuredRequest:
    field = "response_format.json_schema"
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{field} must be an object with the schema under `schema`, not {value!r:.80}"
        )
    strict = value.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ValueError(f"{field}.strict must be true or false, not {strict!r:.80}")
    schema = value.get("schema", value.get("json_schema"))
    if schema is None:
        raise ValueError(f"{field}.schema is missing: send the JSON schema there")
    return StructuredRequest("json", schema, f"{field}.schema", bool(strict))


def _structured_outputs(value: Any) -> StructuredRequest | None:
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{name} must be an object with one of {', '.join(KINDS)}, not {value!r:.80}"
        )
    given = {key: item for key, item in value.items() if item is not None and key not in IGNORED}
    pattern = _whitespace(given.pop("whitespace_pattern", None), f"{name}.whitespace_pattern")
    for key in given:
        if key not in KINDS:
            raise ValueError(f"{name}.{key:.80} is unknown: use one of {', '.join(KINDS)}")
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) > 1:
        names = ", ".join(given)
        raise ValueError(f"{name} sets {names}, which exclude each other: send one of them")
    for kind in KINDS:
        if kind in given:
            return StructuredRequest(kind, given[kind], f"{name}.{kind}", False, pattern)
    if pattern is not None:
        raise ValueError(f"{name}.whitespace_pattern is only for JSON: send json with it")
    return None


def _whitespace(value: Any, field: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{field} must be a regular expression, not {value!r:.80}")
    return value
