"""/v1/messages: what clients of Anthropic's API see of answers that the test writes, whole and
streamed, and /v1/messages/count_tokens."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from router.fake_worker import FakeWorker
from router.harness import MODEL, Harness, until
from router.messages_client import (
    ASK,
    BODY,
    COUNT,
    PATH,
    TOOLS,
    events_in,
    message_of,
    streamed,
    whole,
    without_ids,
)
from router.turn_models import HERMES, Say, some_at_once, speaking, tokenizer_of
from text.answers.support import WRITERS

from pdserve.router.http.messages.tool_input import INVALID_JSON
from pdserve.text.grammars.checker import shared_checker
from pdserve.text.tokenizer import Tokenizer
from pdserve.turns.model_turns import ModelTurns

CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "n": [1, 2]}}\n</tool_call>'
)
SECOND = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nIt may rain.\n</think>\n\n"


async def test_a_whole_message(say: Say, hermes: Tokenizer) -> None:
    harness = await say("It rains.")
    answer = await harness.http().post(
        PATH,
        json=BODY,
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "any"},
    )
    assert answer.status_code == 200
    num_tokens = len(hermes.encode("It rains.", add_special_tokens=False)) + 1
    prompt = harness.prefills[0].submits()[-1].prompt_token_ids
    assert answer.json() == {
        "id": f"msg_{answer.headers['request-id']}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "It rains."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(prompt) - 1,  # the fake worker had one of them cached
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": num_tokens,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


async def test_the_events_of_a_stream(say: Say) -> None:
    harness = await say("It rains.", tokens_at_once=lambda: 100)
    events = await streamed(harness)
    start = events[0]["message"]
    assert start["id"].startswith("msg_") and start["usage"].pop("input_tokens") > 1
    assert start | {"id": ""} == {
        "id": "",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 0,
        },
    }
    text = {"type": "text", "text": ""}
    assert events[1:3] == [
        {"type": "content_block_start", "index": 0, "content_block": text},
        {"type": "ping"},
    ]
    deltas = events[3:-3]
    assert {d["type"] for d in deltas} == {"content_block_delta"}
    assert "".join(d["delta"]["text"] for d in deltas) == "It rains."
    assert events[-3] == {"type": "content_block_stop", "index": 0}
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-1] == {"type": "message_stop"}
    assert without_ids(message_of(events)) == without_ids(await whole(harness))


async def test_thinking_text_and_calls_are_blocks(say: Say, hermes: Tokenizer) -> None:
    harness = await say(THOUGHT + "Let me look.\n" + CALL + "\n" + SECOND)
    message = await whole(harness, tools=TOOLS)
    assert without_ids(message)["content"] == [
        {"type": "thinking", "thinking": "It may rain.", "signature": ""},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Köln", "n": [1, 2]}},
        {"type": "tool_use", "name": "clock", "input": {}},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    ids = hermes.encode(THOUGHT.rstrip(), add_special_tokens=False)
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": len(ids)}
    events = await streamed(harness, tools=TOOLS)
    signed = [e for e in events if e.get("delta", {}).get("type") == "signature_delta"]
    assert [(e["index"], e["delta"]["signature"]) for e in signed] == [(0, "")]
    assert without_ids(message_of(events)) == without_ids(message)


async def test_thinking_may_be_left_out_of_the_answer(say: Say) -> None:
    harness = await say(THOUGHT + "Yes.")
    thinking = {"type": "adaptive", "display": "omitted"}
    message = await whole(harness, thinking=thinking)
    assert message["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert message["content"][1] == {"type": "text", "text": "Yes."}
    assert "rain" not in json.dumps(events := await streamed(harness, thinking=thinking))
    assert without_ids(message_of(events))["content"] == message["content"]


@pytest.mark.parametrize("name", [name for name in WRITERS if "llama" not in name])
async def test_the_stream_equals_the_whole_however_tokens_come(say: Say, name: str) -> None:
    form, write = WRITERS[name]
    rng = random.Random(name)
    answers = []
    for _ in range(6):
        arguments = json.dumps({"city": rng.choice('äß🙂<{["') * rng.randint(1, 9), "n": 7})
        calls = [("get_weather", arguments)] * rng.randint(1, 3)
        text = rng.choice(["", "Ich schaue nach: ", "a < b [x] {y} </ 🙂 "]) + write(calls)
        answers.append(text[: rng.choice([len(text), rng.randint(1, len(text))])])
    plain = tokenizer_of(HERMES)
    for number, answer in enumerate(answers):
        harness = await say(answer, tokenizer=plain)
        harness.service.turns = ModelTurns(plain, form, "none")
        expected = without_ids(await whole(harness, tools=TOOLS))
        for seed in range(2):
            for worker in harness.world.workers.values():
                worker.tokens_at_once = some_at_once(10 * number + seed)
            assert without_ids(message_of(await streamed(harness, tools=TOOLS))) == expected


async def test_arguments_that_are_no_object(say: Say) -> None:
    broken = '{"city": "Bonn", "n": [1, }'
    harness = await say(
        '<tool_call>{"name": "get_weather", "arguments": ' + broken + "</tool_call>"
    )
    message = await whole(harness, tools=TOOLS)
    [block] = message["content"]
    assert block["input"]["city"] == "Bonn" and block["input"][INVALID_JSON].startswith(broken)
    assert without_ids(message_of(await streamed(harness, tools=TOOLS))) == without_ids(message)
    assert message["stop_reason"] == "end_turn", "nothing is complete that could be called"


async def test_a_call_that_max_tokens_cuts_off(say: Say) -> None:
    harness = await say(CALL)
    most = (await whole(harness, tools=TOOLS))["usage"]["output_tokens"]
    for num_tokens in range(1, most - 1):
        message = await whole(harness, tools=TOOLS, max_tokens=num_tokens)
        streaming = message_of(await streamed(harness, tools=TOOLS, max_tokens=num_tokens))
        assert without_ids(streaming) == without_ids(message)
        assert message["stop_reason"] == "max_tokens"
        for block in message["content"]:
            if block["type"] == "tool_use" and block["input"] != {"city": "Köln", "n": [1, 2]}:
                assert '{"city": "Köln", "n": [1, 2]}'.startswith(
                    block["input"][INVALID_JSON].rstrip("\ufffd")
                )


async def test_how_answers_end(say: Say) -> None:
    harness = await say("No rain today.")
    for fields, reason, sequence, text in (
        ({}, "end_turn", None, "No rain today."),
        ({"max_tokens": 7}, "max_tokens", None, "No rain"),
        ({"stop_sequences": ["x", "rain"]}, "stop_sequence", "rain", "No "),
        ({"stop_sequences": []}, "end_turn", None, "No rain today."),
    ):
        message = await whole(harness, **fields)
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
        assert message["content"] == [{"type": "text", "text": text}]
        assert without_ids(message_of(await streamed(harness, **fields))) == without_ids(message)
    first = (await whole(harness))["content"][0]["text"]
    [token] = harness.tokenizer.encode(".", add_special_tokens=False)
    stopped = await whole(harness, stop_token_ids=[token])
    assert stopped["stop_reason"] == "end_turn" and first.startswith(stopped["content"][0]["text"])


async def test_more_tokens_than_fit_are_as_many_as_fit(hermes: Tokenizer) -> None:
    roomless = speaking(hermes, "a" * 5000)
    for worker in (*roomless.prefills, *roomless.decodes):
        worker.max_tokens = 100
    await roomless.start()
    try:
        message = await whole(roomless, max_tokens=10_000)
        assert message["stop_reason"] == "model_context_window_exceeded"
        usage = message["usage"]
        num_input = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert num_input + usage["output_tokens"] in (100, 101)
        streaming = message_of(await streamed(roomless, max_tokens=10_000))
        assert without_ids(streaming) == without_ids(message)
    finally:
        await roomless.fleet.close()
        await roomless.world.close()


async def test_an_answer_without_a_token_has_no_blocks(say: Say) -> None:
    harness = await say("")
    message = await whole(harness)
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")
    events = await streamed(harness)
    assert [e["type"] for e in events] == ["message_start", "message_delta", "message_stop"]
    assert without_ids(message_of(events)) == without_ids(message)


@pytest.mark.parametrize("die_at", [3, 12, 25, 40])
async def test_a_stream_that_another_worker_resumes_goes_on_inside_its_block(
    say: Say, die_at: int
) -> None:
    harness = await say(THOUGHT + "Look " + CALL + SECOND, num_decode=2)
    expected = without_ids(await whole(harness, tools=TOOLS))
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
    message = message_of(await streamed(harness, tools=TOOLS))
    assert len(victims) == 1 and without_ids(message) == expected


async def test_a_failure_after_the_start_is_an_event(say: Say) -> None:
    harness = await say("a" * 300)
    harness.decodes[0].before_batch = lambda number: (
        harness.decodes[0].die() if number == 4 else None
    )
    answer = await harness.http().post(PATH, json=BODY | {"stream": True})
    *before, last = events_in(answer.text)
    assert answer.status_code == 200 and before[0]["type"] == "message_start"
    assert last["type"] == "error" and last["error"]["type"] == "overloaded_error"
    assert last["request_id"] == answer.headers["request-id"]
    assert before[0]["message"]["id"] == f"msg_{last['request_id']}"


async def test_a_client_that_leaves_inside_a_call_frees_everything(say: Say) -> None:
    harness = await say(CALL * 50)
    async with harness.http() as http:
        task = asyncio.create_task(http.post(PATH, json=BODY | {"tools": TOOLS, "stream": True}))
        await until(lambda: harness.service.held.num_bytes > 0)
        task.cancel()
    assert await harness.world.settled() == 0
    await until(lambda: harness.service.held.num_bytes == 0)


async def test_what_a_stream_keeps_of_its_blocks_counts_as_held(say: Say) -> None:
    harness = await say("a" * 3000)
    held = []
    harness.decodes[0].before_batch = lambda number: held.append(harness.service.held.num_bytes)
    await streamed(harness, max_tokens=4000)
    assert max(held) > 3000 and harness.service.held.num_bytes == 0
    small = await say("a" * 3000, max_held_bytes=1 << 16)
    answer = await small.http().post(PATH, json=BODY | {"stream": True, "max_tokens": 4000})
    assert "max_held_bytes" in answer.text


async def test_many_callers_at_once(say: Say) -> None:
    harness = await say(THOUGHT + "Look " + CALL, tokens_at_once=some_at_once(2), num_decode=2)
    expected = without_ids(await whole(harness, tools=TOOLS))
    found = await asyncio.gather(*(streamed(harness, tools=TOOLS) for _ in range(20)))
    for events in found:
        assert without_ids(message_of(events)) == expected


async def test_a_timeline_where_it_is_asked_for(say: Say) -> None:
    harness = await say("Yes.")
    http = harness.http(headers={"x-pdserve-timeline": "1"})
    assert len((await http.post(PATH, json=BODY)).json()["timeline"]) == 1
    answer = await http.post(PATH, json=BODY | {"stream": True})
    assert len(events_in(answer.text)[-2]["timeline"]) == 1
    assert "timeline" not in await whole(harness)


CONVERSATION: list[Any] = [
    *ASK,
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c1", "name": "clock", "input": {"a": 1}}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "noon"}]},
]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief.", "tools": TOOLS},
        {"messages": CONVERSATION, "tools": TOOLS, "tool_choice": {"type": "none"}},
        {"thinking": {"type": "adaptive"}},
        {"messages": [*ASK, {"role": "assistant", "content": "It is"}]},
    ],
)
async def test_counted_tokens_are_those_of_the_same_message(
    say: Say, fields: dict[str, Any]
) -> None:
    harness = await say("x")
    shown = {name: value for name, value in BODY.items() if name != "max_tokens"} | fields
    answer = await harness.http().post(COUNT, json=shown)
    assert answer.status_code == 200, answer.text
    assert not harness.prefills[0].submits() and not harness.decodes[0].submits()
    usage = (await whole(harness, **fields))["usage"]
    num_input = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert answer.json() == {"input_tokens": num_input}
    assert len(harness.prefills[0].submits()[-1].prompt_token_ids) == num_input


async def test_counting_takes_no_place_and_obeys_the_same_limits(say: Say) -> None:
    harness = await say("x", max_concurrent_prompts=1)
    shown = {"model": MODEL, "messages": ASK}
    http = harness.http()
    for _ in range(5):
        assert (await http.post(COUNT, json=shown)).status_code == 200
    long = [{"role": "user", "content": "word " * 200_000}]
    for body in (shown | {"messages": long}, shown | {"system": "word " * 200_000}):
        answer = await http.post(COUNT, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert "shorten messages" in error["message"]
    assert harness.service.admission.num_prompts == 0
    assert (await http.post(PATH, json=BODY)).status_code == 200
    long_but_fits = shown | {"messages": [{"role": "user", "content": "a" * 50_000}]}
    assert (await http.post(COUNT, json=long_but_fits)).json()["input_tokens"] > 10_000
    harness.service.admission.num_prompts += 1
    answer = await http.post(COUNT, json=shown)
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(answer.headers["retry-after"]) >= 1


@pytest.fixture
def checker() -> Iterator[None]:
    """The processes that try grammars end with the test."""
    yield
    shared_checker().close()


def enforce(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    for state in harness.fleet.workers:
        monkeypatch.setattr(type(state), "enforces_grammars", True)


@pytest.mark.processes
@pytest.mark.usefixtures("checker")
async def test_forced_tools_are_enforced(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await say(CALL)
    enforce(harness, monkeypatch)
    grammars = []
    for choice in (
        {"type": "any"},
        {"type": "tool", "name": "get_weather"},
        {"type": "auto"},
        {"type": "any", "disable_parallel_tool_use": True},
    ):
        message = await whole(harness, tools=TOOLS, tool_choice=choice)
        assert message["stop_reason"] == "tool_use"
        assert message["content"][0]["type"] == "tool_use"
        rules = harness.prefills[0].submits()[-1].sampling.logit_rules
        grammars.append(rules["grammar"])
    assert len(set(grammars)) == 4 and "clock" not in grammars[1]
    strict = {"name": "f", "strict": True, "input_schema": {"type": "object", "not": {}}}
    answer = await harness.http().post(PATH, json=BODY | {"tools": [strict]})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.startswith("tools[0].input_schema uses not")


@pytest.mark.processes
@pytest.mark.usefixtures("checker")
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "clock"}])
async def test_a_demanded_call_has_no_text_that_a_format_could_be_of(
    say: Say, monkeypatch: pytest.MonkeyPatch, choice: dict[str, str]
) -> None:
    harness = await say(SECOND)
    enforce(harness, monkeypatch)
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    found = []
    for more in ({}, {"output_config": form}, {"output_config": form, "tool_choice": None}):
        await whole(harness, **{"tools": TOOLS, "tool_choice": choice, **more})
        rules = harness.prefills[0].submits()[-1].sampling.logit_rules
        assert rules is not None
        found.append(rules["grammar"])
    assert found[0] == found[1] != found[2]


@pytest.mark.processes
@pytest.mark.usefixtures("checker")
@pytest.mark.parametrize("where", ["output_config", "output_format"])
async def test_structured_output_is_enforced(
    say: Say, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    harness = await say('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}}
    form: Any = {"type": "json_schema", "schema": schema}
    fields = {where: {"format": form} if where == "output_config" else form}
    answer = await harness.http().post(PATH, json=BODY | fields)
    assert answer.status_code == 400 and "no worker" in answer.json()["error"]["message"]
    assert answer.json()["error"]["message"].startswith(where)
    enforce(harness, monkeypatch)
    answer = await harness.http().post(PATH, json=BODY | fields)
    assert answer.status_code == 200 and answer.headers["x-pdserve-unenforced"] == "not"
    assert "grammar" in harness.prefills[0].submits()[-1].sampling.logit_rules
    thinking = {"thinking": {"type": "adaptive"}}
    opened = await harness.http().post(PATH, json=BODY | fields | thinking)
    assert opened.status_code == 200, "the form is that of the text after the thinking"
    grammar = harness.prefills[0].submits()[-1].sampling.logit_rules["grammar"]
    assert "start: rest (@answer)" in grammar, "what is left of the thinking comes first"
