"""Chat turns in which the model thinks in two lines before it answers.

It thinks if the user's words ask for it, or if the chat template has opened the reasoning
(`enable_thinking`). If no words asked for it, training leaves <think> out of the loss
(demo/train.py). demo/documents.py, demo/chats/tool_chat.py and demo/skills.py call this module.
"""

import random
from dataclasses import dataclass

from demo.chats.turns import reply_turn, system_turn, thought_text, user_turn
from demo.data import (
    SYSTEM_PROMPT,
    FactSource,
    body,
    draw_sum,
    opposite_turn,
    sum_turn,
)
from demo.words import OPPOSITES, pick

# Each has the word "Think", by which training recognises that the words asked.
THINK_PHRASES = (
    "Think first.",
    "Think before you answer.",
    "Think about it.",
    "Think step by step.",
)


@dataclass(frozen=True)
class Thought:
    """A question with its reasoning and answer."""

    question: str  # the user's words, without the phrase that asks for reasoning
    lines: tuple[str, str]
    answer: str


def thinks(rng: random.Random) -> bool:
    """Draws whether the user's words ask for reasoning. If not, the template opens it."""
    return rng.random() < 0.6


def asked_to_think(rng: random.Random, words: str) -> str:
    """Adds a phrase that asks for reasoning before or after the words."""
    phrase = pick(rng, THINK_PHRASES)
    return f"{words} {phrase}" if rng.random() < 0.7 else f"{phrase} {words}"


def draw_thought(rng: random.Random) -> Thought:
    """Draws a sum, an opposite or a question about a short text, with its two lines of
    reasoning."""
    return pick(rng, (_sum, _opposite, _recall, _recall))(rng)


def _sum(rng: random.Random) -> Thought:
    a, sign, b, result = draw_sum(rng)
    operation = "sum" if sign == "+" else "difference"
    lines = (f"I need the {operation} of {a} and {b}.", f"It is {result}.")
    return Thought(f"What is {a} {sign} {b}?", lines, f"{a} {sign} {b} = {result}")


def _opposite(rng: random.Random) -> Thought:
    word, other = rng.sample(pick(rng, OPPOSITES), 2)
    lines = (f"I need the opposite of {word}.", f"It is {other}.")
    answer = f"The opposite of {word} is {other}."
    return Thought(f"What is the opposite of {word}?", lines, answer)


def _recall(rng: random.Random) -> Thought:
    text, stated = body(rng, FactSource(rng), 30 + int(rng.random() * 150), 0.4)
    fact = pick(rng, stated)
    lines = (f"The question is: {fact.question}", f"The text says: {fact.statement}")
    return Thought(f"{text}\n{fact.question}", lines, f"The answer is{fact.answer}")


def thinking_chat(rng: random.Random) -> str:
    """Draws one turn with reasoning, sometimes after a turn without. Returns the template's text
    without <|bos|>."""
    pieces = [system_turn(SYSTEM_PROMPT)] if rng.random() < 0.5 else []
    if rng.random() < 0.3:
        words, reply = pick(rng, (sum_turn, opposite_turn))(rng)
        pieces += [user_turn(words), reply_turn(reply)]
    thought = draw_thought(rng)
    words = asked_to_think(rng, thought.question) if thinks(rng) else thought.question
    pieces += [user_turn(words), reply_turn(thought_text(thought.lines) + thought.answer)]
    return "".join(pieces)
