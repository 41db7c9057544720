"""Requests of /v1/messages: what of a conversation reaches the model, and what is refused, with the
field that Anthropic's clients sent and a cure."""

import re
from pathlib import Path
from typing import Any

import pytest
from router.harness import MODEL, Harness
from router.messages_client import ASK, BODY, CLOCK, COUNT, PATH, TOOLS, WEATHER, whole
from router.turn_models import HERMES, Say, tokenizer_of

from pdserve.turns.model_turns import ModelTurns

ROOT = Path(__file__).parent.parent.parent


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value} | more


def call(call_id: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "clock", "input": given}


def result(call_id: str, content: Any = "noon", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content} | more


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


async def prompt_of(harness: Harness, **fields: Any) -> str:
    """The prompt that a worker got."""
    await whole(harness, **fields)
    ids = harness.prefills[0].submits()[-1].prompt_token_ids
    found: str = harness.tokenizer.decode(ids, skip_special_tokens=False)
    return found


async def test_a_conversation_reaches_the_template(say: Say) -> None:
    harness = await say("x")
    cached = {"cache_control": {"type": "ephemeral"}}
    thoughts = {"type": "thinking", "thinking": "I look", "signature": "abc"}
    hidden = {"type": "redacted_thinking", "data": "opaque"}
    messages = [
        user(text("a", **cached), text("b", citations=None)),
        {"role": "user", "content": "c"},
        assistant(thoughts, hidden, text("Well."), call("c1", a=1)),
        assistant(call("c2") | {"caller": {"type": "direct"}}),
        user(
            result("c2", [text("late"), text("night")], is_error=True, **cached),
            result("c1", None),
        ),
        user(text("And now?")),
    ]
    shown = await prompt_of(
        harness,
        system=[text("Be brief."), text("Be kind.", **cached)],
        messages=messages,
        tools=[CLOCK | cached | {"type": "custom", "strict": False}, WEATHER],
        metadata={"user_id": "x"},
        service_tier="auto",
        output_config={"effort": "low"},
    )
    first, _, rest = shown.partition("<tool_call>{")
    function = '{"name": "clock", "parameters": {"type": "object"}, "strict": false}'
    assert f'{{"type": "function", "function": {function}}}' in first
    assert '"description": "The weather of a place."' in first
    assert rest.partition("<|im_end|>\n")[2] == (
        "<|im_start|>system\nBe brief.\nBe kind.<|im_end|>\n"
        "<|im_start|>user\na\nb\nc<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nI look\n</think>\n\nWell."
        '<tool_call>clock {"a": 1}</tool_call><tool_call>clock {}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nError: late\nnight<|im_end|>\n"
        "<|im_start|>tool\n<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n(low)"
    )


async def test_a_system_message_stands_where_it_was_sent(say: Say) -> None:
    harness = await say("x")
    shown = await prompt_of(harness, messages=[*ASK, {"role": "system", "content": "Now brief."}])
    assert "<|im_start|>system\nNow brief.<|im_end|>\n<|im_start|>assistant\n" in shown


async def test_what_a_client_was_answered_goes_back_as_it_is(say: Say) -> None:
    harness = await say(
        "<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n"
        '{"name": "clock", "arguments": {"a": 1}}\n</tool_call>'
    )
    message = await whole(harness, tools=TOOLS)
    [called] = [block for block in message["content"] if block["type"] == "tool_use"]
    back = {"role": "assistant", "content": message["content"]}
    messages = [*ASK, back, user(result(called["id"]))]
    shown = await prompt_of(harness, messages=messages, tools=TOOLS)
    assert (
        '<think>\nHm.\n</think>\n\nI look.<tool_call>clock {"a": 1}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nnoon<|im_end|>"
    ) in shown


@pytest.mark.parametrize("begun", ["It is", "It is  ", [text("It is")]])
async def test_the_assistants_last_message_is_continued(say: Say, begun: Any) -> None:
    harness = await say(" raining.")
    messages = [*ASK, {"role": "assistant", "content": begun}]
    shown = await prompt_of(harness, messages=messages)
    assert shown.endswith("<|im_start|>assistant\n" + (begun if type(begun) is str else "It is"))
    message = await whole(harness, messages=messages)
    assert message["content"] == [{"type": "text", "text": " raining."}]


async def test_an_empty_last_message_begins_the_answer(say: Say) -> None:
    harness = await say("<think>a</think>b")
    for begun in (assistant(), assistant(text("")), {"role": "assistant", "content": ""}):
        messages = [*ASK, begun]
        message = await whole(harness, messages=messages, thinking={"type": "adaptive"})
        assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    thought = assistant({"type": "thinking", "thinking": "Hm.", "signature": ""})
    shown = await prompt_of(harness, messages=[*ASK, thought])
    assert shown.endswith("<|im_start|>assistant\n<think>\nHm.\n</think>\n\n")


async def test_thinking_switches_the_templates_reasoning(say: Say) -> None:
    harness = await say("It may rain.\n</think>\n\nYes.")
    for kind, is_open in (("adaptive", True), ("disabled", False)):
        shown = await prompt_of(harness, thinking={"type": kind})
        assert shown.endswith("assistant\n<think>\n") is is_open
    assert (await prompt_of(harness)).endswith("assistant\n")
    message = await whole(harness, thinking={"type": "enabled", "budget_tokens": 20})
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    rules = harness.prefills[0].submits()[-1].sampling.logit_rules
    [end] = harness.tokenizer.encode("</think>", add_special_tokens=False)
    assert rules == {"thinking_budget": {"tokens": 20, "end": [end], "start": None}}
    fields = {"chat_template_kwargs": {"enable_thinking": True}}
    assert (await prompt_of(harness, **fields)).endswith("<think>\n")


async def test_templates_that_name_the_switch_otherwise(say: Say) -> None:
    template = HERMES.replace("enable_thinking", "thinking")
    harness = await say("x", tokenizer=tokenizer_of(template, "<think>", "</think>"))
    assert (await prompt_of(harness, thinking={"type": "adaptive"})).endswith("<think>\n")
    closed = await prompt_of(harness, thinking={"type": "disabled"})
    assert closed.endswith("<think>\n\n</think>\n\n")
    fixed = (
        template.replace("{% if thinking %}", "{% if false %}")
        .replace("{% if thinking is false %}", "{% if false %}")
        .replace("{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}", "")
    )
    blind = await say("x", tokenizer=tokenizer_of(fixed, "<think>", "</think>"))
    fields = {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}
    assert (await prompt_of(blind, **fields)).endswith("assistant\n")


async def test_the_demo_models_template(say: Say) -> None:
    template = (ROOT / "demo" / "pdserve-demo" / "chat_template.jinja").read_text()
    harness = await say("x", tokenizer=tokenizer_of(template, "<think>", "</think>"))
    assert (await prompt_of(harness, thinking={"type": "adaptive"})).endswith("<think>\n")
    assert (await prompt_of(harness, thinking={"type": "disabled"})).endswith("<|assistant|>")
    messages = [*DEEP, assistant(text("Noon")), user(text("Thanks."))]
    shown = await prompt_of(harness, messages=messages, tools=[CLOCK], system="Be brief.")
    assert "<|system|>Be brief.\n\nYou may call these functions:" in shown
    assert "<tool_response>\nnoon\n</tool_response>" in shown
    prefilled = await prompt_of(harness, messages=[*ASK, assistant(text("It is"))])
    assert prefilled.endswith("<|assistant|>It is")


async def test_how_tokens_are_drawn(say: Say) -> None:
    harness = await say("x")
    fields = {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3},
        **{"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3},
        **{"stop_token_ids": [4], "min_tokens": 1, "logit_bias": {"5": 1.0}},
    }
    await whole(harness, **fields, priority=3, cache_salt="s", max_tokens=5)
    submit = harness.prefills[0].submits()[-1]
    for name, value in fields.items():
        found = getattr(submit.sampling, name)
        want = {5: 1.0} if name == "logit_bias" else value
        assert (list(found) if name == "stop_token_ids" else found) == want
    assert submit.priority == 3 and submit.sampling.n == 1
    await whole(harness, logit_rules={"allowed_token_ids": [8, 9]})
    assert harness.prefills[0].submits()[-1].sampling.logit_rules == {"allowed_token_ids": [8, 9]}
    await whole(harness, allowed_token_ids=[8, 9], bad_words=["x"])
    rules = harness.prefills[0].submits()[-1].sampling.logit_rules
    assert set(rules) == {"allowed_token_ids", "bad_words"}


async def test_what_the_model_does_by_itself_is_its_generation_config(say: Say) -> None:
    harness = await say("x")
    harness.service.sampling_defaults = {"temperature": 0.25, "top_k": 9}
    await whole(harness, top_k=3)
    sampling = harness.prefills[0].submits()[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.25, 3, 400)


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "x"}}
DEEP = [*ASK, assistant(text("x"), call("c1")), user(result("c1"))]

# change of the body; how the error's message begins; what it says too
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "required"),
    ({"model": "other"}, "model: the model 'other'", MODEL),
    ({"messages": None}, "messages", "required"),
    ({"max_tokens": None}, "max_tokens", "required"),
    ({"max_tokens": 0}, "max_tokens must be", "[1, "),
    ({"max_tokens": "9"}, "max_tokens", "int"),
    ({"messages": []}, "messages is empty", "at least one"),
    ({"messages": "x"}, "messages", "array"),
    ({"messages": [*ASK, 3]}, "messages[1] must be", "role and content"),
    ({"messages": [*ASK] * 4097}, "messages must hold at most 4096", "leave out"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "user, assistant"),
    ({"messages": [{"role": "user"}]}, "messages[0].content must", "list of blocks"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content must", "list of blocks"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name", "leave"),
    ({"messages": [user("x")]}, "messages[0].content[0] must", "type"),
    ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text must", "string"),
    ({"messages": [user(text("x", foo=1))]}, "messages[0].content[0].foo", "leave it out"),
    ({"messages": [user(text("x"), IMAGE)]}, "messages[0].content[1] has", "describe the image"),
    ({"messages": [user(DOCUMENT)]}, "messages[0].content[0] has", "document's text"),
    ({"messages": [user(call("c"))]}, "messages[0].content[0] has type 'tool_use'", "tool_result"),
    ({"messages": [*ASK, assistant(result("c"))]}, "messages[1].content[0] has", "tool_use"),
    ({"messages": [{"role": "system", "content": [IMAGE]}]}, "messages[0].content[0]", "text"),
    (
        {"messages": [*ASK, assistant({"type": "thinking", "thinking": 3})]},
        "messages[1].content[0].thinking",
        "string",
    ),
    (
        {"messages": [*ASK, assistant(text("x"), {"type": "server_tool_use", "id": "x"})]},
        "messages[1].content[1] has type 'server_tool_use'",
        "tool_use",
    ),
    (
        {"messages": [*ASK, assistant(call("c") | {"input": "{}"})]},
        "messages[1].content[0].input must be an object",
        "'{}'",
    ),
    ({"messages": [*ASK, assistant(call("c") | {"name": ""})]}, "messages[1].content[0].name", ""),
    ({"messages": [*ASK, assistant(call(""))]}, "messages[1].content[0].id", "id of the call"),
    ({"messages": [*ASK, assistant(call("c"))]}, "messages[1].content[0]: tool_use 'c'", "result"),
    ({"messages": [*DEEP[:2], *ASK]}, "messages[1].content[1]: tool_use 'c1'", "tool_result"),
    (
        {"messages": [*DEEP, assistant(call("c1")), user(result("c1"))]},
        "messages[3].content[0].id 'c1'",
        "twice",
    ),
    ({"messages": [user(result("c9"))]}, "messages[0].content[0].tool_use_id 'c9'", "names no"),
    (
        {"messages": [*DEEP, user(result("c1"))]},
        "messages[3].content[0].tool_use_id 'c1'",
        "one tool_result",
    ),
    (
        {"messages": [*DEEP[:2], user(text("x"), result("c1"))]},
        "messages[2].content[1]: a tool_result must stand before",
        "move it up",
    ),
    (
        {"messages": [*DEEP[:2], user(result("c1", [text("x"), IMAGE]))]},
        "messages[2].content[0].content[1]",
        "describe the image",
    ),
    (
        {"messages": [*DEEP[:2], user(result("c1", is_error="no"))]},
        "messages[2].content[0].is_error",
        "true or false",
    ),
    ({"system": 3}, "system must be", "list of blocks"),
    ({"system": [IMAGE]}, "system[0] has type 'image'", "describe"),
    ({"tools": [3]}, "tools[0] must be", "input_schema"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema must", "JSON schema"),
    ({"tools": [CLOCK | {"name": "a b"}]}, "tools[0].name must", "without spaces"),
    ({"tools": [CLOCK | {"name": None}]}, "tools[0].name must", "characters"),
    ({"tools": [CLOCK, CLOCK]}, "tools[1].name 'clock'", "twice"),
    ({"tools": [CLOCK | {"description": 3}]}, "tools[0].description", "string"),
    ({"tools": [CLOCK | {"strict": True}]}, "tools[0].strict must be enforced", "leave strict"),
    ({"tools": [CLOCK | {"strict": 3}]}, "tools[0].strict must be", "true or false"),
    ({"tools": [CLOCK | {"defer_loading": True}]}, "tools[0].defer_loading", "leave it out"),
    ({"tools": [CLOCK | {"input_examples": [{}]}]}, "tools[0].input_examples", "description"),
    ({"tools": [CLOCK | {"foo": 1}]}, "tools[0].foo", "leave it out"),
    ({"tools": [CLOCK] * 257}, "tools must hold at most 256", "257"),
    (
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        "tools[0].type 'bash_20250124'",
        "describe yours",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools[0] has the form of chat completions",
        "input_schema",
    ),
    ({"tool_choice": "auto"}, "tool_choice must be", "{'type': 'auto'}"),
    ({"tool_choice": {"type": "one"}}, "tool_choice must be", "{'type': 'any'}"),
    ({"tool_choice": {"type": "any"}, "tools": None}, "tool_choice is only", "send tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice 'any' must be enforced", "{'type': 'auto'}"),
    (
        {"tool_choice": {"type": "tool", "name": "clock"}},
        "tool_choice 'tool' must be enforced",
        "{'type': 'auto'}",
    ),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "name of a tool"),
    ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'", "clock"),
    ({"tool_choice": {"type": "auto", "name": "clock"}}, "tool_choice.name", "leave it out"),
    (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
        "tool_choice.disable_parallel_tool_use",
        "true or false",
    ),
    ({"thinking": "yes"}, "thinking must be", "budget_tokens"),
    ({"thinking": {"type": "between_tools"}}, "thinking must be", "adaptive"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens must", "[1, "),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens must", "[1, "),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 400}},
        "thinking.budget_tokens (400) must be less than max_tokens (400)",
        "raise max_tokens",
    ),
    ({"thinking": {"type": "disabled", "display": "omitted"}}, "thinking.display", "leave"),
    ({"thinking": {"type": "adaptive", "display": "x"}}, "thinking.display", "omitted"),
    (
        {
            "thinking": {"type": "adaptive"},
            "chat_template_kwargs": {"enable_thinking": True},
        },
        "chat_template_kwargs.enable_thinking",
        "one of them",
    ),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs must not", "server"),
    (
        {
            "messages": [*ASK, {"role": "assistant", "content": "It"}],
            "thinking": {"type": "enabled", "budget_tokens": 5},
        },
        "thinking cannot be enabled",
        "end messages with a user's",
    ),
    ({"output_config": 3}, "output_config must be", "effort"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort", "low"),
    ({"output_config": {"task_budget": {}}}, "output_config.task_budget", "leave it out"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format must", "json_schema"),
    (
        {"output_config": {"format": {"type": "json_schema"}}},
        "output_config.format.schema is missing",
        "send the JSON schema",
    ),
    ({"output_format": {"type": "json"}}, "output_format must", "json_schema"),
    (
        {"output_format": {}, "output_config": {"format": {}}},
        "output_format and output_config.format",
        "one of them",
    ),
    ({"stop_sequences": "x"}, "stop_sequences", "array"),
    ({"stop_sequences": [""]}, "stop_sequences must be", "non-empty"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences must hold at most 64", "send fewer"),
    ({"temperature": -1}, "temperature must be", "[0, "),
    ({"top_p": 0}, "top_p must be", "(0, "),
    ({"top_k": -2}, "top_k must be", "[-1, "),
    ({"allowed_token_ids": [8], "logit_rules": {"allowed_token_ids": [8]}}, "logit_rules.", "one"),
    ({"container": "x"}, "container is not supported", "leave it out"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported", "yourself"),
    ({"context_management": {"edits": [{}]}}, "context_management is not supported", "shorten"),
    ({"thread": {"type": "create"}}, "thread is not supported", "all messages"),
    ({"stop": ["x"]}, "stop is not supported", "send stop_sequences"),
    ({"thinking_token_budget": 5}, "thinking_token_budget is not supported", "budget_tokens"),
    (
        {"structured_outputs": {"json": {}}},
        "structured_outputs is not",
        "output_config with format",
    ),
    ({"guided_json": {}}, "guided_json is not supported", "output_config with format"),
    ({"guided_regex": "a"}, "guided_regex is not supported", "/v1/chat/completions"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls is not", "disable_parallel_tool_use"),
    ({"include_reasoning": False}, "include_reasoning is not supported", "display omitted"),
    ({"n": 2}, "n is not supported", "several times"),
    ({"max_completion_tokens": 2}, "max_completion_tokens is not supported", "max_tokens"),
    ({"response_format": {"type": "text"}}, "response_format is not", "output_config"),
    ({"reasoning_effort": "low"}, "reasoning_effort is not supported", "effort"),
    ({"logprobs": True}, "logprobs is not supported", "/v1/chat/completions"),
    ({"temprature": 1}, "temprature is not supported", "did you mean temperature?"),
]


@pytest.mark.parametrize(("change", "begins", "says"), BAD)
async def test_wrong_input_is_named_with_the_cure_before_any_work(
    say: Say, change: dict[str, Any], begins: str, says: str
) -> None:
    harness = await say("x")
    body = {k: v for k, v in (BODY | {"tools": TOOLS} | change).items() if v is not None}
    for stream in (False, True):
        answer = await harness.http().post(PATH, json=body | {"stream": stream})
        found = answer.json()
        assert answer.status_code == (404 if change == {"model": "other"} else 400), found
        assert set(found) == {"type", "error", "request_id"} and found["type"] == "error"
        assert found["request_id"] == answer.headers["request-id"]
        kinds = {400: "invalid_request_error", 404: "not_found_error"}
        error = found["error"]
        assert error["type"] == kinds[answer.status_code]
        assert error["message"].startswith(begins) and says in error["message"], error["message"]
        assert not re.search(r"parameters|\.function|\btool_calls|required'", error["message"])
    assert not harness.prefills[0].submits() and not harness.decodes[0].submits()
    if not {"max_tokens", "stream"} & set(change) and answer.status_code == 400:
        shown = {name: value for name, value in body.items() if name != "max_tokens"}
        assert (await harness.http().post(COUNT, json=shown)).status_code == 400 or (
            change.get("thinking", {}).get("budget_tokens") == 400
        )
    assert harness.service.admission.num_prompts == 0


async def test_a_thread_is_refused_so_that_clients_go_on_without(say: Say) -> None:
    harness = await say("x")
    answer = await harness.http().post(PATH, json=BODY | {"thread": {"type": "create"}})
    details = answer.json()["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": []}


@pytest.mark.parametrize("name", ["max_tokens", "stream", "temperature", "stop_sequences", "seed"])
async def test_counting_takes_nothing_that_does_not_count(say: Say, name: str) -> None:
    harness = await say("x")
    body = {"model": MODEL, "messages": ASK, name: True}
    answer = await harness.http().post(COUNT, json=body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.startswith(f"{name} is not supported")
    assert "leave it out" in message


async def test_what_asks_for_nothing_is_taken(say: Say) -> None:
    harness = await say("x")
    nothing = {
        **{"cache_control": {"type": "ephemeral"}, "inference_geo": "eu", "speed": "standard"},
        **{"container": None, "mcp_servers": [], "context_management": {"edits": []}},
        **{"diagnostics": None, "service_tier": "standard_only", "tools": [], "thinking": None},
    }
    tool = CLOCK | {"allowed_callers": ["direct"], "input_examples": [], "defer_loading": False}
    tool |= {"type": None, "eager_input_streaming": True}
    for body in (nothing, {"tools": [tool]}, {"tool_choice": {"type": "none"}}):
        answer = await harness.http().post(PATH, json=BODY | body)
        assert answer.status_code == 200, answer.text


async def test_a_model_that_cannot_do_it_says_so_in_this_apis_words(say: Say) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    harness = await say("x", tokenizer=tokenizer_of(plain))
    for fields, begins in (
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens: "),
        ({"tools": TOOLS}, "tools: the model's chat template does not show them"),
    ):
        answer = await harness.http().post(PATH, json=BODY | fields)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["message"].startswith(begins)
        shown = {k: v for k, v in (BODY | fields).items() if k != "max_tokens"}
        counted = await harness.http().post(COUNT, json=shown)
        assert counted.status_code == 400 and counted.json()["error"] == error
    hidden = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    blind = await say("x", tokenizer=tokenizer_of(hidden))
    prefilled = [*ASK, {"role": "assistant", "content": "It"}]
    answer = await blind.http().post(PATH, json=BODY | {"messages": prefilled})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.startswith("messages: ")
    assert message.endswith("end messages with a user's message")
    harness.service.turns = ModelTurns(harness.tokenizer, "hermes")


async def test_a_long_body_is_measured_before_it_is_decoded(say: Say) -> None:
    harness = await say("x", max_prompt_tokens=100)
    long = "word " * 100_000
    for fields in ({"system": long}, {"messages": [user(text(long))]}):
        answer = await harness.http().post(PATH, json=BODY | fields)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and message.startswith(next(iter(fields)))
        assert "router.max_prompt_tokens" in message or "shorten" in message
