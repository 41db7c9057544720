"""Plain text on which the demo model is trained and measured: stories, sums, JSON extraction, chat
turns and recall.

Every generator draws only from the `random.Random` that it is given, so a seed determines its
output. This module knows the special tokens of demo/tokenizer.py as strings, but no token ids, so
lengths are estimates (`estimate_tokens`). demo/documents.py (training), demo/chats/tool_chat.py,
demo/chats/thinking.py, demo/recall.py, benchmarks/cluster/recall.py and the tests call it.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from demo.words import FILLER, GREETINGS, OPPOSITES, STORY_BEATS, WORDS, fill, pick

BOS = "<|bos|>"
EOS = "<|eos|>"
END = "<|end|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
RESULT, RESULT_END = "<tool_response>", "</tool_response>"
THINK, THINK_END = "<think>", "</think>"
SYSTEM_PROMPT = "You are a helpful assistant."
MIN_RECALL_TOKENS = 60


class Fact(NamedTuple):
    """One statement of a value under a key, with the question that asks for it. `answer` starts
    with a space."""

    key: str
    value: str
    statement: str
    question: str

    @property
    def answer(self) -> str:
        return f" {self.value}."


class RecallPrompt(NamedTuple):
    """A prompt that ends with "Answer:", and its only right continuation. The model must then emit
    <|eos|>."""

    prompt: str
    answer: str
    kind: str


def estimate_tokens(text: str) -> int:
    """Estimates the number of tokens that the demo tokenizer makes of `text`. The estimate is exact
    for sentences, and up to 10 % too low for dialogue."""
    return (
        text.count(" ") + 1 + sum(map(text.count, "0123456789")) + sum(map(text.count, '.,?!:"\n'))
    )


# --- facts and recall -----------------------------------------------------------------------------


def _code(rng: random.Random) -> Fact:
    name = pick(rng, WORDS["name"])
    value = f"{int(rng.random() * 10000):04d}"
    return Fact(
        f"code {name}", value, f"The code of {name} is {value}.", f"What is the code of {name}?"
    )


def _home(rng: random.Random) -> Fact:
    name = pick(rng, WORDS["name"])
    value = pick(rng, WORDS["town_head"]) + pick(rng, WORDS["town_tail"])
    return Fact(f"home {name}", value, f"{name} lives in {value}.", f"Where does {name} live?")


def _holding(rng: random.Random) -> Fact:
    owner = f"{pick(rng, WORDS['color'])} {pick(rng, WORDS['container'])}"
    value = f"{10 + int(rng.random() * 90)} {pick(rng, WORDS['item'])}"
    return Fact(
        f"holding {owner}", value, f"The {owner} holds {value}.", f"What does the {owner} hold?"
    )


def _password(rng: random.Random) -> Fact:
    place = pick(rng, WORDS["place"])
    value = f"{pick(rng, WORDS['secret'])}{10 + int(rng.random() * 90)}"
    return Fact(
        f"password {place}",
        value,
        f"The password of the {place} is {value}.",
        f"What is the password of the {place}?",
    )


FACT_KINDS: tuple[Callable[[random.Random], Fact], ...] = (_code, _home, _holding, _password)


@dataclass
class FactSource:
    """Draws facts whose keys and values are all different. So a question has one answer, which is
    stated once."""

    rng: random.Random
    used: set[str] = field(default_factory=set)

    def draw(self) -> Fact | None:
        """Draws a new fact. None: the keys are nearly used up."""
        for _ in range(20):
            fact = pick(self.rng, FACT_KINDS)(self.rng)
            if fact.key not in self.used and fact.value not in self.used:
                self.used.update((fact.key, fact.value))
                return fact
        return None


def body(
    rng: random.Random, facts: FactSource, num_tokens: int, fact_share: float
) -> tuple[str, list[Fact]]:
    """Draws about `num_tokens` tokens of filler with facts between. `fact_share` is the share of
    sentences that are facts. There is at least one fact."""
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
    """Draws a text with 5-40 % facts among filler, and a question for one of them. Together they
    have up to `num_tokens` + 10 tokens.

    Raises ValueError below MIN_RECALL_TOKENS, because no fact and question fit.
    """
    if num_tokens < MIN_RECALL_TOKENS:
        raise ValueError(
            f"num_tokens is {num_tokens}: a recall prompt needs at least {MIN_RECALL_TOKENS}"
        )
    while True:
        text, stated = body(rng, FactSource(rng), num_tokens - 24, rng.uniform(0.05, 0.4))
        # A body whose first fact came late may be too long.
        if estimate_tokens(text) <= num_tokens - 8:
            fact = pick(rng, stated)
            return RecallPrompt(text + question_line(fact), fact.answer, fact.key.split()[0])


def recall_document(rng: random.Random, num_tokens: int) -> str:
    """Draws training text of about `num_tokens` tokens: stretches of facts and filler, each
    followed by questions and answers.

    <|eos|> follows every answer, even if more text follows. So the model always stops there, and
    one document still asks many questions, which makes the signal dense.
    """
    facts = FactSource(rng)
    pending = list[Fact]()
    pieces: list[str] = []
    length = 0
    while length < num_tokens:
        room = num_tokens - length
        stretch, stated = body(
            rng, facts, int(room * rng.uniform(0.15, 0.75)), rng.uniform(0.05, 0.6)
        )
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
    """Draws the same as a conversation. The first user turn has the text, and every turn asks one
    question."""
    text, stated = body(
        rng, FactSource(rng), int(num_tokens * rng.uniform(0.4, 0.9)), rng.uniform(0.05, 0.6)
    )
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


# --- stories, sums, JSON, small talk --------------------------------------------------------------


def story(rng: random.Random) -> str:
    """Draws a story of nine sentences with one hero, one friend and one kind of thing."""
    hero, friend = rng.sample(WORDS["name"], 2)
    bound = {
        "hero": hero,
        "friend": friend,
        "thing": pick(rng, WORDS["item"]),
        "spot": pick(rng, WORDS["place"]),
    }
    return " ".join(fill(rng, pick(rng, beat), bound) for beat in STORY_BEATS)


def draw_sum(rng: random.Random) -> tuple[int, str, int, int]:
    a = int(rng.random() * 100)
    b = int(rng.random() * 100)
    if rng.random() < 0.5:
        return a, "+", b, a + b
    return max(a, b), "-", min(a, b), max(a, b) - min(a, b)


def arithmetic(rng: random.Random) -> str:
    """Draws a few lines such as "12 + 7 = 19". Operands are below 100, and results are never
    negative."""
    return "\n".join("{} {} {} = {}".format(*draw_sum(rng)) for _ in range(rng.randint(2, 8)))


def person(rng: random.Random) -> tuple[str, str]:
    name = pick(rng, WORDS["name"])
    age = rng.randint(3, 99)
    city = pick(rng, WORDS["town_head"]) + pick(rng, WORDS["town_tail"])
    hobby = pick(rng, WORDS["hobby"])
    sentence = f"My friend {name} is {age} years old, lives in {city} and likes to {hobby}."
    return sentence, json.dumps({"name": name, "age": age, "city": city, "hobby": hobby})


def json_extraction(rng: random.Random) -> str:
    """Draws a sentence about a person, and the same as a JSON object."""
    sentence, extracted = person(rng)
    return f"Text: {sentence}\nJSON: {extracted}"


def chat_text(turns: list[tuple[str, str]], with_system: bool) -> str:
    """Returns the chat template's text of these (user, assistant) turns, without the leading
    <|bos|>."""
    system = f"{SYSTEM}{SYSTEM_PROMPT}{END}" if with_system else ""
    return system + "".join(f"{USER}{user}{END}{ASSISTANT}{reply}{END}" for user, reply in turns)


def sum_turn(rng: random.Random) -> tuple[str, str]:
    a, sign, b, result = draw_sum(rng)
    return f"What is {a} {sign} {b}?", f"{a} {sign} {b} = {result}"


def _story_turn(rng: random.Random) -> tuple[str, str]:
    return pick(
        rng, ("Tell me a story.", "Please tell me a short story.", "Can you tell me a story?")
    ), story(rng)


def _json_turn(rng: random.Random) -> tuple[str, str]:
    sentence, extracted = person(rng)
    return f"Write this as JSON: {sentence}", extracted


def opposite_turn(rng: random.Random) -> tuple[str, str]:
    word, other = rng.sample(pick(rng, OPPOSITES), 2)
    return f"What is the opposite of {word}?", f"The opposite of {word} is {other}."


def chat(rng: random.Random) -> str:
    """Draws one to four turns of small talk, sums, stories, JSON and opposites."""
    kinds = (sum_turn, _story_turn, _json_turn, opposite_turn)
    turns = [
        pick(rng, GREETINGS) if rng.random() < 0.3 else pick(rng, kinds)(rng)
        for _ in range(1 + int(rng.random() * 4))
    ]
    return chat_text(turns, rng.random() < 0.5)
