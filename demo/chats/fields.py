"""Keys with values, as JSON and as people say them. Tools, their results and JSON objects are made
of them.

Words come from the tables here and in demo/words.py. Some are made up from syllables, so that the
model also sees unknown names. demo/chats/tools.py, demo/chats/objects.py and
demo/chats/tool_chat.py call this module. It knows no special tokens.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from demo.words import WORDS, pick, word_lists

_KEY_TABLE = """\
town: city town location destination origin address
name: name person owner user guest friend author sender
color: color shade
day: day date start_day end_day
time: time
place: place room target
food: food meal
mood: mood status state
word: title label type category mode language unit model brand
integer: count number amount age size level speed seats hours minutes weight height distance limit
decimal: price cost rate temperature total
code: code id password ticket token
truth: urgent active loud open paid
phrase: text message query note subject reason
items: items things tags names
"""
KEYS = word_lists(_KEY_TABLE)
# Kinds whose values can be said without the key, as in "the weather in Oakdale on Monday".
SHORT_FORMS = {
    "town": " in {}",
    "name": " for {}",
    "day": " on {}",
    "time": " in the {}",
    "place": " at the {}",
}
JSON_TYPES = {
    "integer": "integer",
    "decimal": "number",
    "truth": "boolean",
    "items": "array",
}
ONE_VALUE_KINDS = tuple(kind for kind in KEYS if kind != "items")
_WORD_LISTS = ("color", "item", "animal", "adjective", "food", "weather", "secret", "hobby")
_SYLLABLE_TABLE = """\
start: b c d f g h j k l m n p r s t v w z br dr fl gr kl pl st tr
vowel: a e i o u a e i o ai ou
"""
_SYLLABLES = word_lists(_SYLLABLE_TABLE)
_ENDS = ["", "", "", "n", "r", "s", "l", "t", "k", "m", "x"]


@dataclass(frozen=True)
class Field:
    """A key with a value. `value` is as in JSON, and `said` is as a user writes it."""

    key: str
    kind: str
    value: Any
    said: str

    @property
    def json_type(self) -> str:
        """The field's type in a JSON schema."""
        return JSON_TYPES.get(self.kind, "string")


def made_up_word(rng: random.Random) -> str:
    """Makes a word of two or three syllables, such as "brusofel". There are about 10^7 such words,
    so it is nearly always a new one."""
    return "".join(
        pick(rng, _SYLLABLES["start"]) + pick(rng, _SYLLABLES["vowel"]) + pick(rng, _ENDS)
        for _ in range(2 + (rng.random() < 0.3))
    )


def draw_key(rng: random.Random, kind: str) -> str:
    """Draws a key. In four of five cases it is from the table, and three of four of those fit the
    kind."""
    draw = rng.random()
    if draw < 0.1:
        return made_up_word(rng)
    if draw < 0.2:
        return f"{pick(rng, WORDS['color'])}_{pick(rng, KEYS[kind])}"
    return pick(rng, KEYS[kind if draw < 0.8 else pick(rng, ONE_VALUE_KINDS)])


def _phrase(rng: random.Random) -> str:
    lists = ("hobby", "adjective", "item", "animal", "food", "color", "place")
    words = [pick(rng, WORDS[pick(rng, lists)]) for _ in range(2 + int(rng.random() * 3))]
    return " ".join(words)


def _number(rng: random.Random) -> int:
    return int(rng.random() * 10 ** (1 + int(rng.random() * 4)))


def _proper(rng: random.Random, usual: str) -> str:
    """Draws the name of a person or a town. One of ten is made up."""
    return made_up_word(rng).capitalize() if rng.random() < 0.1 else usual


_DRAW: dict[str, Callable[[random.Random], Any]] = {
    "town": lambda rng: _proper(rng, pick(rng, WORDS["town_head"]) + pick(rng, WORDS["town_tail"])),
    "name": lambda rng: _proper(rng, pick(rng, WORDS["name"])),
    "color": lambda rng: pick(rng, WORDS["color"]),
    "day": lambda rng: pick(rng, WORDS["day"]),
    "time": lambda rng: pick(rng, WORDS["time"]),
    "place": lambda rng: pick(rng, WORDS["place"]),
    "food": lambda rng: pick(rng, WORDS["food"]),
    "mood": lambda rng: pick(rng, WORDS["mood"]),
    "word": lambda rng: pick(rng, WORDS[pick(rng, _WORD_LISTS)]),
    "integer": _number,
    "decimal": lambda rng: round(_number(rng) + rng.random(), 1),
    "truth": lambda rng: rng.random() < 0.5,
    "items": lambda rng: rng.sample(WORDS["item"], 2 + int(rng.random() * 2)),
}


def _value(rng: random.Random, kind: str) -> tuple[Any, str]:
    """Draws a value of this kind, and how it is said. It is quoted if it is made up or has
    spaces."""
    if kind == "code":
        word = pick(rng, WORDS["secret"]) if rng.random() < 0.5 else made_up_word(rng)
        value = f"{word}{int(rng.random() * 100)}"
        return value, f'"{value}"'
    if kind == "phrase" or (kind == "word" and rng.random() < 0.2):
        value = _phrase(rng) if kind == "phrase" else made_up_word(rng)
        return value, f'"{value}"'
    value = _DRAW[kind](rng)
    if kind == "items":
        return value, listing(value)
    return value, str(value).lower() if kind == "truth" else str(value)


def draw_field(rng: random.Random, kinds: Sequence[str] = ONE_VALUE_KINDS) -> Field:
    """Draws a key of one of these kinds, with a value."""
    kind = pick(rng, kinds)
    return Field(draw_key(rng, kind), kind, *_value(rng, kind))


def draw_fields(rng: random.Random, count: int, with_items: bool = False) -> list[Field]:
    """Draws fields with different keys and different values."""
    fields: list[Field] = []
    while len(fields) < count:
        items = with_items and rng.random() < 0.1
        field = draw_field(rng, ("items",) if items else ONE_VALUE_KINDS)
        if all(field.key != other.key and field.said != other.said for other in fields):
            fields.append(field)
    return fields


def draw_other_value(rng: random.Random, field: Field) -> Field:
    """Draws another value for the same key."""
    while True:
        other = Field(field.key, field.kind, *_value(rng, field.kind))
        if other.said != field.said or field.kind == "truth":
            return other


def said_key(key: str) -> str:
    """Returns the key as words. A made-up key is quoted, because its letters matter."""
    words = key.replace("_", " ")
    return words if is_known(key) else f'"{key}"'


def is_known(key: str) -> bool:
    """True if a key comes from the tables."""
    return key.rpartition("_")[2] in _KNOWN_KEYS


def can_be_short(field: Field) -> bool:
    """True if the value can be said without the key. Then the key must fit the kind."""
    return field.kind in SHORT_FORMS and field.key.rpartition("_")[2] in KEYS[field.kind]


def listing(parts: Sequence[str]) -> str:
    """Joins parts to "a", "a and b" or "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


_KNOWN_KEYS = frozenset(
    word for words in KEYS.values() for key in words for word in (key, key.rpartition("_")[2])
)
