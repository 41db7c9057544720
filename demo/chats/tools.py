"""Tools with drawn names and parameters, and requests that need one of them.

A tool is drawn together with the arguments that a request will name, so every request has one right
call. demo/chats/tool_chat.py (training) and demo/skills.py (measuring) call this module. It knows
no special tokens and no chat format.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from demo.chats.fields import (
    SHORT_FORMS,
    Field,
    can_be_short,
    draw_fields,
    draw_other_value,
    is_known,
    listing,
    made_up_word,
    said_key,
)
from demo.words import WORDS, pick, word_lists

_WORD_TABLE = """\
verb: get set find open close start stop send book buy sell check count move add remove show list
verb: play call make plan order read write search create delete update clean paint draw
noun: weather price ticket table alarm light door song mail message note event meeting task order
noun: file image map route train bus flight hotel room car lamp window heater camera clock news
noun: account user contact group shop book game team stock package garden tower boat letter
"""
VERBS = word_lists(_WORD_TABLE)["verb"]
NOUNS = word_lists(_WORD_TABLE)["noun"]
# Verbs that "What is the ...?" can replace.
ASKING_VERBS = ("get", "find", "check", "show", "read")


@dataclass(frozen=True)
class Tool:
    """A tool with the arguments of one request."""

    name: str
    verb: str  # words with spaces
    noun: str  # words with spaces
    fields: tuple[Field, ...]  # arguments of the request, in the schema's order
    extra: tuple[Field, ...]  # optional parameters that no request names
    is_described: bool
    schema: dict[str, Any]  # as in the tools of an OpenAI request


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


def draw_tool(rng: random.Random, others: Sequence[Tool] = ()) -> Tool:
    """Draws a tool whose name differs from those of `others`. Half of the tools share a verb or
    noun with one of these."""
    while True:
        verb, noun = pick(rng, VERBS), _noun(rng)
        if others and rng.random() < 0.5:
            other = pick(rng, others)
            verb, noun = (other.verb, noun) if rng.random() < 0.5 else (verb, other.noun)
        is_described = rng.random() < 0.85
        name = _name(rng, verb, noun, is_described)
        if all(name != t.name and (verb, noun) != (t.verb, t.noun) for t in others):
            break
    count = 1 + int(rng.random() * 3) if rng.random() < 0.96 else 0
    has_extra = rng.random() < 0.15
    fields = draw_fields(rng, count + has_extra)
    return Tool(
        name,
        verb,
        noun,
        tuple(fields[:count]),
        tuple(fields[count:]),
        is_described,
        _schema(
            rng, name, _description(rng, verb, noun, fields) if is_described else "", fields, count
        ),
    )


def _noun(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.15:
        return made_up_word(rng)
    if draw < 0.3:
        return f"{pick(rng, WORDS['place'])} {pick(rng, NOUNS)}"
    return pick(rng, NOUNS)


def _name(rng: random.Random, verb: str, noun: str, may_be_made_up: bool) -> str:
    words = noun.split()
    draw = rng.random()
    if draw < 0.1 and may_be_made_up:
        return made_up_word(rng)
    if draw < 0.2:
        return verb + "".join(word.capitalize() for word in words)
    if draw < 0.25:
        return "_".join([*words, verb])
    return "_".join([verb, *words])


def _description(rng: random.Random, verb: str, noun: str, fields: Sequence[Field]) -> str:
    draw = rng.random()
    keys = [said_key(field.key) for field in fields]
    what = f"use this to {verb} the {noun}" if draw < 0.15 else f"{verb} the {noun}"
    if draw > 0.7 and keys:
        return what + pick(
            rng, (f" by {listing(keys)}", f" for a {keys[0]}", f" with a {keys[-1]}")
        )
    return what


def _schema(
    rng: random.Random, name: str, description: str, fields: list[Field], num_required: int
) -> dict[str, Any]:
    with_descriptions = rng.random() < 0.2
    properties = {}
    for field in fields:
        properties[field.key] = part = {"type": field.json_type}
        if with_descriptions:
            words = field.key.replace("_", " ")
            part["description"] = f"The {words}" if rng.random() < 0.7 else f"{words} to use"
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        parameters["required"] = [field.key for field in fields[:num_required]]
    if rng.random() < 0.15:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if description:
        end = "." if rng.random() < 0.5 else ""
        function["description"] = description[0].upper() + description[1:] + end
    function["parameters"] = parameters
    if rng.random() < 0.05:
        function["strict"] = True
    return {"type": "function", "function": function}


def call_of(tool: Tool, fields: Sequence[Field]) -> Call:
    """Returns the call with these arguments, in the schema's order."""
    by_key = {field.key: field.value for field in fields}
    return Call(tool.name, {f.key: by_key[f.key] for f in tool.fields})


def other_fields(rng: random.Random, tool: Tool) -> list[Field]:
    """Draws arguments with new values, for a second request to the same tool."""
    return [draw_other_value(rng, field) for field in tool.fields]


def request(
    rng: random.Random, tool: Tool, tools: Sequence[Tool], fields: Sequence[Field], one_line: bool
) -> str:
    """Writes a user's words that need `tool`, one of `tools`, with the values of `fields`.

    With `one_line` other words follow, so the arguments must not stand on lines of their own.
    """
    if rng.random() < 0.2:
        fields = rng.sample(fields, len(fields))
    how = pick(rng, _STYLES if one_line else (*_STYLES, _in_lines))
    head, end = _head(rng, tool, tools)
    if not fields:
        return head + end
    return f"{head}{how(tool, fields)}{'' if how is _in_lines else end}"


def _head(rng: random.Random, tool: Tool, tools: Sequence[Tool]) -> tuple[str, str]:
    is_readable = tool.is_described or tool.noun in NOUNS or " " in tool.noun
    draw = rng.random()
    if not is_readable or draw < 0.08:
        return f"{'Use' if rng.random() < 0.5 else 'Call'} {tool.name}", "."
    is_alone = all(other is tool or other.noun != tool.noun for other in tools)
    if draw < 0.3 and is_alone and tool.verb in ASKING_VERBS:
        start = pick(rng, ("What is", "What is", "What is", "What's", "Tell me"))
        return f"{start} the {tool.noun}", "." if start == "Tell me" else "?"
    what = f"{tool.verb} the {tool.noun}"
    if draw < 0.55:
        return what.capitalize(), "."
    if draw < 0.7:
        return f"Please {what}", "."
    if draw < 0.85:
        return f"Can you {what}", "?"
    return f"I want to {what}", "."


def _short(tool: Tool, fields: Sequence[Field]) -> str:
    """Writes arguments as in " in Oakdale on Monday with count 3". A preposition is used if the
    tool has only one parameter of that kind."""
    kinds = [field.kind for field in (*tool.fields, *tool.extra)]
    short = [f for f in fields if can_be_short(f) and kinds.count(f.kind) == 1]
    rest = [field for field in fields if field not in short]
    text = "".join(SHORT_FORMS[field.kind].format(field.said) for field in short)
    return text + (_with(tool, rest) if rest else "")


def _with(tool: Tool, fields: Sequence[Field]) -> str:
    return " with " + listing([f"{said_key(field.key)} {field.said}" for field in fields])


def _where(tool: Tool, fields: Sequence[Field]) -> str:
    return ", where " + listing([f"the {said_key(f.key)} is {f.said}" for f in fields])


def _after_colon(tool: Tool, fields: Sequence[Field]) -> str:
    return ": " + ", ".join(f"{said_key(field.key)} {field.said}" for field in fields)


def _equations(tool: Tool, fields: Sequence[Field]) -> str:
    return " (" + ", ".join(f"{_exact_key(field.key)}={field.said}" for field in fields) + ")"


def _exact_key(key: str) -> str:
    return key if is_known(key) else f'"{key}"'


def _in_lines(tool: Tool, fields: Sequence[Field]) -> str:
    return ".\n" + "\n".join(f"{field.key}: {field.said}" for field in fields)


_STYLES: tuple[Callable[[Tool, Sequence[Field]], str], ...] = (
    _short,
    _short,
    _short,
    _with,
    _with,
    _where,
    _after_colon,
    _equations,
)
