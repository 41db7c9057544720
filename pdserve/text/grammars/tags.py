"""Structural tags: free text in which some tags hold JSON by a schema.

    {"type": "structural_tag",
     "structures": [{"begin": "<function=f>", "schema": {...}, "end": "</function>"}],
     "triggers": ["<function="]}

This is the form that vLLM and xgrammar take. Their newer form of the same is read, too:

    {"format": {"type": "triggered_tags", "triggers": [...],
     "tags": [{"begin", "content": {"type": "json_schema", "json_schema": {...}}, "end"}],
     "at_least_one", "stop_after_first"}}

There the format may also be a single "tag" or "json_schema". Text is free until a trigger. From
there, one of the tags that begin with the trigger must follow. Other members are refused, except
with a value that asks for nothing. `grammar_of` calls this module.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.text.grammars import lark
from pdserve.text.grammars.json_schemas.schemas import json_text, schema_of
from pdserve.text.grammars.limits import MAX_TAGS, check_bytes, check_members, flag_of

_FORMATS = "triggered_tags, tag or json_schema"
# members of each type of format
_MEMBERS = {
    "triggered_tags": ("type", "triggers", "tags", "at_least_one", "stop_after_first"),
    "tag": ("type", "begin", "content", "end"),
    "json_schema": ("type", "json_schema"),
}
_FLAGS = ("at_least_one", "stop_after_first")
# members that are not supported, with the values that ask for nothing, as xgrammar writes them
_NEUTRAL = {"excludes": [], "style": "json"}


@dataclass(frozen=True)
class Tag:
    """One tag: begin, JSON by the schema, end."""

    begin: str
    schema: dict[str, Any]
    end: str
    field: str  # the tag's place in the request, for errors


@dataclass(frozen=True)
class Tags:
    """The tags of one structural tag, and where they may stand."""

    tags: list[Tag]
    triggers: list[str]  # free text ends there; none: one of the tags is the whole answer
    needs_one: bool = False  # True: the answer has at least one tag
    only_one: bool = False  # True: nothing follows the first tag


def tag_grammar(value: Any, field: str, opening: str = "") -> str:
    """Returns Lark of the structural tag. Free text must not begin with `opening`. Raises a
    ValueError that names the field and the cure."""
    found = _read(value, field)
    lines = []
    if not found.triggers:
        lines.append("start: " + " | ".join(f"tag_{i}" for i in range(len(found.tags))))
        lines += [f"tag_{i}: {_body(tag, '')}" for i, tag in enumerate(found.tags)]
        return _joined(lines, field)
    options = []
    for number, trigger in enumerate(found.triggers):
        mine = [i for i, tag in enumerate(found.tags) if tag.begin.startswith(trigger)]
        bodies = [f"tag_{number}_{i}" for i in mine]
        lines += [f"tag_{number}_{i}: {_body(found.tags[i], trigger)}" for i in mine]
        if mine:
            options.append(f"head_{number} ({' | '.join(bodies)})")
            lines.append(f"head_{number}[lazy]: FREE {lark.string(trigger)}")
    tags = f"({' | '.join(options)})"
    count = "" if found.only_one and found.needs_one else "?" if found.only_one else "*"
    count = "+" if found.needs_one and not found.only_one else count
    end = "" if found.only_one and found.needs_one else " TEXT"
    start = (
        f"start: {tags} | TEXT"
        if found.only_one and not found.needs_one
        else (f"start: {tags}{count}{end}")
    )
    lines.append(f"FREE: {lark.without(start=opening)}")
    lines.append(f"TEXT: {lark.without(*found.triggers, start=opening)}")
    return _joined([start, *lines], field)


def tag_schemas(value: Any, field: str) -> list[dict[str, Any]]:
    """Returns the schemas of the tags. Raises what `tag_grammar` raises."""
    return [tag.schema for tag in _read(value, field).tags]


def _body(tag: Tag, trigger: str) -> str:
    schema = json_text(tag.schema, tag.field)
    parts = [lark.string(tag.begin[len(trigger) :]), f"%json {schema}", lark.string(tag.end)]
    return " ".join(part for part in parts if part)


def _joined(lines: list[str], field: str) -> str:
    text = "\n".join(lines) + "\n"
    check_bytes(text, field)
    return text


def _read(value: Any, field: str) -> Tags:
    if isinstance(value, str):
        check_bytes(value, field)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{field} is not valid JSON ({error}): send an object") from error
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{field} must be an object with structures and triggers, not {value!r:.80}"
        )
    if value.get("format") is not None:
        check_members(value, ("type", "format"), field)
        return _read_format(value["format"], f"{field}.format")
    check_members(value, ("type", "structures", "triggers"), field)
    structures = _list(value, "structures", field)
    tags = [_tag(item, f"{field}.structures[{i}]") for i, item in enumerate(structures)]
    return _checked(Tags(tags, _texts(_list(value, "triggers", field), f"{field}.triggers")), field)


def _read_format(value: Any, field: str) -> Tags:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind in ("triggered_tags", "json_schema"):
        check_members(value, _MEMBERS[kind], field, _NEUTRAL)
    if kind == "json_schema":
        schema = schema_of(value.get("json_schema"), f"{field}.json_schema")
        return Tags([Tag("", schema, "", f"{field}.json_schema")], [])
    if kind == "tag":
        return Tags([_tag(value, field)], [])
    if kind == "triggered_tags":
        tags = [
            _tag(item, f"{field}.tags[{i}]") for i, item in enumerate(_list(value, "tags", field))
        ]
        triggers = _texts(_list(value, "triggers", field), f"{field}.triggers")
        flags = [flag_of(value.get(name), f"{field}.{name}") for name in _FLAGS]
        return _checked(Tags(tags, triggers, *flags), field)
    raise ValueError(f"{field} must be an object whose type is {_FORMATS}, not {value!r:.80}")


def _checked(tags: Tags, field: str) -> Tags:
    for tag in tags.tags:
        if not any(tag.begin.startswith(trigger) for trigger in tags.triggers):
            raise ValueError(f"{tag.field}.begin begins with none of the triggers: add one")
    return tags


def _tag(value: Any, field: str) -> Tag:
    if not isinstance(value, Mapping):
        raise ValueError(f"{field} must be an object with begin, schema and end, not {value!r:.80}")
    begin, end = (_text(value.get(name, ""), f"{field}.{name}") for name in ("begin", "end"))
    content = value.get("content")
    if isinstance(content, Mapping):
        if content.get("type") != "json_schema":
            raise ValueError(
                f"{field}.content must have the type json_schema: other types are not supported"
            )
        check_members(value, _MEMBERS["tag"], field)
        check_members(content, _MEMBERS["json_schema"], f"{field}.content", _NEUTRAL)
        return Tag(begin, schema_of(content.get("json_schema"), f"{field}.content"), end, field)
    check_members(value, ("type", "begin", "schema", "end"), field)
    return Tag(begin, schema_of(value.get("schema"), f"{field}.schema"), end, field)


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{field} must be a text, not {value!r:.80}")
    return value


def _list(value: Mapping[str, Any], name: str, field: str) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list) or not 0 < len(found) <= MAX_TAGS:
        raise ValueError(f"{field}.{name} must be a list of 1 to {MAX_TAGS}, not {found!r:.80}")
    return found


def _texts(values: list[Any], field: str) -> list[str]:
    if not all(isinstance(text, str) and text for text in values):
        raise ValueError(f"{field} must hold texts that are not empty, not {values!r:.80}")
    return values
