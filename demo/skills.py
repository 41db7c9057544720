"""The measure of tools, drawn keys and reasoning: the prompts, and which answers are right.

Like demo/recall.py, this module needs no torch. demo/evaluate.py, demo/train.py and the tests call
it. It does not know who answers the prompts.
"""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from demo.chats.objects import draw_extraction, messages_of
from demo.chats.thinking import THINK_PHRASES, draw_thought
from demo.chats.tool_chat import TOOL_PROMPT, draw_result, draw_task, draw_tools
from demo.chats.turns import (
    calls_text,
    reply_turn,
    results_turn,
    system_turn,
    thought_text,
    user_turn,
)
from demo.data import ASSISTANT, SYSTEM_PROMPT
from demo.words import pick
from pdserve.text.answers.formats import CALL_FORMATS, REASONING_FORMATS
from pdserve.text.answers.parser import AnswerParser
from pdserve.text.answers.pieces import CallArguments, CallBegin, CallEnd, Content

TOOLS_THRESHOLD = 0.95
MAX_SKILL_TOKENS = 256


class SkillPrompt(NamedTuple):
    """A chat that the model must continue, and the right answer."""

    prompt: str  # as the template writes it, up to the place where the model continues
    answer: str  # without its <|end|>
    kind: str
    tools: tuple[dict[str, Any], ...] = ()  # the chat's tools in OpenAI's form
    schema: str = ""  # the JSON schema that the chat asks for, as text; "": none


def _tools_prompt(rng: random.Random) -> SkillPrompt:
    tools = draw_tools(rng, 4)
    task = draw_task(rng, tools, 2 if rng.random() < 0.15 else 1)
    system = system_turn(pick(rng, ("", SYSTEM_PROMPT, TOOL_PROMPT)), tools)
    numbers = "+".join(str(len(call.arguments)) for call in task.calls)
    return SkillPrompt(
        system + user_turn(task.words) + ASSISTANT,
        calls_text(task.calls),
        f"call of {numbers}",
        tools=tuple(tool.schema for tool in tools),
    )


def _result_prompt(rng: random.Random) -> SkillPrompt:
    tools = draw_tools(rng, 3)
    task = draw_task(rng, tools, 1)
    result, sentence = draw_result(rng)
    turns = [
        system_turn("", tools),
        user_turn(task.words),
        reply_turn(calls_text(task.calls)),
        results_turn([result]),
    ]
    return SkillPrompt("".join(turns) + ASSISTANT, sentence, "result")


def _object_prompt(rng: random.Random) -> SkillPrompt:
    drawn = draw_extraction(rng)
    system, words = messages_of(rng, drawn, may_use_system=True)
    kind = "schema" if drawn.schema else "keys" if drawn.keys else "all keys"
    return SkillPrompt(
        system_turn(system) + user_turn(words) + ASSISTANT, drawn.answer, kind, schema=drawn.schema
    )


def _thinking_prompt(rng: random.Random) -> SkillPrompt:
    thought = draw_thought(rng)
    words = f"{thought.question} {pick(rng, THINK_PHRASES)}"
    answer = thought_text(thought.lines) + thought.answer
    return SkillPrompt(user_turn(words) + ASSISTANT, answer, "thinking")


SKILLS: dict[str, Callable[[random.Random], SkillPrompt]] = {
    "tools": _tools_prompt,
    "results": _result_prompt,
    "objects": _object_prompt,
    "thinking": _thinking_prompt,
}


def skill_prompts(skill: str, seed: int, num_prompts: int) -> list[SkillPrompt]:
    """Draws prompts of one of SKILLS by this seed. Raises ValueError for another name."""
    if skill not in SKILLS:
        raise ValueError(f"skill is {skill!r}: use one of {', '.join(SKILLS)}")
    rng = random.Random(f"{skill} {seed}")
    return [SKILLS[skill](rng) for _ in range(num_prompts)]


def parse_answer(answer: str) -> tuple[str, list[tuple[str, Any]]]:
    """Returns the content and the complete calls (name, arguments as JSON) that a client would get.
    Raises ValueError if arguments are not JSON."""
    parser = AnswerParser(CALL_FORMATS["hermes"], REASONING_FORMATS["think"])
    content = ""
    names: list[str] = []
    arguments: list[str] = []
    calls: list[tuple[str, Any]] = []
    for piece in [*parser.push([answer]), *parser.finish()]:
        if isinstance(piece, Content):
            content += piece.text
        elif isinstance(piece, CallBegin):
            names.append(piece.name)
            arguments.append("")
        elif isinstance(piece, CallArguments):
            arguments[piece.index] += piece.text
        elif isinstance(piece, CallEnd):
            calls.append((names[piece.index], json.loads(arguments[piece.index])))
    return content, calls


def is_right(prompt: SkillPrompt, answer: str) -> bool:
    """True if an answer has the right content, calls and reasoning. The order of arguments and
    whitespace in JSON do not matter."""
    try:
        if prompt.answer.startswith("{"):
            return bool(json.loads(answer) == json.loads(prompt.answer))
        if prompt.kind == "thinking":
            return answer == prompt.answer
        return parse_answer(answer) == parse_answer(prompt.answer)
    except ValueError:
        return False
