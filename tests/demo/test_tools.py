"""Tools, requests, results and chats with tools: a seed names them, and what a request asks for is
what the call holds."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from demo.chats.fields import draw_fields, made_up_word
from demo.chats.objects import draw_extraction, messages_of, object_document
from demo.chats.thinking import THINK_PHRASES, draw_thought, thinking_chat
from demo.chats.tool_chat import draw_result, draw_task, draw_tools, report, tool_chat
from demo.chats.tools import NOUNS, Tool, call_of, draw_tool, other_fields, request
from demo.data import ASSISTANT, END, RESULT, THINK, THINK_END, USER
from demo.skills import SKILLS, is_right, parse_answer, skill_prompts
from pdserve.text.answers.formats import CALL_FORMATS, REASONING_FORMATS
from pdserve.text.answers.parser import AnswerParser
from pdserve.text.answers.pieces import Content, Reasoning

TURN = re.compile(r"<\|(system|user|assistant)\|>(.*?)<\|end\|>", re.DOTALL)


def said(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def schema_of(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = tool.schema["function"]
    return function


@pytest.mark.parametrize(
    "make", [object_document, thinking_chat, lambda rng: tool_chat(rng, 900), draw_tool]
)
def test_a_seed_names_its_text(make: Callable[[random.Random], Any]) -> None:
    assert make(random.Random(7)) == make(random.Random(7))
    assert len({str(make(random.Random(seed))) for seed in range(20)}) == 20


def test_names_are_drawn_not_fixed() -> None:
    rng = random.Random(0)
    tools = [draw_tool(rng) for _ in range(300)]
    assert len({tool.name for tool in tools}) > 270
    assert len({key for tool in tools for key in schema_of(tool)["parameters"]["properties"]}) > 150
    assert len({made_up_word(rng) for _ in range(1000)}) > 980


def test_the_tools_of_a_chat_differ() -> None:
    for seed in range(100):
        tools = draw_tools(random.Random(seed), 4)
        assert len({tool.name for tool in tools}) == len(tools)
        assert len({(tool.verb, tool.noun) for tool in tools}) == len(tools)


def test_a_schema_declares_the_arguments_by_type() -> None:
    types = {"string": str, "integer": int, "number": float, "boolean": bool}
    for seed in range(200):
        rng = random.Random(seed)
        tool = draw_tool(rng)
        parameters = schema_of(tool)["parameters"]
        call = call_of(tool, other_fields(rng, tool))
        assert list(call.arguments) == [
            key for key in parameters["properties"] if key in call.arguments
        ]
        assert set(parameters.get("required", call.arguments)) == set(call.arguments)
        assert len(call.arguments) <= 3
        for key, value in call.arguments.items():
            assert type(value) is types[parameters["properties"][key]["type"]]


def test_a_request_names_every_value_and_its_tool() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        tools = draw_tools(rng, 4)
        tool = tools[0]
        fields = other_fields(rng, tool)
        words = request(rng, tool, tools, fields, one_line=False)
        assert all(said(field.value) in words for field in fields)
        assert tool.name in words or (tool.noun in words)
        asked = words.lower()
        if tool.name not in words and f"{tool.verb} the {tool.noun}" not in asked:
            assert asked.startswith(("what is the", "what's the", "tell me the"))
            assert [other.noun for other in tools].count(tool.noun) == 1


def test_a_tool_that_nothing_describes_is_asked_for_by_name() -> None:
    """A made-up noun has other tokens in a name than after a space, so words would not do."""
    num_seen = 0
    for seed in range(1000):
        rng = random.Random(seed)
        tool = draw_tool(rng)
        if not tool.is_described and tool.noun not in NOUNS and " " not in tool.noun:
            num_seen += 1
            assert tool.name in request(rng, tool, [tool], tool.fields, one_line=False)
    assert num_seen > 10


def test_two_calls_of_a_task_differ() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        task = draw_task(rng, draw_tools(rng, 2), 2)
        assert len(task.calls) in (1, 2)
        assert len(task.calls) == 1 or task.calls[0] != task.calls[1]


def test_a_report_says_every_value_of_a_result() -> None:
    for seed in range(100):
        fields = draw_fields(random.Random(seed), 3)
        sentence = report(fields)
        assert all(field.said in sentence for field in fields) and sentence.endswith(".")


def test_a_result_is_reported_by_its_values() -> None:
    for seed in range(200):
        result, answer = draw_result(random.Random(seed))
        values = json.loads(result).values() if result.startswith("{") else [result]
        if answer != "It is done.":
            assert all(said(value) in answer for value in values)


def test_a_chat_alternates_and_answers_its_results() -> None:
    num_results = num_calls = 0
    for seed in range(60):
        text = tool_chat(random.Random(seed), 1500)
        turns = TURN.findall(text)
        assert "".join(f"<|{role}|>{content}{END}" for role, content in turns) == text
        roles = [role for role, _ in turns]
        assert roles == ["system"] + ["user", "assistant"] * (len(roles) // 2)
        num_results += text.count(f"{USER}{RESULT}")
        for _, content in turns[2::2]:
            num_calls += len(parse_answer(content)[1])
    assert num_results > 60 and num_calls > num_results


def test_reasoning_stands_only_in_the_last_reply() -> None:
    num_seen = 0
    for seed in range(200):
        text = tool_chat(random.Random(seed), 600)
        replies = text.split(ASSISTANT)[1:]
        assert not any(THINK in reply for reply in replies[:-1])
        if THINK in replies[-1]:
            num_seen += 1
            assert replies[-1].startswith(f"{THINK}\n")
            assert replies[-1].partition(THINK_END)[0].count("\n") == 3
    assert num_seen > 5


def test_thoughts_hold_the_answer_and_parse_as_reasoning() -> None:
    for seed in range(50):
        thought = draw_thought(random.Random(seed))
        assert not any(phrase in thought.question for phrase in THINK_PHRASES)
        (p,) = skill_prompts("thinking", seed, 1)
        parser = AnswerParser(CALL_FORMATS["hermes"], REASONING_FORMATS["think"])
        pieces = [*parser.push([p.answer]), *parser.finish()]
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        assert len(reasoning.splitlines()) == 2 and len(content.splitlines()) == 1
        assert content.rstrip(".").split()[-1] in reasoning


def test_objects_hold_what_the_text_says() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        drawn = draw_extraction(rng)
        values = json.loads(drawn.answer)
        system, words = messages_of(rng, drawn, may_use_system=True)
        assert not drawn.keys or tuple(values) == drawn.keys
        assert all(key in system + words for key in drawn.keys)
        if drawn.schema:
            assert tuple(json.loads(drawn.schema)["properties"]) == drawn.keys
        for value in values.values():
            for part in value if isinstance(value, list) else [value]:
                assert said(part) in drawn.text


@pytest.mark.parametrize("skill", SKILLS)
def test_only_the_right_answer_is_right(skill: str) -> None:
    prompts = skill_prompts(skill, 5, 40)
    assert prompts == skill_prompts(skill, 5, 40)
    assert prompts != skill_prompts(skill, 6, 40)
    for i, p in enumerate(prompts):
        assert p.prompt.endswith(ASSISTANT) and is_right(p, p.answer)
        assert not is_right(p, p.answer[:-2]) and not is_right(p, "")
        other = prompts[i - 1].answer
        assert is_right(p, other) == (other == p.answer)


def test_the_order_of_arguments_does_not_count() -> None:
    p = next(p for p in skill_prompts("tools", 0, 40) if p.kind == "call of 2")
    ((name, arguments),) = parse_answer(p.answer)[1]
    turned = json.dumps(dict(reversed(arguments.items())))
    assert is_right(p, f'<tool_call>{{"name": "{name}", "arguments": {turned}}}</tool_call>')
    assert not is_right(
        p, f'Yes. <tool_call>{{"name": "{name}", "arguments": {turned}}}</tool_call>'
    )


def test_an_unknown_skill_is_refused() -> None:
    with pytest.raises(ValueError, match="skill is 'chess'"):
        skill_prompts("chess", 0, 1)
