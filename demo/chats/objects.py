"""JSON objects with drawn keys: a text that states values, the keys or a JSON schema, and the
object.

demo/documents.py (training) and demo/skills.py (measuring) call this module.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from demo.chats.fields import Field, draw_fields, listing, said_key
from demo.chats.turns import reply_turn, system_turn, user_turn
from demo.data import EOS, SYSTEM_PROMPT, person
from demo.words import FILLER, fill, pick


@dataclass(frozen=True)
class Extraction:
    """A request for a JSON object, and the right answer."""

    text: str
    keys: tuple[str, ...]  # in the order of the request; empty: it names none and wants all
    schema: str  # "": the request only names keys
    answer: str  # the object as the model writes it


def _statement(rng: random.Random, field: Field) -> str:
    key = said_key(field.key)
    draw = rng.random()
    if field.kind == "items":
        return f"The {key} are {field.said}."
    return f"The {key} is {field.said}." if draw < 0.7 else f"Its {key} is {field.said}."


def _text(rng: random.Random, fields: Sequence[Field]) -> str:
    """Writes sentences that state the fields, with filler between some of them."""
    sentences: list[str] = []
    for field in fields:
        if rng.random() < 0.25:
            sentences.append(fill(rng, pick(rng, FILLER)))
        sentences.append(_statement(rng, field))
    return " ".join(sentences)


def _schema_text(rng: random.Random, types: dict[str, str]) -> str:
    properties: dict[str, dict[str, Any]] = {
        key: {"type": kind} if kind != "array" else {"type": kind, "items": {"type": "string"}}
        for key, kind in types.items()
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": list(types)}
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    return json.dumps(schema)


def draw_extraction(rng: random.Random) -> Extraction:
    """Draws a text with two to five values. Some of them are asked for, in any order."""
    values: dict[str, Any]
    if rng.random() < 0.15:
        text, extracted = person(rng)
        values = json.loads(extracted)
        types = {key: "integer" if key == "age" else "string" for key in values}
    else:
        fields = draw_fields(rng, 2 + int(rng.random() * 4), with_items=True)
        text = _text(rng, fields)
        values = {field.key: field.value for field in fields}
        types = {field.key: field.json_type for field in fields}
    if rng.random() < 0.1:
        return Extraction(text, (), "", _json(values))
    asked = rng.sample(list(values), 1 + int(rng.random() * min(4, len(values))))
    schema = _schema_text(rng, {key: types[key] for key in asked}) if rng.random() < 0.6 else ""
    return Extraction(text, tuple(asked), schema, _json({key: values[key] for key in asked}))


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False)


def messages_of(rng: random.Random, drawn: Extraction, may_use_system: bool) -> tuple[str, str]:
    """Returns the system message, which may be "", and the user's words that ask for the object."""
    if not drawn.keys:
        return "", f"Write this as JSON: {drawn.text}"
    if not drawn.schema:
        return "", f"Write this as JSON with the keys {listing(drawn.keys)}: {drawn.text}"
    wish = f"Answer as JSON that fits this schema: {drawn.schema}"
    if may_use_system and rng.random() < 0.4:
        return wish, drawn.text
    return "", f"{drawn.text}\n{wish}"


def object_document(rng: random.Random) -> str:
    """Draws a chat of one to three such turns, or one turn as a completion with "Keys:" and
    "JSON:"."""
    drawn = draw_extraction(rng)
    if drawn.keys and rng.random() < 0.2:
        keys = ", ".join(drawn.keys)
        return f"Text: {drawn.text}\nKeys: {keys}\nJSON: {drawn.answer}{EOS}"
    system, words = messages_of(rng, drawn, may_use_system=True)
    pieces = [system_turn(system or (SYSTEM_PROMPT if rng.random() < 0.4 else ""))]
    pieces += [user_turn(words), reply_turn(drawn.answer)]
    while not system and rng.random() < 0.4:
        drawn = draw_extraction(rng)
        _, words = messages_of(rng, drawn, may_use_system=False)
        pieces += [user_turn(words), reply_turn(drawn.answer)]
    return "".join(pieces)
