"""Arguments that are written one by one between tags, as Qwen3-Coder does: rules of Lark.

A value is a text as it is, where the schema allows a string, or else JSON. `kinds_of` of the
parser decides, so that both sides agree. Parameters stand in the schema's order. Called by `tools`.
"""

from collections.abc import Mapping
from typing import Any

from pdserve.text.answers.native.call_form import ParameterForm
from pdserve.text.answers.native.parameter_types import kinds_of
from pdserve.text.grammars import lark
from pdserve.text.grammars.schemas import json_text

_KEY = "/[A-Za-z_][A-Za-z0-9_.\\-]{0,63}/"
_FORBIDDEN = "<>\n"


def parameter_rules(
    form: ParameterForm, schema: Mapping[str, Any], field: str, name: str
) -> list[str]:
    """Rules of Lark of which `name` is the first: all parameters. ValueError for a parameter whose
    name cannot be written in this form."""
    declared = schema.get("properties")
    properties = declared if isinstance(declared, Mapping) else {}
    required = schema.get("required")
    needed = set(required) if isinstance(required, list) else set()
    rules: list[str] = []
    parts: list[str] = []
    keys = [*properties, *sorted(key for key in needed if key not in properties)]
    for number, key in enumerate(keys):
        if not key or any(char in key for char in _FORBIDDEN):
            raise ValueError(f"{field}: the parameter {key!r:.80} cannot be written in this model's form: rename it")
        begin = lark.string(form.begin + key + form.before_value)
        value = _value(form, schema, key, properties.get(key, True), f"{name}_{number}", field)
        rules.append(f"{name}_{number}: {begin} {value[0]}")
        rules += value[1:]
        parts.append(f"{name}_{number}" + ("" if key in needed else "?"))
    if not properties and schema.get("additionalProperties") is not False:
        rules += _free_parameters(form, schema, name, field)
        parts.append(f"{name}_more*")
    return [f"{name}: " + (" ".join(parts) or '""'), *rules]


def _value(
    form: ParameterForm, schema: Mapping[str, Any], key: str, part: Any, name: str, field: str
) -> list[str]:
    """What stands after the parameter's begin, and the rules that this needs."""
    kinds = kinds_of(schema, key)
    if kinds and "string" not in kinds:
        return [f"%json {_json_of(part, schema, field)} {lark.string(form.end)}"]
    return _text(form, part if kinds <= {"string"} else None, name)


def _text(form: ParameterForm, part: Any, name: str) -> list[str]:
    """A text as it is. part: the schema of a value that is a string at any rate."""
    choices = part.get("enum", [part["const"]] if "const" in part else None) if (
        isinstance(part, Mapping)
    ) else None
    end = form.end
    if isinstance(choices, list):
        texts = [text for text in choices if isinstance(text, str) and end.strip() not in text]
        if texts:
            strings = [lark.string(text + end) for text in texts]
            return [f"({' | '.join(strings)})"]
    upper = f"{name}_text".upper()
    bounds = _length(part) if isinstance(part, Mapping) else ""
    terminal = f"{upper}: {lark.without(end.strip())}{bounds}"
    return [f"{name}_text", f"{name}_text[lazy]: {upper} {lark.string(end)}", terminal]


def _length(part: Mapping[str, Any]) -> str:
    least, most = part.get("minLength", 0), part.get("maxLength", "")
    if not isinstance(least, int) or not isinstance(most, int | str) or (least, most) == (0, ""):
        return ""
    return f" & /(?s:.){{{least},{most}}}/"


def _free_parameters(
    form: ParameterForm, schema: Mapping[str, Any], name: str, field: str
) -> list[str]:
    """Parameters of any name, each by the schema of additional properties."""
    part = schema.get("additionalProperties", True)
    value = _value(form, schema, "", part, f"{name}_free", field)
    begin, before = lark.string(form.begin), lark.string(form.before_value)
    return [f"{name}_more: {begin} KEY {before} {value[0]}", f"KEY: {_KEY}", *value[1:]]


def _json_of(part: Any, root: Mapping[str, Any], field: str) -> str:
    """The schema of one parameter, with the definitions that it may refer to."""
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return json_text({**shared, **(part if isinstance(part, Mapping) else {})}, field)
