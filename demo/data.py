"""Text the demo model is trained and measured on: stories, sums, JSON extraction, chat turns and recall.

Every generator draws from the `random.Random` it is given and from nothing else, so a seed names its output. Knows the
special tokens of demo/tokenizer.py as strings, but no token ids: lengths here are estimates (`estimate_tokens`).
Called by demo/tokenizer.py, demo/rows.py (training), demo/evaluate.py, benchmarks/recall.py and the tests.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from string import Formatter
from typing import NamedTuple, TypeVar

T = TypeVar("T")

BOS, EOS, END = "<|bos|>", "<|eos|>", "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SYSTEM_PROMPT = "You are a helpful assistant."
MIN_RECALL_TOKENS = 60

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


def _word_lists(table: str) -> dict[str, list[str]]:
    lists: dict[str, list[str]] = {}
    for line in table.splitlines():
        name, words = line.split(": ")
        lists.setdefault(name, []).extend(words.split())
    return lists


WORDS = _word_lists(_WORD_TABLE)

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
    ("{hero} liked to {hobby} every day.", "Every {time}, {hero} liked to {hobby}.", "{hero} loved {food} very much."),
    (
        "One day, {hero} went to the {spot} and found some {thing}.",
        "On a {weather} {day}, {hero} found some {thing} near the {spot}.",
    ),
    ('"Look at the {thing}!" said {hero}.', "{hero} had never seen such {color} {thing}.", "{hero} was very {mood}."),
    ("Then {friend} came to the {spot} too.", "Soon, {friend} the {animal} saw {hero} and the {thing}."),
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
    ("What can you do?", "I can tell short stories, add small numbers, write JSON and recall facts from your text."),
)


class Fact(NamedTuple):
    """One statement of a value under a key, with the question that asks for it; `answer` starts with a space."""

    key: str
    value: str
    statement: str
    question: str

    @property
    def answer(self) -> str:
        return f" {self.value}."


class RecallPrompt(NamedTuple):
    """A prompt that ends with "Answer:" and the one right continuation (after which the model emits <|eos|>)."""

    prompt: str
    answer: str
    kind: str


@cache
def _parse(template: str) -> tuple[tuple[str, str | None], ...]:
    return tuple((literal, name) for literal, name, _, _ in Formatter().parse(template))


def fill(rng: random.Random, template: str, bound: dict[str, str] | None = None) -> str:
    """The template with each {field} replaced by `bound[field]` or else by a random word of that list."""
    bound = bound or {}
    pieces: list[str] = []
    for literal, name in _parse(template):
        pieces.append(literal)
        if name is not None:
            pieces.append(bound.get(name) or pick(rng, WORDS[name]))
    return "".join(pieces)


def pick(rng: random.Random, options: Sequence[T]) -> T:
    """A uniform choice; several times faster than `Random.choice`, which matters at 10^8 tokens."""
    return options[int(rng.random() * len(options))]


def estimate_tokens(text: str) -> int:
    """Roughly how many tokens the demo tokenizer makes of `text`: exact for sentences, up to 10 % low for dialogue."""
    return text.count(" ") + 1 + sum(map(text.count, "0123456789")) + sum(map(text.count, '.,?!:"\n'))


# --- facts and recall ---------------------------------------------------------------------------------------------


def _code(rng: random.Random) -> Fact:
    name, value = pick(rng, WORDS["name"]), f"{int(rng.random() * 10000):04d}"
    return Fact(f"code {name}", value, f"The code of {name} is {value}.", f"What is the code of {name}?")


def _home(rng: random.Random) -> Fact:
    name, value = pick(rng, WORDS["name"]), pick(rng, WORDS["town_head"]) + pick(rng, WORDS["town_tail"])
    return Fact(f"home {name}", value, f"{name} lives in {value}.", f"Where does {name} live?")


def _holding(rng: random.Random) -> Fact:
    owner = f"{pick(rng, WORDS['color'])} {pick(rng, WORDS['container'])}"
    value = f"{10 + int(rng.random() * 90)} {pick(rng, WORDS['item'])}"
    return Fact(f"holding {owner}", value, f"The {owner} holds {value}.", f"What does the {owner} hold?")


def _password(rng: random.Random) -> Fact:
    place, value = pick(rng, WORDS["place"]), f"{pick(rng, WORDS['secret'])}{10 + int(rng.random() * 90)}"
    return Fact(
        f"password {place}", value, f"The password of the {place} is {value}.", f"What is the password of the {place}?"
    )


FACT_KINDS: tuple[Callable[[random.Random], Fact], ...] = (_code, _home, _holding, _password)


@dataclass
class FactSource:
    """Draws facts whose keys and values are all different, so a question has one answer, stated once."""

    rng: random.Random
    used: set[str] = field(default_factory=set)

    def draw(self) -> Fact | None:
        """A new fact, or None when the keys are nearly used up."""
        for _ in range(20):
            fact = pick(self.rng, FACT_KINDS)(self.rng)
            if fact.key not in self.used and fact.value not in self.used:
                self.used.update((fact.key, fact.value))
                return fact
        return None


def body(rng: random.Random, facts: FactSource, num_tokens: int, fact_share: float) -> tuple[str, list[Fact]]:
    """About `num_tokens` of filler with facts strewn in (`fact_share` of the sentences); at least one fact."""
    sentences: list[str] = []
    stated: list[Fact] = []
    length = 0
    while length < num_tokens or not stated:
        fact = facts.draw() if rng.random() < fact_share else None
        if fact is not None:
            stated.append(fact)
        sentences.append(fact.statement if fact is not None else fill(rng, pick(rng, FILLER)))
        length += estimate_tokens(sentences[-1])
    return " ".join(sentences), stated


def question_line(fact: Fact) -> str:
    return f"\nQuestion: {fact.question}\nAnswer:"


def recall_prompt(rng: random.Random, num_tokens: int) -> RecallPrompt:
    """A text with 5-40 % facts among filler and a question for any one of them: up to `num_tokens` + 10 tokens in all.

    Raises ValueError below MIN_RECALL_TOKENS, where no fact and question fit.
    """
    if num_tokens < MIN_RECALL_TOKENS:
        raise ValueError(f"num_tokens is {num_tokens}: a recall prompt needs at least {MIN_RECALL_TOKENS}")
    while True:
        text, stated = body(rng, FactSource(rng), num_tokens - 24, rng.uniform(0.05, 0.4))
        # A body that had to wait for its first fact may have grown too long.
        if estimate_tokens(text) <= num_tokens - 8:
            fact = pick(rng, stated)
            return RecallPrompt(text + question_line(fact), fact.answer, fact.key.split()[0])


def recall_document(rng: random.Random, num_tokens: int) -> str:
    """Training text of about `num_tokens`: stretches of facts and filler, each followed by questions and answers.

    <|eos|> follows every answer, also where more text comes: the model then always stops there, yet one document asks
    many questions, which makes the signal dense.
    """
    facts, pending = FactSource(rng), list[Fact]()
    pieces: list[str] = []
    length = 0
    while length < num_tokens:
        room = num_tokens - length
        stretch, stated = body(rng, facts, int(room * rng.uniform(0.15, 0.75)), rng.uniform(0.05, 0.6))
        pending += stated
        rng.shuffle(pending)
        num_questions = 1 + int(rng.random() * len(pending))
        pieces.append(("\n" if pieces else "") + stretch)
        for fact in pending[:num_questions]:
            pieces.append(f"{question_line(fact)}{fact.answer}{EOS}")
        pending = pending[num_questions:]
        length += sum(estimate_tokens(piece) for piece in pieces[-num_questions - 1 :])
    return "".join(pieces)


def recall_chat(rng: random.Random, num_tokens: int) -> str:
    """The same as a conversation: the first user turn holds the text, every turn asks one question."""
    text, stated = body(rng, FactSource(rng), int(num_tokens * rng.uniform(0.4, 0.9)), rng.uniform(0.05, 0.6))
    rng.shuffle(stated)
    first, *rest = stated
    turns = [(f"{text}\n{first.question}", f"The answer is{first.answer}")]
    length = estimate_tokens(text)
    for fact in rest:
        if length > num_tokens:
            break
        turns.append((fact.question, f"The answer is{fact.answer}"))
        length += 24
    return chat_text(turns, rng.random() < 0.5)


# --- stories, sums, JSON, small talk ----------------------------------------------------------------------------------


def story(rng: random.Random) -> str:
    """A story of nine sentences with one hero, one friend and one kind of thing."""
    hero, friend = rng.sample(WORDS["name"], 2)
    bound = {"hero": hero, "friend": friend, "thing": pick(rng, WORDS["item"]), "spot": pick(rng, WORDS["place"])}
    return " ".join(fill(rng, pick(rng, beat), bound) for beat in STORY_BEATS)


def _sum(rng: random.Random) -> tuple[int, str, int, int]:
    a, b = int(rng.random() * 100), int(rng.random() * 100)
    if rng.random() < 0.5:
        return a, "+", b, a + b
    return max(a, b), "-", min(a, b), max(a, b) - min(a, b)


def arithmetic(rng: random.Random) -> str:
    """A few lines such as "12 + 7 = 19"; operands below 100, results never negative."""
    return "\n".join("{} {} {} = {}".format(*_sum(rng)) for _ in range(rng.randint(2, 8)))


def _person(rng: random.Random) -> tuple[str, str]:
    name, age = pick(rng, WORDS["name"]), rng.randint(3, 99)
    city = pick(rng, WORDS["town_head"]) + pick(rng, WORDS["town_tail"])
    hobby = pick(rng, WORDS["hobby"])
    sentence = f"My friend {name} is {age} years old, lives in {city} and likes to {hobby}."
    return sentence, json.dumps({"name": name, "age": age, "city": city, "hobby": hobby})


def json_extraction(rng: random.Random) -> str:
    """A sentence about a person and the same as a JSON object."""
    sentence, extracted = _person(rng)
    return f"Text: {sentence}\nJSON: {extracted}"


def chat_text(turns: list[tuple[str, str]], with_system: bool) -> str:
    """What the chat template makes of these (user, assistant) turns, without the leading <|bos|>."""
    system = f"{SYSTEM}{SYSTEM_PROMPT}{END}" if with_system else ""
    return system + "".join(f"{USER}{user}{END}{ASSISTANT}{reply}{END}" for user, reply in turns)


def _sum_turn(rng: random.Random) -> tuple[str, str]:
    a, sign, b, result = _sum(rng)
    return f"What is {a} {sign} {b}?", f"{a} {sign} {b} = {result}"


def _story_turn(rng: random.Random) -> tuple[str, str]:
    return pick(rng, ("Tell me a story.", "Please tell me a short story.", "Can you tell me a story?")), story(rng)


def _json_turn(rng: random.Random) -> tuple[str, str]:
    sentence, extracted = _person(rng)
    return f"Write this as JSON: {sentence}", extracted


def _opposite_turn(rng: random.Random) -> tuple[str, str]:
    word, other = rng.sample(pick(rng, OPPOSITES), 2)
    return f"What is the opposite of {word}?", f"The opposite of {word} is {other}."


def chat(rng: random.Random) -> str:
    """One to four turns of small talk, sums, stories, JSON and opposites."""
    kinds = (_sum_turn, _story_turn, _json_turn, _opposite_turn)
    turns = [
        pick(rng, GREETINGS) if rng.random() < 0.3 else pick(rng, kinds)(rng) for _ in range(1 + int(rng.random() * 4))
    ]
    return chat_text(turns, rng.random() < 0.5)


def short_document(rng: random.Random) -> str:
    """Any one document that is not about recall, ended as the model should end it."""
    kind = pick(rng, (story, arithmetic, json_extraction, chat, chat))
    return kind(rng) + ("" if kind is chat else EOS)


def document(rng: random.Random, num_tokens: int, recall_share: float) -> str:
    """Training text of about `num_tokens`, without the leading <|bos|>: recall, or several short documents."""
    draw = rng.random()
    if draw < recall_share:
        return recall_chat(rng, num_tokens) if draw < 0.2 * recall_share else recall_document(rng, num_tokens)
    pieces: list[str] = []
    length = 0
    while length < num_tokens:
        pieces.append(short_document(rng))
        length += estimate_tokens(pieces[-1])
    return BOS.join(pieces)
