"""Tools and reasoning in /v1/chat/completions: what OpenAI's client sees of answers that the test
writes, streamed and whole."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from router.fake_worker import FakeWorker
from router.harness import MODEL, Harness, until
from router.turn_models import (
    CHAT,
    CLOCK,
    HERMES,
    MESSAGES,
    MISTRAL,
    WEATHER,
    Say,
    make_speak,
    message_of,
    some_at_once,
    streamed,
    tokenizer_of,
    whole,
    without_ids,
)
from text.answers.support import WRITERS

from pdserve.text.grammars.checker import shared_checker
from pdserve.text.tokenizer import Tokenizer
from pdserve.turns.model_turns import ModelTurns

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nIt may rain.\n</think>\n\n"


async def test_a_call_as_openais_client_reads_it(say: Say) -> None:
    harness = await say(THOUGHT + "Let me look.\n" + CALL + "\n" + SECOND)
    answer = await harness.openai().chat.completions.create(**CHAT)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    assert choice.message.tool_calls is not None
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name) == ("function", "get_weather")
    assert json.loads(first.function.arguments) == {"city": "Köln"}
    assert (second.function.name, second.function.arguments) == ("clock", "{}")
    assert first.id.startswith("call_") and first.id != second.id
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning"] == "It may rain."
    assert choice.message.model_extra["reasoning_content"] == "It may rain."


async def test_a_message_of_calls_alone_has_no_content(say: Say) -> None:
    harness = await say(CALL)
    [choice] = (await whole(harness))["choices"]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    assert "reasoning" not in choice["message"]
    message, reason = message_of(await streamed(harness))
    assert "content" not in message and reason == "tool_calls"
    assert without_ids(message) == without_ids(choice["message"])


async def test_arguments_stream_in_pieces_behind_the_name(say: Say) -> None:
    harness = await say("I look. " + CALL)
    chunks = await streamed(harness)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert calls[0].function.name == "get_weather" and calls[0].function.arguments == ""
    assert len(calls) > 4 and all(call.function.name is None for call in calls[1:])
    assert chunks[-1].choices[0].delta.tool_calls is None, "the reason comes in a delta of its own"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("name", [name for name in WRITERS if "llama" not in name])
async def test_the_stream_equals_the_whole_however_tokens_come(
    say: Say, name: str, has_tokens: bool
) -> None:
    form, write = WRITERS[name]
    rng = random.Random(name)
    texts = ["", "Ich schaue nach: ", "a < b [x] {y} </ 🙂 "]
    answers = []
    for _ in range(4):
        arguments = json.dumps({"city": rng.choice('äß🙂<{["') * rng.randint(1, 9), "n": 7})
        calls = [("get_weather", arguments)] * rng.randint(1, 3)
        answers.append(rng.choice(texts) + write(calls))
    plain = tokenizer_of(HERMES)
    turns = ModelTurns(plain, form, "none")
    assert turns.calls is not None
    if has_tokens:
        plain = tokenizer_of(HERMES, *turns.calls.form.tokens, special=True)
        turns = ModelTurns(plain, form, "none")
    harness = await say(*answers, tokenizer=plain)
    harness.service.turns = turns
    whole_answer = await whole(harness, n=4)
    expected = [without_ids(choice["message"]) for choice in whole_answer["choices"]]
    assert all(message["tool_calls"] for message in expected)
    for seed in range(3):
        for worker in harness.world.workers.values():
            worker.tokens_at_once = some_at_once(seed)
        chunks = await streamed(harness, n=4)
        for index in range(4):
            message, reason = message_of(chunks, index)
            assert without_ids(message) == expected[index] and reason == "tool_calls"
            assert whole_answer["choices"][index]["finish_reason"] == "tool_calls"


async def test_special_tokens_delimit_whatever_is_skipped(say: Say) -> None:
    tokens = ("[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]")
    tokenizer = tokenizer_of(MISTRAL, *tokens, special=True)
    answer = 'I look.[TOOL_CALLS]get_weather[ARGS]{"city": "a"}'
    harness = await say(answer, tokenizer=tokenizer)
    for fields in ({}, {"skip_special_tokens": False}):
        [choice] = (await whole(harness, **fields))["choices"]
        [call] = choice["message"]["tool_calls"]
        assert choice["message"]["content"] == "I look."
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "a"}'}
        assert len(call["id"]) == 9 and call["id"].isalnum()
    told = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
    ]
    assert await whole(harness, messages=told)


async def test_calls_without_a_known_format_are_refused_and_none_shows_text(say: Say) -> None:
    harness = await say(CALL)
    [choice] = (await whole(harness, tool_choice="none"))["choices"]
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
    harness.service.turns = ModelTurns(harness.tokenizer, "none")
    answer = await harness.http().post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 400 and "model.tool_format" in answer.json()["error"]["message"]


async def test_an_answer_without_tools_is_content_though_it_looks_like_a_call(say: Say) -> None:
    harness = await say(CALL)
    [choice] = (await whole(harness, tools=None))["choices"]
    assert choice["message"] == {"role": "assistant", "content": CALL}
    message, reason = message_of(await streamed(harness, tools=[]))
    assert message == {"content": CALL} and reason == "stop"


async def test_how_answers_end(say: Say) -> None:
    harness = await say("Look: " + CALL)
    num_tokens = (await whole(harness))["usage"]["completion_tokens"]
    for cut in (num_tokens - 2, 9):  # a call that is complete or not
        [choice] = (await whole(harness, max_tokens=cut))["choices"]
        assert choice["finish_reason"] == "length"
        message, reason = message_of(await streamed(harness, max_tokens=cut))
        assert reason == "length" and without_ids(message) == without_ids(choice["message"])
    broken = await say('<tool_call>{"name": "clock", "arguments": {"a": ')
    [choice] = (await whole(broken))["choices"]
    assert choice["finish_reason"] == "stop"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"a": '


async def test_one_call_where_calls_may_not_be_parallel(say: Say) -> None:
    harness = await say(CALL + "\n" + SECOND)
    [choice] = (await whole(harness, parallel_tool_calls=False))["choices"]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["get_weather"]
    message, _ = message_of(await streamed(harness, parallel_tool_calls=False))
    assert len(message["tool_calls"]) == 1
    [choice] = (await whole(harness, parallel_tool_calls=True))["choices"]
    assert len(choice["message"]["tool_calls"]) == 2


async def test_reasoning_under_both_names_and_in_usage(say: Say, hermes: Tokenizer) -> None:
    harness = await say(THOUGHT + "Yes.", "No.")
    answer = await whole(harness, n=2, tools=None)
    first, second = (choice["message"] for choice in answer["choices"])
    assert (first["content"], first["reasoning"]) == ("Yes.", "It may rain.")
    assert first["reasoning_content"] == first["reasoning"] and "reasoning" not in second
    ids = hermes.encode(THOUGHT.rstrip(), add_special_tokens=False)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(ids)}
    usage = {"include_usage": True}
    chunks = await streamed(harness, n=2, tools=None, stream_options=usage)
    details = chunks[-1].usage.completion_tokens_details
    assert details.reasoning_tokens == len(ids)
    message, _ = message_of(chunks, 0)
    assert without_ids(message) == without_ids(first)
    hidden = await whole(harness, tools=None, include_reasoning=False)
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": "Yes."}
    message, _ = message_of(await streamed(harness, tools=None, include_reasoning=False))
    assert message == {"content": "Yes."}
    assert hidden["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(ids)


async def test_reasoning_that_the_prompt_opened(say: Say) -> None:
    harness = await say("It may rain.\n</think>\n\nYes.")
    opened = {"chat_template_kwargs": {"enable_thinking": True}, "tools": None}
    [choice] = (await whole(harness, **opened))["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (
        "Yes.",
        "It may rain.",
    )
    [choice] = (await whole(harness, tools=None))["choices"]
    assert choice["message"]["content"] == "It may rain.\n</think>\n\nYes."
    unended = await say("It may rain")
    [choice] = (await whole(unended, **opened))["choices"]
    assert choice["message"]["content"] is None and choice["message"]["reasoning"] == "It may rain"


async def test_stop_strings_are_looked_for_in_content_alone(say: Say) -> None:
    thought = "<think>rain rain</think>"
    harness = await say(thought + "No rain today.", tokens_at_once=some_at_once(1))
    [choice] = (await whole(harness, stop="rain"))["choices"]
    assert choice["message"]["content"] == "No " and choice["stop_reason"] == "rain"
    assert choice["message"]["reasoning"] == "rain rain" and choice["finish_reason"] == "stop"
    message, _ = message_of(await streamed(harness, stop="rain"))
    assert without_ids(message) == without_ids(choice["message"])
    await until(lambda: harness.world.held() == 0)
    calling = await say("Now " + CALL)
    [choice] = (await whole(calling, stop=["city", "w <"]))["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Now"
    kept = await say("a b c")
    fields = {"stop": "b", "include_stop_str_in_output": True}
    [choice] = (await whole(kept, **fields))["choices"]
    assert choice["message"]["content"] == "a b"
    [choice] = (await whole(kept, stop="b", min_tokens=50))["choices"]
    assert choice["message"]["content"] == "a b c"


async def test_log_probabilities_and_token_ids_are_all_there(say: Say) -> None:
    harness = await say(THOUGHT + "Look " + CALL, tokens_at_once=some_at_once(5))
    fields = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    [choice] = (await whole(harness, **fields))["choices"]
    chunks = await streamed(harness, **fields)
    logprobs = [
        entry.model_dump()
        for chunk in chunks
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())
    ]
    assert logprobs == choice["logprobs"]["content"] and len(logprobs) == len(choice["token_ids"])
    ids = [i for chunk in chunks for i in (chunk.choices[0].model_extra.get("token_ids") or ())]
    assert ids == choice["token_ids"]


@pytest.mark.parametrize("die_at", [3, 12, 25, 40])
async def test_a_stream_that_another_worker_resumes_goes_on_inside_its_call(
    say: Say, hermes: Tokenizer, die_at: int
) -> None:
    text = THOUGHT + "Look " + CALL + SECOND
    harness = await say(text, num_decode=2)
    [expected] = (await whole(harness))["choices"]
    victims: list[FakeWorker] = []

    def dies(worker: FakeWorker) -> Callable[[int], None]:
        def look(number: int) -> None:
            if number == die_at and not victims:
                victims.append(worker)
                worker.die()

        return look

    for worker in harness.decodes:
        worker.num_batches = 0
        worker.before_batch = dies(worker)
    message, reason = message_of(await streamed(harness))
    assert len(victims) == 1 and reason == "tool_calls"
    assert without_ids(message) == without_ids(expected["message"])


@pytest.mark.processes
@pytest.mark.usefixtures("checker")
async def test_a_named_choice_ends_with_stop(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await say(CALL)
    enforce(harness, monkeypatch)
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, reason in ((named, "stop"), ("required", "tool_calls"), ("auto", "tool_calls")):
        [answer] = (await whole(harness, tool_choice=choice))["choices"]
        assert answer["finish_reason"] == reason and answer["message"]["tool_calls"]
        assert message_of(await streamed(harness, tool_choice=choice))[1] == reason


@pytest.fixture
def checker() -> Iterator[None]:
    """The processes that try grammars end with the test."""
    yield
    shared_checker().close()


def enforce(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The workers enforce grammars, which a stand-in writes. Returns what it is asked for."""
    from pdserve.protocol.logit_rules import RULES, RuleKind
    from pdserve.turns import enforcement

    asked: list[tuple[Any, ...]] = []

    def write(*args: Any, **more: Any) -> str:
        asked.append((*args, more))
        return f'start: "{len(asked)}"'

    for name in ("grammar", "thinking_budget"):
        monkeypatch.setitem(RULES, name, RuleKind("none:None", lambda settings, vocab_size: None))
    monkeypatch.setattr(enforcement, "tools_grammar", write)
    for state in harness.fleet.workers:
        monkeypatch.setattr(type(state), "enforces_grammars", True)
    return asked


@pytest.mark.processes
@pytest.mark.usefixtures("checker")
async def test_a_demanded_call_has_no_content_that_a_format_could_be_of(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As clients send both (instructor's RESPONSES_TOOLS): the call's grammar holds. A form of the
    whole answer is refused beside it."""
    harness = await say(CALL)
    asked = enforce(harness, monkeypatch)
    schema = {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    formats = ({"type": "json_object"}, {"type": "json_schema", "json_schema": schema})
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        for response_format in formats:
            await whole(harness, tool_choice=choice, response_format=response_format)
            rules = harness.prefills[0].submits()[-1].sampling.logit_rules
            assert rules == {"grammar": f'start: "{len(asked)}"'}
    await whole(harness, tool_choice="auto", response_format=formats[0])
    rules = harness.prefills[0].submits()[-1].sampling.logit_rules
    assert len(asked) == 4 and rules and "json" in rules["grammar"], "the content's form holds"
    for fields, named_field in (
        ({"guided_json": {}}, "tool_choice"),
        ({"response_format": {"type": "no"}}, "response_format"),
    ):
        answer = await harness.http().post(
            "/v1/chat/completions", json=CHAT | {"tool_choice": "required"} | fields
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, named_field)


async def test_a_demanded_call_ends_where_it_is_complete(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ignore_eos it would end with `length`, as if something were missing."""
    harness = await say(CALL)
    enforce(harness, monkeypatch)
    function = {"name": "f", "input_schema": {"type": "object"}}
    flat = {"type": "function", "name": "f"}
    asks: dict[str, tuple[dict[str, Any], ...]] = {
        "/v1/chat/completions": (
            CHAT | {"tool_choice": "required"},
            CHAT | {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ),
        "/v1/responses": (
            {"model": MODEL, "input": "hi", "tools": [flat], "tool_choice": "required"},
        ),
        "/v1/messages": (
            {"model": MODEL, "messages": MESSAGES, "max_tokens": 9, "tools": [function]}
            | {"tool_choice": {"type": "any"}},
        ),
    }
    for path, bodies in asks.items():
        for body in bodies:
            answer = await harness.http().post(path, json=body | {"ignore_eos": True})
            error = answer.json()["error"]
            assert answer.status_code == 400, path
            assert error["message"].startswith("ignore_eos: an answer that must be a call ends")
            assert error.get("param", "ignore_eos") == "ignore_eos"
    assert not harness.prefills[0].submits()


@pytest.mark.processes
@pytest.mark.usefixtures("checker")
async def test_what_is_enforced_goes_to_workers_as_a_rule(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await say(CALL)
    asked = enforce(harness, monkeypatch)
    named = {"type": "function", "function": {"name": "clock"}}
    await whole(harness, tool_choice=named, parallel_tool_calls=False)
    form, tools, choice, parallel, reasoning, more = asked[0]
    assert form.call_begin.startswith("<tool_call>") and tools == [WEATHER, CLOCK]
    assert (choice, parallel, reasoning.name) == (named, False, "think")
    assert more["enforce"] == "schema" and not more["starts_in_reasoning"]
    assert more["token_ids"].keys() == {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    submit = harness.prefills[0].submits()[-1]
    assert submit.sampling.logit_rules == {"grammar": 'start: "1"'}
    await whole(harness, chat_template_kwargs={"enable_thinking": True})
    assert asked[1][2] == "auto" and asked[1][-1]["starts_in_reasoning"]
    harness.service.turns = ModelTurns(harness.tokenizer, tool_enforcement="off")
    await whole(harness)
    assert len(asked) == 2 and not harness.prefills[0].submits()[-1].sampling.logit_rules
    await whole(harness, tool_choice="required")
    assert asked[2][-1]["enforce"] == "syntax", "a call that must be made is enforced all the same"
    own = {"logit_rules": {"grammar": 'start: "own"'}}
    await whole(harness, **own)
    assert harness.prefills[0].submits()[-1].sampling.logit_rules == {"grammar": 'start: "own"'}
    answer = await harness.http().post(
        "/v1/chat/completions", json=CHAT | own | {"tool_choice": "required"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


async def test_a_budget_for_reasoning_becomes_a_rule(
    say: Say, hermes: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await say(THOUGHT + "Yes.")
    enforce(harness, monkeypatch)
    begin, end = (hermes.encode(text, add_special_tokens=False) for text in ("<think>", "</think>"))
    assert len(begin) == len(end) == 1
    await whole(harness, tools=None, thinking_token_budget=5)
    rules = harness.prefills[0].submits()[-1].sampling.logit_rules
    assert rules == {"thinking_budget": {"tokens": 5, "end": end, "start": begin}}
    opened = {"chat_template_kwargs": {"enable_thinking": True}}
    await whole(harness, tools=None, thinking_token_budget=0, **opened)
    rules = harness.prefills[0].submits()[-1].sampling.logit_rules
    assert rules == {"thinking_budget": {"tokens": 0, "end": end, "start": None}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """The field tool_choice that allows these tools, as OpenAI documents it."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    inner = {"mode": mode, "tools": tools}
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": inner}}


@pytest.mark.processes
@pytest.mark.usefixtures("checker")
async def test_of_the_tools_only_the_allowed_ones_are_shown_and_enforced(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await say(SECOND)
    asked = enforce(harness, monkeypatch)
    for mode in ("auto", "required"):
        prompt = await prompt_of(harness, **allowed(mode, "clock", "clock"))
        assert "clock" in prompt and "get_weather" not in prompt
        _, tools, choice, *_, more = asked[-1]
        assert (tools, choice, more["places"]) == ([CLOCK], mode, [1])
    answer = await harness.openai().chat.completions.create(**CHAT | allowed("auto", "clock"))
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "clock"
    both = await prompt_of(harness, **allowed("auto", "clock", "get_weather"))
    assert both == await prompt_of(harness)
    format_ = {"response_format": {"type": "json_object"}}
    num_asked = len(asked)
    await whole(harness, **allowed("required", "clock"), **format_)
    assert len(asked) == num_asked + 1, "a demanded call has no content"
    await whole(harness, **allowed("auto", "clock"), **format_)
    assert len(asked) == num_asked + 1, "the content's form holds"


FLAT = {"mode": "auto", "tools": [{"type": "function", "name": "clock"}]}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function"}]}, "tools", "function is missing"),
    ({"tools": [{"type": "web_search"}]}, "tools", "only functions"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "twice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "without spaces"),
    ({"tools": [{"type": "function", "function": {"name": 3}}]}, "tools", "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools",
        "JSON schema",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
        "tools",
        "leave strict out",
    ),
    ({"tools": [WEATHER] * 257}, "tools", "at most 256"),
    ({"tool_choice": "required"}, "tool_choice", "send 'auto'"),
    ({"tool_choice": "any"}, "tool_choice", "must be 'none'"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "clock"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools must be {'mode'"),
    (allowed("none", "clock"), "tool_choice", "allowed_tools.mode must be 'auto' or 'required'"),
    (allowed("auto"), "tool_choice", "allowed_tools.tools must be a list of at least one"),
    (allowed("auto", "clock", "x"), "tool_choice", "allowed_tools.tools[1] names 'x'"),
    (
        {"tool_choice": {**allowed("auto")["tool_choice"], "allowed_tools": {**FLAT}}},
        "tool_choice",
        "allowed_tools.tools[0] must be {'type': 'function', 'function'",
    ),
    ({"tools": None, **allowed("auto", "clock")}, "tool_choice", "leave it out"),
    (
        {
            "tools": [WEATHER, {"type": "function", "function": {"name": "f", "strict": True}}],
            **allowed("auto", "f"),
        },
        "tools",
        "tools[1].function.strict",
    ),
    ({"tools": None, "tool_choice": "auto"}, "tool_choice", "leave it out"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "bool"),
    ({"function_call": {"name": "f"}}, "function_call", "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions", "send tools"),
    ({"thinking_token_budget": -1}, "thinking_token_budget", "[0, "),
    ({"documents": [3]}, "documents", "object"),
    ({"documents": [{}]}, "documents", "title"),
    ({"reasoning_effort": 3}, "reasoning_effort", "str"),
    (
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}},
        "chat_template_kwargs",
        "one of them",
    ),
    ({"echo": True}, "echo", "leave echo out"),
    ({"continue_final_message": True}, "messages", "cannot be continued"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt",
        "one of them",
    ),
    ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs", "server"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages", "role 'tool'"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
        "messages",
        "send tool_calls",
    ),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages", "leave"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages", "list"),
    ({"messages": [{"role": "tool", "tool_call_id": 5, "content": "x"}]}, "messages", "string"),
]


@pytest.mark.parametrize(("change", "param", "says"), BAD)
async def test_wrong_input_is_named_with_the_cure_before_any_work(
    say: Say, change: dict[str, Any], param: str, says: str
) -> None:
    harness = await say("x")
    answer = await harness.http().post("/v1/chat/completions", json=CHAT | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert says in error["message"], error["message"]
    assert not harness.prefills[0].submits() and not harness.decodes[0].submits()


async def test_old_fields_that_ask_for_nothing_are_taken(say: Say) -> None:
    harness = await say("x")
    neutral = {"function_call": "none", "functions": [], "parallel_tool_calls": True}
    assert await whole(harness, **neutral)


async def test_a_template_that_shows_no_tools_is_no_silent_loss(
    say: Say, tokenizer: Tokenizer
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    blind = await say("x", tokenizer=tokenizer_of(template))
    blind.service.turns = ModelTurns(blind.tokenizer, "hermes")
    for fields, param in (
        ({"tools": [WEATHER]}, "tools"),
        ({"documents": [{"title": "a"}], "tools": None}, "documents"),
        ({"reasoning_effort": "low", "tools": None}, "reasoning_effort"),
    ):
        answer = await blind.http().post("/v1/chat/completions", json=CHAT | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert await whole(blind, tool_choice="none")


async def prompt_of(harness: Harness, **fields: Any) -> str:
    """The prompt that a worker got."""
    await whole(harness, **fields)
    ids = harness.prefills[0].submits()[-1].prompt_token_ids
    return harness.tokenizer.decode(ids, skip_special_tokens=False)


async def test_a_conversation_with_tools_reaches_the_template(say: Say) -> None:
    harness = await say("x")
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "clock", "arguments": '{"a":1}'},
    }
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "reasoning": "I look",
            "refusal": None,
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    text = await prompt_of(
        harness,
        messages=messages,
        documents=[{"title": "Clocks"}],
        reasoning_effort="low",
    )
    assert '{"type": "function", "function": {"name": "clock"}}' in text
    assert "[Clocks]<|im_start|>system\nBe brief.<|im_end|>" in text
    assert "<|im_start|>user\na\nb<|im_end|>" in text
    assert '<think>\nI look\n</think>\n\n<tool_call>clock {"a": 1}</tool_call>' in text
    assert text.endswith("<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\n(low)")


@pytest.mark.parametrize("begun", ["It is", "It is  ", [{"type": "text", "text": "It is"}]])
async def test_the_last_message_is_continued_and_repeated(say: Say, begun: Any) -> None:
    harness = await say(" raining.")
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    fields = {"messages": messages, "continue_final_message": True, "tools": None}
    shown = begun if isinstance(begun, str) else "It is"
    text = await prompt_of(harness, **fields)
    assert text.endswith("<|im_start|>assistant\n" + shown)
    [choice] = (await whole(harness, **fields))["choices"]
    assert choice["message"]["content"] == " raining."
    [choice] = (await whole(harness, **fields, echo=True))["choices"]
    assert choice["message"]["content"] == shown + " raining."
    message, _ = message_of(await streamed(harness, **fields, echo=True))
    assert message["content"] == shown + " raining."


async def test_reasoning_is_continued_where_it_stood(say: Say) -> None:
    harness = await say("rain.</think>Yes.")
    for begun, reasoning in (("<think>It may ", "rain."), ("<think>a</think>It may ", None)):
        messages = [*MESSAGES, {"role": "assistant", "content": begun}]
        fields = {"messages": messages, "continue_final_message": True, "tools": None}
        message = (await whole(harness, **fields))["choices"][0]["message"]
        assert message.get("reasoning") == reasoning
        assert message["content"] == ("Yes." if reasoning else "rain.</think>Yes.")


async def test_a_client_that_leaves_inside_a_call_frees_everything(say: Say) -> None:
    harness = await say(CALL * 50)
    stream = await harness.openai().chat.completions.create(**CHAT, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.tool_calls:
            break
    await stream.close()
    assert await harness.world.settled() == 0
    await until(lambda: harness.service.held.num_bytes == 0)


async def test_many_callers_at_once(say: Say) -> None:
    harness = await say(THOUGHT + "Look " + CALL, tokens_at_once=some_at_once(2), num_decode=2)
    [expected] = (await whole(harness))["choices"]
    for chunks in await asyncio.gather(*(streamed(harness) for _ in range(20))):
        assert without_ids(message_of(chunks)[0]) == without_ids(expected["message"])


async def test_openais_own_types_are_taken(say: Say) -> None:
    """The message that the client returned is sent again without changes."""
    harness = await say(CALL)
    client: openai.AsyncOpenAI = harness.openai()
    answer = await client.chat.completions.create(**CHAT)
    message = answer.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    messages: Any = [*MESSAGES, message.model_dump(), result]
    tools: Any = [WEATHER]
    again = await client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
    assert again.choices[0].finish_reason == "tool_calls"


def test_workers_speak_as_told(hermes: Tokenizer) -> None:
    worker = FakeWorker.__new__(FakeWorker)
    make_speak(worker, hermes, CALL)
    assert worker.answers is not None
    assert hermes.decode(worker.answers((1,), 0)) == CALL
