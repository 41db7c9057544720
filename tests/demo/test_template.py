"""The chat template: what it writes for tools, calls, results and reasoning is what the model was
trained on, for both renderers, and the answer parsers find its formats."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from demo.chats.tool_chat import draw_task, draw_tools
from demo.chats.tools import Call
from demo.chats.turns import calls_text, reply_turn, results_turn, system_turn, user_turn
from demo.data import ASSISTANT, BOS, END, SYSTEM, USER
from demo.tokenizer import CHAT_TEMPLATE, DELIMITERS, SPECIAL_TOKENS
from pdserve.text.answers.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    delimiter_tokens,
    format_of,
    reasoning_format_of,
)
from pdserve.text.chat_template import ChatTemplate

SHIPPED = Path(__file__).parents[2] / "demo" / "pdserve-demo"
SERVED = ChatTemplate((SHIPPED / "chat_template.jinja").read_text())
AUTO: Any = AutoTokenizer.from_pretrained(SHIPPED)
HELLO = {"role": "user", "content": "Hello!"}


def rendered(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    is_prompt: bool = False,
    **variables: Any,
) -> str:
    """By both renderers, which must agree; without the leading <|bos|>."""
    served = SERVED.render(messages, is_prompt, tools, {"bos_token": BOS, **variables})
    auto: str = AUTO.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=is_prompt, **variables
    )
    assert served == auto and served.startswith(BOS)
    return served.removeprefix(BOS)


def message_of(calls: tuple[Call, ...], content: str | None = None) -> dict[str, Any]:
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    calls_of = [{"id": "x", "type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": content, "tool_calls": calls_of}


def result(content: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": "x", "content": content}


@pytest.mark.parametrize("role", [None, "system", "developer"])
@pytest.mark.parametrize("num_calls", [1, 2])
def test_a_chat_with_tools_renders_the_training_format(role: str | None, num_calls: int) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        tools = draw_tools(rng, 4)
        task = draw_task(rng, tools, num_calls)
        system = "Be brief." if role else ""
        messages = [{"role": role, "content": system}] if role else []
        messages += [
            {"role": "user", "content": task.words},
            message_of(task.calls),
            result('{"a": "é<b>"}'),
            result("done"),
            {"role": "assistant", "content": "It is done."},
        ]
        trained_on = [
            system_turn(system, tools),
            user_turn(task.words),
            reply_turn(calls_text(task.calls)),
            results_turn(['{"a": "é<b>"}', "done"]),
            reply_turn("It is done."),
        ]
        assert rendered(messages, [tool.schema for tool in tools]) == "".join(trained_on)


def test_arguments_may_come_as_text() -> None:
    """OpenAI's clients send a call's arguments as a JSON string."""
    message = message_of((Call("f", {"city": "Oakdale"}),))
    text = json.loads(json.dumps(message))
    text["tool_calls"][0]["function"]["arguments"] = '{"city": "Oakdale"}'
    assert rendered([HELLO, text]) == rendered([HELLO, message])


def test_content_before_a_call_has_a_line_of_its_own() -> None:
    call = Call("f", {})
    expected = f"{USER}Hello!{END}{ASSISTANT}I look.\n{calls_text([call])}{END}"
    assert rendered([HELLO, message_of((call,), "I look.")]) == expected


def test_an_empty_system_message_leaves_the_tools_alone() -> None:
    tools = draw_tools(random.Random(0), 1)
    empty = {"role": "system", "content": ""}
    schemas = [tool.schema for tool in tools]
    assert rendered([empty, HELLO], schemas) == rendered([HELLO], schemas)


def test_a_later_system_message_is_a_turn_without_tools() -> None:
    tools = draw_tools(random.Random(0), 1)
    text = rendered([HELLO, {"role": "developer", "content": "Stop."}], [tools[0].schema])
    assert text == system_turn("", tools) + user_turn("Hello!") + f"{SYSTEM}Stop.{END}"


def test_reasoning_is_opened_only_when_asked_for() -> None:
    prompt = rendered([HELLO], is_prompt=True)
    assert prompt.endswith(ASSISTANT)
    assert rendered([HELLO], is_prompt=True, enable_thinking=False) == prompt
    opened = rendered([HELLO], is_prompt=True, enable_thinking=True)
    assert opened == prompt + "<think>\n"
    assert REASONING_FORMATS["think"].is_open_after(opened)
    assert not REASONING_FORMATS["think"].is_open_after(prompt)


def test_old_reasoning_is_left_out() -> None:
    thought = {"role": "assistant", "content": "<think>\nI think.\n</think>\n\nHi."}
    assert rendered([HELLO, thought]) == rendered([HELLO, {"role": "assistant", "content": "Hi."}])


def test_unknown_roles_are_refused() -> None:
    with pytest.raises(TemplateError, match="'critic'"):
        AUTO.apply_chat_template([{"role": "critic", "content": "x"}], tokenize=False)
    with pytest.raises(ValueError, match="'critic'"):
        SERVED.render([{"role": "critic", "content": "x"}], False, None, {"bos_token": BOS})


def test_the_answer_parsers_find_the_formats() -> None:
    assert format_of(CHAT_TEMPLATE, SPECIAL_TOKENS) == "hermes"
    assert reasoning_format_of(CHAT_TEMPLATE, SPECIAL_TOKENS) == "think"
    found = delimiter_tokens(CALL_FORMATS["hermes"], REASONING_FORMATS["think"], SPECIAL_TOKENS)
    assert found == set(DELIMITERS) - {"<tool_response>", "</tool_response>"}
