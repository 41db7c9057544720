"""The demo model's whole vocabulary of words and sentence templates, and the two functions that
draw from them.

This module has only tables. demo/data.py makes stories, facts and chats of them. If a word changes
or moves, the text of every seed and the tokenizer change, and the weights must be trained again.
"""

import random
from collections.abc import Sequence
from functools import cache
from string import Formatter
from typing import TypeVar

T = TypeVar("T")

_WORD_TABLE = """\
name: Mira Tom Anna Ben Clara David Ella Felix Grace Henry Iris Jack Kate Leo Maya Noah Olga Paul Rosa Sam Tara Victor
name: Wendy Yara Zoe Adam Bella Carl Dora Emil Fiona George Hanna Ivan Julia Karl Lena Max Nina Oscar Petra Ralf Sara
name: Theo Ursula Vera Walter Alice Boris Cora Daniel Eva Frank Greta Hugo Ida Jonas Klara Lucas Marta Niko Otto
color: red blue green yellow black white brown pink gray orange purple silver
container: box bag basket drawer jar chest bucket case crate trunk
item: apples books coins keys stones shells pens cups ropes lamps stamps nails beads maps candles buttons plums nuts
item: eggs spoons bells cards seeds bottles pears rings
animal: cat dog bird fox bear mouse horse cow duck frog rabbit sheep goat owl turtle wolf
place: library market school garden harbor bakery station museum castle tower farm bridge forest river park mill theater
place: hotel bank church cave beach village island
secret: maple tiger ocean copper winter summer magic thunder velvet marble silent golden cherry rocket shadow lemon
town_head: Oak River Stone Wood Green Lake Spring North West Silver Ash Bright Clear Fair Glen High
town_tail: dale field ford ham ton ville bury port wick mont land stead
adjective: little happy old young brave kind quiet clever tired hungry small big
mood: happy sad proud tired glad excited calm afraid
weather: sunny rainy windy cold warm foggy snowy bright
day: Monday Tuesday Wednesday Thursday Friday Saturday Sunday
time: morning afternoon evening night
food: bread soup cake cheese rice honey milk tea fish pie
hobby: sing dance run read draw swim cook paint play climb
"""


def word_lists(table: str) -> dict[str, list[str]]:
    """Reads a table whose lines are "name: words". Lines with the same name are joined."""
    lists: dict[str, list[str]] = {}
    for line in table.splitlines():
        name, words = line.split(": ")
        lists.setdefault(name, []).extend(words.split())
    return lists


WORDS = word_lists(_WORD_TABLE)

FILLER = (
    "It was a {weather} {time} and {name} walked to the {place}.",
    "{name} and {name} like to {hobby} near the {place}.",
    "A {adjective} {animal} slept under the tree by the {place}.",
    "On {day} it was {weather}, so {name} stayed at home.",
    "{name} made some {food} for the {adjective} {animal}.",
    "The {animal} ran to the {place} and looked for {food}.",
    "In the {time}, {name} was {mood} and wanted to {hobby}.",
    "{name} said hello to {name} at the {place}.",
    "The sky over the {place} was {color} that {time}.",
    "Everyone at the {place} was {mood} on {day}.",
    "{name} gave the {animal} some {food} and went home.",
    "The {adjective} {animal} likes {food} more than {food}.",
    "Later, {name} told a story about a {adjective} {animal}.",
    "They sat down, ate {food} and talked about the {weather} day.",
    "{name} could not find the {animal} until {day} {time}.",
    "There was a {color} flag on the {place}.",
)

STORY_BEATS = (
    (
        "Once upon a time, there was a {adjective} {animal} named {hero}.",
        "Once upon a time, a {adjective} {animal} named {hero} lived near the {place}.",
        "Long ago, there was a {animal} named {hero} who lived by the {place}.",
    ),
    (
        "{hero} liked to {hobby} every day.",
        "Every {time}, {hero} liked to {hobby}.",
        "{hero} loved {food} very much.",
    ),
    (
        "One day, {hero} went to the {spot} and found some {thing}.",
        "On a {weather} {day}, {hero} found some {thing} near the {spot}.",
    ),
    (
        '"Look at the {thing}!" said {hero}.',
        "{hero} had never seen such {color} {thing}.",
        "{hero} was very {mood}.",
    ),
    (
        "Then {friend} came to the {spot} too.",
        "Soon, {friend} the {animal} saw {hero} and the {thing}.",
    ),
    (
        '"Can I have some {thing}, please?" asked {friend}.',
        '"Where did you find the {thing}?" asked {friend}.',
        "{friend} was sad because {friend} had lost some {thing}.",
    ),
    (
        "{hero} was kind and shared the {thing} with {friend}.",
        "{hero} gave the {thing} to {friend}, and {friend} was happy.",
        "{hero} and {friend} took the {thing} home together.",
    ),
    (
        "After that, they ate {food} and played until {time}.",
        "They sat by the {place} and ate {food}.",
        "They went home and told everyone about the {thing}.",
    ),
    (
        "From that day on, {hero} and {friend} were best friends.",
        "{hero} learned that it is good to share.",
        "The end was happy, and they all slept well.",
    ),
)

OPPOSITES = (
    ("hot", "cold"),
    ("big", "small"),
    ("happy", "sad"),
    ("old", "young"),
    ("day", "night"),
    ("up", "down"),
    ("fast", "slow"),
    ("open", "closed"),
    ("wet", "dry"),
    ("full", "empty"),
    ("light", "dark"),
    ("left", "right"),
    ("first", "last"),
    ("good", "bad"),
    ("early", "late"),
    ("loud", "quiet"),
)
GREETINGS = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi there.", "Hello! How can I help you?"),
    ("Good morning!", "Good morning! How can I help you?"),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("Thank you!", "You are welcome!"),
    ("Goodbye!", "Goodbye! Have a nice day."),
    ("Who are you?", "I am a very small language model for the pdserve demo."),
    (
        "What can you do?",
        "I can tell short stories, add small numbers, write JSON and recall facts from your text.",
    ),
)


@cache
def _parse(template: str) -> tuple[tuple[str, str | None], ...]:
    return tuple((literal, name) for literal, name, _, _ in Formatter().parse(template))


def fill(rng: random.Random, template: str, bound: dict[str, str] | None = None) -> str:
    """Fills a template: replaces each {field} by `bound[field]`, or else by a random word of that
    list."""
    bound = bound or {}
    pieces: list[str] = []
    for literal, name in _parse(template):
        pieces.append(literal)
        if name is not None:
            pieces.append(bound.get(name) or pick(rng, WORDS[name]))
    return "".join(pieces)


def pick(rng: random.Random, options: Sequence[T]) -> T:
    """Draws one item uniformly. This is several times faster than `Random.choice`, which matters at
    10^8 tokens."""
    return options[int(rng.random() * len(options))]
