"""Chats with tools: requests, calls, results and answers, among turns that need no tool.

A chat is text as the chat template writes it. Only its last reply has reasoning, because the
template leaves older reasoning out. demo/documents.py (training) and demo/skills.py call this
module.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from demo.chats.fields import Field, draw_fields, listing, said_key
from demo.chats.thinking import asked_to_think, thinks
from demo.chats.tools import Call, Tool, call_of, draw_tool, other_fields, request
from demo.chats.turns import (
    calls_text,
    reply_turn,
    results_turn,
    system_turn,
    thought_text,
    user_turn,
)
from demo.data import (
    SYSTEM_PROMPT,
    FactSource,
    body,
    estimate_tokens,
    opposite_turn,
    sum_turn,
)
from demo.words import GREETINGS, WORDS, pick

NO_TOOL = "I have no tool for that."
# Tokens of JSON per token that `estimate_tokens` counts.
JSON_TOKENS = 1.25
TOOL_PROMPT = "You are a helpful assistant with tools."


@dataclass(frozen=True)
class Task:
    """A user's request, and the calls that fulfil it."""

    words: str
    calls: tuple[Call, ...]
    thought: tuple[str, str]


def draw_tools(rng: random.Random, most: int) -> list[Tool]:
    """Draws one to `most` tools, some of them similar."""
    tools: list[Tool] = []
    for _ in range(1 + int(rng.random() * most)):
        tools.append(draw_tool(rng, tools))
    return tools


def draw_task(rng: random.Random, tools: Sequence[Tool], num_calls: int) -> Task:
    """Draws a request for one or two calls. Two calls may use the same tool with other
    arguments."""
    words: list[str] = []
    calls: list[Call] = []
    for _ in range(num_calls):
        tool = pick(rng, tools)
        # New values each time, because one chat may use a tool often.
        fields = other_fields(rng, tool)
        call = call_of(tool, fields)
        if call not in calls:
            words.append(request(rng, tool, tools, fields, one_line=num_calls > 1))
            calls.append(call)
    names = listing([call.name for call in calls])
    keys = [key for call in calls for key in call.arguments]
    thought = (
        f"I call {names}.",
        f"The arguments are {listing(keys)}." if keys else "There are no arguments.",
    )
    return Task((" Also: " if rng.random() < 0.3 else " ").join(words), tuple(calls), thought)


def draw_result(rng: random.Random) -> tuple[str, str]:
    """Draws a tool's result as its message has it, and the sentence that reports it."""
    draw = rng.random()
    if draw < 0.08:
        return pick(rng, (('{"ok": true}', "It is done."), ("done", "It is done.")))
    if draw < 0.14:
        reason = f"{pick(rng, WORDS['item'])} not found"
        return json.dumps({"error": reason}), f"There was an error: {reason}."
    if draw < 0.26:
        text = pick(rng, (str(int(rng.random() * 1000)), pick(rng, WORDS["weather"])))
        return text, f"The result is {text}."
    fields = draw_fields(rng, 1 + int(rng.random() * 3))
    result = json.dumps({field.key: field.value for field in fields}, ensure_ascii=False)
    return result, report(fields)


def report(fields: Sequence[Field]) -> str:
    """Writes a sentence such as "The price is 12 and the color is red." """
    sentence = listing([f"the {said_key(field.key)} is {field.said}" for field in fields])
    return f"{sentence[0].upper()}{sentence[1:]}."


def other_exchange(rng: random.Random, tools: Sequence[Tool]) -> tuple[str, str]:
    """Draws a user's words that need no tool or a missing one, and the reply."""
    draw = rng.random()
    if draw < 0.3:
        missing = draw_tool(rng, tools)
        while any(missing.noun == t.noun or missing.verb == t.verb for t in tools):
            missing = draw_tool(rng)
        return request(rng, missing, [*tools, missing], missing.fields, one_line=False), NO_TOOL
    if draw < 0.55:
        text, stated = body(rng, FactSource(rng), 20 + int(rng.random() * 60), 0.4)
        fact = pick(rng, stated)
        return f"{text}\n{fact.question}", f"The answer is{fact.answer}"
    return pick(rng, GREETINGS) if draw < 0.7 else pick(rng, (sum_turn, opposite_turn))(rng)


def tool_chat(rng: random.Random, num_tokens: int) -> str:
    """Draws a chat of up to about `num_tokens` tokens and at least one exchange, without the
    leading <|bos|>."""
    tools = draw_tools(rng, max(1, min(4, num_tokens // 200)))
    content = pick(rng, ("", "", SYSTEM_PROMPT, TOOL_PROMPT))
    pieces = [system_turn(content, tools)]
    length = estimate_tokens(pieces[0]) * JSON_TOKENS
    while True:
        is_last = length + 150 > num_tokens or rng.random() < 0.15
        pieces += _exchange(rng, tools, is_last)
        length = sum(map(estimate_tokens, pieces)) * JSON_TOKENS
        if is_last:
            return "".join(pieces)


def _exchange(rng: random.Random, tools: Sequence[Tool], is_last: bool) -> list[str]:
    """Draws the turns from one user's words to the reply. The last exchange may end at a call and
    may have reasoning."""
    if rng.random() < 0.25:
        words, reply = other_exchange(rng, tools)
        return [user_turn(words), reply_turn(reply)]
    task = draw_task(rng, tools, 2 if rng.random() < 0.15 else 1)
    calls = calls_text(task.calls)
    if is_last and rng.random() < 0.5:
        if rng.random() < 0.4:
            words = asked_to_think(rng, task.words) if thinks(rng) else task.words
            return [user_turn(words), reply_turn(thought_text(task.thought) + calls)]
        return [user_turn(task.words), reply_turn(calls)]
    results = [draw_result(rng) for _ in task.calls]
    return [
        user_turn(task.words),
        reply_turn(calls),
        results_turn([result for result, _ in results]),
        reply_turn(" ".join(sentence for _, sentence in results)),
    ]
