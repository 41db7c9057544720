"""Answers of /v1/responses, whole and streamed, as OpenAI's client and types read them."""

import asyncio
import json
import random
import re
from collections.abc import Callable
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router.fake_worker import FakeWorker
from router.harness import MODEL, until
from router.responses_support import (
    ASK,
    CALL,
    LOGPROBS,
    OPEN,
    PATH,
    SECOND,
    THOUGHT,
    checked,
    comparable,
    events_of,
    parsed,
    shown,
    streamed,
    whole,
)
from router.turn_models import Say, some_at_once, speaking
from router.turn_models import whole as chatted

from pdserve.background.pace import Pacer
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.held_bytes import Account, Held
from pdserve.router.http.responses.requests import ResponsesRequest
from pdserve.router.http.responses.responder import ResponsesResponder
from pdserve.router.request.chunks import OutputChunk
from pdserve.router.request.generation import Generation
from pdserve.text.answers.pieces import CallBegin, CallEnd
from pdserve.text.tokenizer import Tokenizer
from pdserve.turns.model_turns import ModelTurns

TEXT: dict[str, Any] = {"tools": []}
ALL = THOUGHT + "Look <b>. " + CALL + "\nThen " + SECOND + SECOND + "done 🙂"


async def test_a_text_as_openais_client_reads_it(say: Say) -> None:
    harness = await say("It rains.")
    client = harness.openai()
    answer = await client.responses.create(
        model=MODEL, input="Hi", instructions="Be brief.", metadata={"a": "b"}, store=True
    )
    assert answer.output_text == "It rains." and answer.status == "completed"
    assert answer.id.startswith("resp_") and answer.object == "response"
    assert (answer.instructions, answer.metadata) == ("Be brief.", {"a": "b"})
    assert answer.model_extra is not None and answer.model_extra["store"] is False
    assert answer.usage is not None
    assert (
        answer.usage.output_tokens
        == len(harness.tokenizer.encode("It rains.", add_special_tokens=False)) + 1
    )
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    again = await client.responses.create(model=MODEL, input="Hi", stream=True)
    texts = [event.delta async for event in again if event.type == "response.output_text.delta"]
    assert "".join(texts) == "It rains." and len(texts) > 3


async def test_the_object_has_all_that_was_asked_and_what_was_not(say: Say) -> None:
    harness = await say("x")
    plain = await whole(harness, **TEXT)
    assert plain["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert (plain["temperature"], plain["top_p"], plain["tool_choice"]) == (1.0, 1.0, "auto")
    assert (plain["parallel_tool_calls"], plain["truncation"]) == (True, "disabled")
    assert plain["metadata"] == {} and plain["tools"] == [] and plain["error"] is None
    assert plain["reasoning"] == {"effort": None, "summary": None}
    assert plain["completed_at"] >= plain["created_at"]
    given = {
        "temperature": 0.5,
        "top_p": 0.25,
        "max_output_tokens": 7,
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "reasoning": {"effort": "low", "summary": "auto"},
    }
    full = await whole(harness, **given, service_tier="flex", truncation="disabled")
    assert {name: full[name] for name in given} == given and full["service_tier"] == "default"
    assert full["tools"][1] == ASK["tools"][1] | {
        "description": None,
        "parameters": None,
        "strict": False,
    }
    harness.service.default_sampling = harness.service.default_sampling.from_defaults(
        {"top_p": 0.5}
    )
    assert (await whole(harness, **TEXT))["top_p"] == 0.5, "the model's own, where nothing is said"


async def test_items_of_reasoning_text_and_calls(say: Say) -> None:
    harness = await say(ALL)
    answer = await whole(harness)
    assert shown(answer) == [
        ("reasoning", "It may rain."),
        ("message", "Look <b>."),
        ("function_call", '{"city": "Köln"}'),
        ("message", "Then"),
        ("function_call", "{}"),
        ("function_call", "{}"),
        ("message", "done 🙂"),
    ]
    thought, message, call, *_ = answer["output"]
    assert thought["summary"] == [] and thought["content"][0]["type"] == "reasoning_text"
    assert message["role"] == "assistant" and message["content"][0]["annotations"] == []
    assert message["content"][0]["logprobs"] == []
    assert (call["name"], call["call_id"][:5]) == ("get_weather", "call_")
    ids = harness.tokenizer.encode(THOUGHT.rstrip(), add_special_tokens=False)
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": len(ids)}
    assert {item["status"] for item in answer["output"]} == {"completed"}


@pytest.mark.parametrize("fields", [{}, LOGPROBS, {"include_reasoning": False}, {"stop": "Th"}])
async def test_the_stream_ends_with_what_a_whole_answer_is(say: Say, fields: Any) -> None:
    harness = await say(ALL)
    expected = comparable(await whole(harness, **fields))
    for seed in range(4):
        for worker in harness.world.workers.values():
            worker.tokens_at_once = some_at_once(seed)
        assert comparable(await streamed(harness, **fields)) == expected
        assert comparable(await whole(harness, **fields)) == expected


PARTS = [
    THOUGHT,
    "<think>",
    "</think>",
    "a",
    " b ",
    "\n",
    "🙂",
    "ö",
    "<",
    "<tool_",
    "{",
    CALL,
    SECOND,
]
PARTS += ["<tool_call>", '{"name": "clock", "arguments": {"a": [1, ', "</tool_call>"]


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    answer=st.lists(st.sampled_from(PARTS), min_size=1, max_size=7).map("".join),
    seed=st.integers(0, 1 << 20),
    limit=st.none() | st.integers(1, 40),
    fields=st.sampled_from(
        [{}, LOGPROBS, OPEN, {"include_reasoning": False}, {"stop": ["b", "🙂"]}]
    ),
)
def test_cuts_do_not_matter(
    hermes: Tokenizer, answer: str, seed: int, limit: int | None, fields: dict[str, Any]
) -> None:
    """Whatever is generated, and however its tokens come, all streams are in order and end with
    the same object, which is that of a whole answer."""

    async def run() -> None:
        harness = await speaking(hermes, answer).start()
        asked = fields | {"max_output_tokens": limit}
        expected = comparable(await whole(harness, **asked))
        for worker in harness.world.workers.values():
            worker.tokens_at_once = some_at_once(seed)
        assert comparable(await streamed(harness, **asked)) == expected
        await harness.fleet.close()
        await harness.world.close()

    asyncio.run(run())


async def test_how_answers_end(say: Say) -> None:
    harness = await say("Look: " + CALL)
    num_tokens = (await whole(harness))["usage"]["output_tokens"]
    for cut, statuses in (
        (2, ["incomplete"]),
        (num_tokens - 12, ["completed", "incomplete"]),
        (num_tokens - 1, ["completed", "completed"]),
    ):
        answer = await whole(harness, max_output_tokens=cut)
        assert answer["status"] == "incomplete" and answer["completed_at"] is None
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["status"] for item in answer["output"]] == statuses
        assert comparable(await streamed(harness, max_output_tokens=cut)) == comparable(answer)
    broken = await say('<tool_call>{"name": "clock", "arguments": {"a": ')
    answer = await whole(broken)
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    [call] = answer["output"]
    assert (call["status"], call["arguments"]) == ("incomplete", '{"a": ')
    assert comparable(await streamed(broken)) == comparable(answer)
    empty = await say("")
    assert (await whole(empty))["output"] == (await streamed(empty))["output"] == []


async def test_reasoning_that_the_prompt_opened_or_that_is_hidden(say: Say) -> None:
    harness = await say("It may rain.\n</think>\n\nYes.")
    both = [("reasoning", "It may rain."), ("message", "Yes.")]
    assert shown(await whole(harness, **OPEN)) == both == shown(await streamed(harness, **OPEN))
    for answer in (whole, streamed):
        hidden = await answer(harness, **OPEN, include_reasoning=False)
        assert shown(hidden) == [("message", "Yes.")]
        assert hidden["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_log_probabilities_are_those_of_the_text(say: Say) -> None:
    harness = await say(
        THOUGHT + "Look here " + CALL + "\n\nand there", tokens_at_once=some_at_once(5)
    )
    answer = await whole(harness, **LOGPROBS)
    messages = [item for item in answer["output"] if item["type"] == "message"]
    assert [message["content"][0]["text"] for message in messages] == ["Look here", "and there"]
    for message in messages:
        [part] = message["content"]
        tokens = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
        assert tokens.decode() == part["text"], "neither reasoning nor calls nor the end"
        assert all(len(entry["top_logprobs"]) == 1 for entry in part["logprobs"])
    plain = await whole(await say("One two"), **LOGPROBS, **TEXT)
    entries = plain["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries) == "One two"
    assert comparable(await streamed(harness, **LOGPROBS)) == comparable(answer)
    odd = await say("One <tool_ca", "One <tool_ca")
    for form in ("auto", "none"):  # read for calls, and not at all
        odd.service.turns = ModelTurns(odd.tokenizer, form, form)
        found = await whole(odd, **LOGPROBS, tools=ASK["tools"] if form == "auto" else [])
        [part] = found["output"][0]["content"]
        found_text = "".join(entry["token"] for entry in part["logprobs"])
        assert found_text == part["text"] == "One <tool_ca", (
            "without the token that ends the answer"
        )


@pytest.mark.parametrize("die_at", [3, 12, 25, 40])
async def test_items_stay_as_they_are_when_another_worker_goes_on(say: Say, die_at: int) -> None:
    harness = await say(THOUGHT + "Look " + CALL + SECOND, num_decode=2)
    expected = comparable(await whole(harness))
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
    answer = comparable(await streamed(harness))
    assert len(victims) == 1
    assert answer["output"] == expected["output"] and answer["status"] == "completed"


async def test_an_error_inside_a_stream_is_an_event_and_a_failed_response(say: Say) -> None:
    harness = await say("Look " + CALL)

    def dies(number: int) -> None:
        if number == 9:
            harness.decodes[0].die()

    harness.decodes[0].before_batch = dies
    events = await events_of(harness)
    failed = checked(events)
    assert events[-2]["type"] == "error" and events[-2]["message"] and events[-2]["code"]
    assert failed["status"] == "failed" and failed["completed_at"] is None
    assert failed["error"] == {"code": "server_error", "message": events[-2]["message"]}
    assert failed["output"][0]["content"][0]["text"].startswith("Look")
    assert {item["status"] for item in failed["output"]} <= {"incomplete", "completed"}
    assert failed["output"][-1]["status"] == "incomplete"
    added = [event["item"]["id"] for event in events if event["type"].endswith("item.added")]
    assert [item["id"] for item in failed["output"]] == added
    with pytest.raises(openai.APIStatusError) as raised:
        await harness.openai().responses.create(model=MODEL, input="x")
    assert raised.value.status_code == 503


async def test_tools_over_several_turns(say: Say) -> None:
    """The client sends back what it got, as OpenAI's guide shows it."""
    harness = await say(THOUGHT + "Look " + CALL + SECOND)
    client = harness.openai()
    items: list[Any] = [{"role": "user", "content": "What is it like?"}]
    for turn in range(3):
        answer = await client.responses.create(model=MODEL, input=items, tools=ASK["tools"])
        calls = [item for item in answer.output if item.type == "function_call"]
        assert [call.name for call in calls] == ["get_weather", "clock"]
        items += answer.output
        for call in calls:
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": json.dumps({"turn": turn}),
                }
            )
    sent = harness.prefills[0].submits()[-1].prompt_token_ids
    text = harness.tokenizer.decode(sent, skip_special_tokens=False)
    assert text.count("<|im_start|>assistant") == 3, "one message for each of the model's turns"
    messages: list[Any] = [{"role": "user", "content": "What is it like?"}]
    for turn in range(2):
        chat = (await chatted(harness, messages=messages[:1]))["choices"][0]["message"]
        messages.append(chat)
        for call in chat["tool_calls"]:
            output = json.dumps({"turn": turn})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
    await chatted(harness, messages=messages)
    assert harness.prefills[0].submits()[-1].prompt_token_ids == sent, "as chat completions do"


async def test_openais_streaming_helper(say: Say) -> None:
    harness = await say(THOUGHT + "Look " + CALL)
    async with harness.openai().responses.stream(
        model=MODEL, input="x", tools=ASK["tools"]
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[-1] == "response.completed" and "response.reasoning_text.delta" in kinds
    assert final.output_text == "Look" and final.output[-1].type == "function_call"


def a_responder(tokenizer: Tokenizer, **fields: Any) -> ResponsesResponder:
    account = Held(1 << 20, lambda count: None).account()
    generation = Generation("resp_x", 1, [], [(1, 2)], Pacer(), account)
    request = ResponsesRequest(model=MODEL, input="x", stream=True, **fields)
    return ResponsesResponder(request, generation, tokenizer, SamplingParams())


def test_what_an_answer_repeats_of_its_request_is_held(hermes: Tokenizer) -> None:
    responder = a_responder(hermes, metadata={"a": "x" * 500})
    assert responder._generation.account.num_bytes > 500


@given(
    texts=st.lists(
        st.text(max_size=4) | st.sampled_from(["", "\0", '"', "🙂", "\u2028"]), max_size=9
    ),
    call_at=st.integers(0, 9),
)
def test_the_short_way_of_plain_text_gives_the_same_bytes(
    hermes: Tokenizer, texts: list[str], call_at: int
) -> None:
    quick, plain = a_responder(hermes), a_responder(hermes)
    quick._name = plain._name = "name"
    plain._envelope = quick._envelope  # made in the same second
    call = (CallBegin(0, "f", "call_1"), CallEnd(0))
    for number, text in enumerate([*texts, *texts]):
        pieces = call if number == call_at else ()
        chunk = OutputChunk(0, 0, "" if pieces else text, (5,), (), None, None, pieces)
        plain._growing = None
        assert quick.stream(chunk) == plain.stream(chunk)
    assert quick._generation.account.num_bytes == plain._generation.account.num_bytes
    ends = [asyncio.run(responder.ending()) for responder in (quick, plain)]
    first, second = (re.sub(rb'"completed_at":\d+', b"", end) for end in ends)
    assert first == second


async def test_a_client_that_leaves_frees_everything(say: Say) -> None:
    harness = await say(CALL * 50)
    stream = await harness.openai().responses.create(**ASK, stream=True)
    async for event in stream:
        if event.type == "response.function_call_arguments.delta":
            break
    await stream.close()
    assert await harness.world.settled() == 0
    await until(lambda: harness.service.held.num_bytes == 0)


async def test_what_is_held_counts_and_is_given_back(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await say("word " * 300, tokens_at_once=lambda: 50)
    held = harness.service.held
    most = 0
    add = Account.add

    def count(account: Account, num_bytes: int) -> None:
        nonlocal most
        add(account, num_bytes)
        most = max(most, held.num_bytes)

    monkeypatch.setattr(Account, "add", count)
    await streamed(harness, **TEXT, instructions="i" * 3000)
    assert most > 3000 + 2 * 1500, "what the object repeats, the text, and the item"
    await until(lambda: held.num_bytes == 0)


async def test_a_timeline_for_those_who_ask(say: Say) -> None:
    harness = await say("x")
    headers = {"x-pdserve-timeline": "1"}
    for stream in (False, True):
        answer = await harness.http().post(PATH, json=ASK | {"stream": stream}, headers=headers)
        found = checked(parsed(answer.text)) if stream else answer.json()
        assert found["timeline"][0]["outcome"] == "ok"
    assert "timeline" not in await whole(harness)


async def test_the_name_of_a_request_is_in_its_answer(say: Say) -> None:
    harness = await say("x")
    answer = await harness.http().post(PATH, json=ASK, headers={"x-request-id": "one"})
    assert answer.json()["id"] == "resp_one" and answer.headers["x-request-id"] == "one"
    assert harness.prefills[0].submits()[-1].key.request_id.startswith("resp_one")


async def test_tokens_of_an_input_are_counted_as_an_answer_counts_them(say: Say) -> None:
    harness = await say("x")
    for fields in ({}, TEXT, {"instructions": "Be brief."}):
        usage = (await whole(harness, **fields))["usage"]
        num_generations = len(harness.prefills[0].submits())
        answer = await harness.http().post(f"{PATH}/input_tokens", json=ASK | fields)
        assert answer.json() == {
            "object": "response.input_tokens",
            "input_tokens": usage["input_tokens"],
        }
        assert len(harness.prefills[0].submits()) == num_generations
    client = harness.openai()
    counted = await client.responses.input_tokens.count(model=MODEL, input="Hi")
    assert counted.input_tokens > 0
    wrong = await harness.http().post(f"{PATH}/input_tokens", json=ASK | {"input": [{"type": "x"}]})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "input[0].type"
    assert harness.service.admission.num_prompts == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"structured_outputs": {"choice": 20.0}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias"),
        ({"logit_rules": {"unknown": {}}}, "logit_rules"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 9999}, "top_logprobs"),
    ],
)
async def test_counting_refuses_what_answering_refuses(
    say: Say, fields: dict[str, Any], param: str
) -> None:
    harness = await say("x")
    answers = [
        (await harness.http().post(path, json=ASK | fields)).json()
        for path in (PATH, f"{PATH}/input_tokens")
    ]
    assert answers[0] == answers[1] and answers[0]["error"]["param"] == param
    assert harness.service.admission.num_prompts == 0


async def test_nothing_is_stored(say: Say) -> None:
    harness = await say("x")
    http = harness.http()
    name = (await whole(harness))["id"]
    for answer in (
        await http.get(f"{PATH}/{name}"),
        await http.delete(f"{PATH}/{name}"),
        await http.post(f"{PATH}/{name}/cancel"),
        await http.get(f"{PATH}/{name}/input_items"),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "response_not_found")
        assert "stores none" in error["message"] and name in error["message"]


async def test_many_callers_at_once(say: Say) -> None:
    harness = await say(ALL, tokens_at_once=some_at_once(2), num_decode=2)
    expected = comparable(await whole(harness))["output"]
    rng = random.Random(1)
    answers = await asyncio.gather(*(rng.choice((whole, streamed))(harness) for _ in range(20)))
    assert all(comparable(answer)["output"] == expected for answer in answers)
    ids = [item["id"] for answer in answers for item in answer["output"]]
    assert len(set(ids)) == len(ids)
