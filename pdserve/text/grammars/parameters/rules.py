"""Lark rules for arguments that are written one by one between tags, as by Qwen3-Coder.

A value is plain text if the schema allows a string, and JSON otherwise. The parser's `kinds_of`
decides this, so that both sides agree. Parameters stand in the schema's order. `tools` calls this
module.
"""

import json
from collections.abc import Mapping
from typing import Any

from pdserve.text.answers.native.call_form import ParameterForm
from pdserve.text.answers.native.parameter_types import json_of, kinds_of
from pdserve.text.grammars import lark
from pdserve.text.grammars.schemas import json_text

_KEY = "/[A-Za-z_][A-Za-z0-9_.\\-]{0,63}/"
_FORBIDDEN = "<>\n"


def parameter_rules(
    form: ParameterForm, schema: Mapping[str, Any], field: str, name: str
) -> list[str]:
    """Returns Lark rules of all parameters, of which the first is called `name`. Raises ValueError
    if a parameter's name cannot be written in this form."""
    declared = schema.get("properties")
    properties = declared if isinstance(declared, Mapping) else {}
    required = schema.get("required")
    needed = set(required) if isinstance(required, list) else set()
    rules: list[str] = []
    parts: list[str] = []
    keys = [*properties, *sorted(key for key in needed if key not in properties)]
    for number, key in enumerate(keys):
        if not key or any(char in key for char in _FORBIDDEN):
            raise ValueError(
                f"{field}: the parameter {key!r:.80} cannot be written here: rename it"
            )
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
    """Returns the Lark that follows the parameter's begin, and then the rules that it needs."""
    kinds = kinds_of(schema, key)
    values = _values(part)
    if values is not None:
        written = (_written(value, kinds) for value in values)
        texts = [text for text in written if text is not None and form.end.strip() not in text]
        if not texts:
            raise ValueError(
                f"{field}: no value of the parameter {key!r:.80} can be written in this model's "
                "form: send others"
            )
        return [f"({' | '.join(lark.string(text + form.end) for text in texts)})"]
    if kinds and "string" not in kinds:
        return [f"%json {_json_of(part, schema, field)} {lark.string(form.end)}"]
    upper = f"{name}_text".upper()
    bounds = _length(part) if kinds <= {"string"} and isinstance(part, Mapping) else ""
    terminal = f"{upper}: {lark.without(form.end.strip())}{bounds}"
    return [f"{name}_text", f"{name}_text[lazy]: {upper} {lark.string(form.end)}", terminal]


def _values(part: Any) -> list[Any] | None:
    """Returns the values to choose from, or None if the schema has no such list."""
    if not isinstance(part, Mapping):
        return None
    if "const" in part:
        return [part["const"]]
    return part["enum"] if isinstance(part.get("enum"), list) else None


def _written(value: Any, kinds: frozenset[str]) -> str | None:
    """Returns the text that the parser reads as this value, or None if there is none."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if kinds <= {"string"}:
        return text if isinstance(value, str) else None
    read = json.loads(json_of(text, kinds))
    return text if type(read) is type(value) and read == value else None


def _length(part: Mapping[str, Any]) -> str:
    least, most = part.get("minLength", 0), part.get("maxLength", "")
    if not isinstance(least, int) or not isinstance(most, int | str) or (least, most) == (0, ""):
        return ""
    return f" & /(?s:.){{{least},{most}}}/"


def _free_parameters(
    form: ParameterForm, schema: Mapping[str, Any], name: str, field: str
) -> list[str]:
    """Returns rules of parameters with any name, each by the schema of additional properties."""
    part = schema.get("additionalProperties", True)
    value = _value(form, schema, "", part, f"{name}_free", field)
    begin, before = lark.string(form.begin), lark.string(form.before_value)
    upper = f"{name}_key".upper()
    more = f"{name}_more: {begin} {upper} {before} {value[0]}"
    return [more, f"{upper}: {_KEY}", *value[1:]]


def _json_of(part: Any, root: Mapping[str, Any], field: str) -> str:
    """Returns the schema of one parameter, with the definitions that it may refer to."""
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return json_text({**shared, **(part if isinstance(part, Mapping) else {})}, field)
