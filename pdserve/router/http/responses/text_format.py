"""Reads the form of an answer from text.format, where Responses have its members side by side.

ValueErrors begin with the field. Called by `router.http.responses.requests`.
"""

from collections.abc import Mapping
from typing import Any

from pdserve.text.grammars.limits import check_members
from pdserve.text.grammars.structured import StructuredRequest, json_object_of

FIELD = "text.format"


def form_of(value: Any) -> StructuredRequest | None:
    """Returns the form that text.format asks for; None: any text."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if value is None:
        return None
    if kind == "text":
        check_members(value, ("type",), FIELD)
        return None
    if kind == "json_object":
        return json_object_of(value, FIELD)
    if kind == "json_schema":
        return _json_schema(value)
    cure = ": send structured_outputs" if kind == "structural_tag" else ""
    raise ValueError(
        f"{FIELD} must be an object whose type is text, json_object or json_schema, not "
        f"{value!r:.80}{cure}"
    )


def _json_schema(value: Mapping[str, Any]) -> StructuredRequest:
    if "json_schema" in value:
        raise ValueError(
            f"{FIELD}.json_schema is the form of chat completions: send name, schema and strict "
            "beside the type"
        )
    check_members(value, ("type", "name", "description", "schema", "strict"), FIELD)
    for name, kind, what in (
        ("name", str, "the schema's name"),
        ("strict", bool | None, "true or false"),
        ("description", str | None, "a string"),
    ):
        if not isinstance(value.get(name), kind):
            raise ValueError(f"{FIELD}.{name} must be {what}, not {value.get(name)!r:.80}")
    if value.get("schema") is None:
        raise ValueError(f"{FIELD}.schema is missing: send the JSON schema there")
    return StructuredRequest("json", value["schema"], f"{FIELD}.schema", bool(value.get("strict")))
