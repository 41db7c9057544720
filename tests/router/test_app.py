"""The HTTP surface: OpenAI's client against the app, error forms, disconnects, metrics."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import httpx
import msgspec
import openai
import pytest
from router.fake_worker import expected_tokens, logprob_of
from router.harness import MODEL, Harness, until

from pdserve.protocol.commands import Cancel, Submit
from pdserve.protocol.events import Delta, Event, LegTimes
from pdserve.protocol.sampling_params import SamplingParams

PROMPT = list(range(10, 30))
Make = Callable[..., Harness]


def oracle(harness: Harness, prompt: list[int], choice: int = 0, **params: Any) -> str:
    tokens, reason = expected_tokens(tuple(prompt), SamplingParams(**params), choice)
    return harness.tokenizer.decode(tokens[:-1] if reason == "stop" else tokens)


async def test_completion_with_openais_client(make: Make) -> None:
    harness = await make(1, 1).start()
    answer = await harness.openai().completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=9, seed=5, n=2
    )
    assert (
        answer.id.startswith("cmpl-")
        and answer.object == "text_completion"
        and answer.model == MODEL
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.text == oracle(harness, PROMPT, choice.index, max_tokens=9, seed=5)
    assert answer.usage is not None and answer.usage.prompt_tokens == 20
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (
        answer.usage.prompt_tokens_details is not None
        and answer.usage.prompt_tokens_details.cached_tokens == 1
    )


async def test_streamed_completion_equals_the_whole_one(make: Make) -> None:
    harness = await make(1, 1).start()
    stream = await harness.openai().completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=9,
        seed=5,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None and chunks[-1].choices == [] and chunks[0].usage is None
    for index in (0, 1):
        choices = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in choices) == oracle(
            harness, PROMPT, index, max_tokens=9, seed=5
        )
        assert [choice.finish_reason for choice in choices if choice.finish_reason] in (
            ["length"],
            ["stop"],
        )


async def test_several_prompts_are_numbered_prompt_by_prompt(make: Make) -> None:
    harness = await make(1, 2).start()
    prompts = [PROMPT, PROMPT[:5], PROMPT[5:]]
    client = harness.openai()
    params: dict[str, Any] = {"model": MODEL, "prompt": prompts, "max_tokens": 6, "seed": 5, "n": 2}
    answer = await client.completions.create(**params)
    expected = [
        oracle(harness, prompt, choice, max_tokens=6, seed=5)
        for prompt in prompts
        for choice in (0, 1)
    ]
    assert [choice.text for choice in answer.choices] == expected
    texts = [""] * 6
    async for chunk in await client.completions.create(**params, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


async def test_text_prompts_and_special_tokens(make: Make) -> None:
    harness = await make(1, 1).start()
    client = harness.openai()
    for add in (True, False):
        ids = harness.tokenizer.encode("The quick fox", add_special_tokens=add)
        answer = await client.completions.create(
            model=MODEL,
            prompt="The quick fox",
            seed=5,
            extra_body={"add_special_tokens": add, "return_token_ids": True},
        )
        assert answer.choices[0].text == oracle(harness, ids, seed=5)
        assert answer.choices[0].model_extra is not None
        assert answer.choices[0].model_extra["prompt_token_ids"] == ids
        assert answer.usage is not None and answer.usage.completion_tokens <= 16
    # beyond what is tokenised on the event loop, and too long for the workers
    long = "word " * 2000
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt=long)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"


async def test_completion_logprobs_and_echo(make: Make) -> None:
    harness = await make(1, 1).start()
    answer = await harness.openai().completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4, seed=5, logprobs=2, echo=True
    )
    tokens, _ = expected_tokens(tuple(PROMPT), SamplingParams(max_tokens=4, seed=5), 0)
    choice = answer.choices[0]
    text = harness.tokenizer.token_text
    assert choice.text == harness.tokenizer.decode(PROMPT) + oracle(
        harness, PROMPT, max_tokens=4, seed=5
    )
    assert choice.logprobs is not None and choice.logprobs.tokens == [
        text(token) for token in [*PROMPT, *tokens]
    ]
    assert choice.logprobs.token_logprobs == [None] + [-0.5] * 23
    assert choice.logprobs.text_offset is not None and choice.logprobs.top_logprobs is not None
    assert choice.logprobs.text_offset[3] == sum(len(text(token)) for token in PROMPT[:3])
    expected = {text(t): p for t, p in logprob_of(tokens[0], 2).top} | {text(tokens[0]): -0.5}
    assert set(choice.logprobs.top_logprobs[20]) == set(expected)


async def test_streamed_logprobs_and_echo_equal_the_whole(make: Make) -> None:
    harness = await make(1, 1).start()
    params: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 6,
        "seed": 5,
        "logprobs": 1,
        "echo": True,
    }
    whole = (await harness.openai().completions.create(**params)).choices[0]
    stream = [
        c.choices[0] async for c in await harness.openai().completions.create(**params, stream=True)
    ]
    assert whole.logprobs is not None
    assert "".join(choice.text for choice in stream) == whole.text
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        joined = [item for choice in stream for item in getattr(choice.logprobs, name)]
        assert joined == getattr(whole.logprobs, name)


async def test_scoring_a_prompt_only(make: Make) -> None:
    harness = await make(1, 1).start()
    answer = await harness.openai().completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text == harness.tokenizer.decode(PROMPT)
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.token_logprobs) == 20
    assert answer.usage is not None and answer.usage.completion_tokens == 0


async def test_prompt_logprobs_in_vllms_form(make: Make) -> None:
    harness = await make(1, 1).start()
    body = {"model": MODEL, "prompt": PROMPT, "prompt_logprobs": 1, "max_tokens": 2}
    scored = (await harness.http().post("/v1/completions", json=body)).json()["choices"][0][
        "prompt_logprobs"
    ]
    assert scored[0] is None and len(scored) == 20
    assert scored[1][str(PROMPT[1])]["logprob"] == -0.5


MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
]


async def test_chat_with_openais_client(make: Make) -> None:
    harness = await make(1, 1).start()
    ids = harness.tokenizer.apply_chat_template(MESSAGES)
    answer = await harness.openai().chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_completion_tokens=8,
        seed=5,
        logprobs=True,
        top_logprobs=2,
        user="me",
    )
    choice = answer.choices[0]
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    assert (choice.message.role, choice.message.content) == (
        "assistant",
        oracle(harness, ids, max_tokens=8, seed=5),
    )
    tokens, _ = expected_tokens(tuple(ids), SamplingParams(max_tokens=8, seed=5), 0)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    for token, entry in zip(tokens, choice.logprobs.content, strict=True):
        assert bytes(entry.bytes or []) == harness.tokenizer.token_bytes(token)
        assert len(entry.top_logprobs) == 2
    assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)


async def test_streamed_chat(make: Make) -> None:
    harness = await make(1, 1).start()
    ids = harness.tokenizer.apply_chat_template(MESSAGES)
    stream = await harness.openai().chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=8,
        seed=5,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == len(ids)
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert (own[0].delta.role, own[0].delta.content) == ("assistant", "")
        assert all(choice.delta.role is None for choice in own[1:])
        text = "".join(choice.delta.content or "" for choice in own)
        assert text == oracle(harness, ids, index, max_tokens=8, seed=5)
        assert own[-1].finish_reason in ("length", "stop")


async def test_chat_without_max_tokens_fills_the_context(make: Make) -> None:
    harness = await make(1, 1).start()
    body = {"model": MODEL, "messages": MESSAGES, "ignore_eos": True}
    answer = (await harness.http().post("/v1/chat/completions", json=body)).json()
    assert answer["usage"]["total_tokens"] == harness.decodes[0].max_tokens
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_chat_template_kwargs(make: Make) -> None:
    harness = await make(1, 1).start()
    ids = harness.tokenizer.apply_chat_template(MESSAGES, not_thinking=True)
    body = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 1,
        "chat_template_kwargs": {"not_thinking": True},
    }
    await harness.http().post("/v1/chat/completions", json=body)
    assert harness.prefills[0].submits()[0].prompt_token_ids == tuple(ids)


@pytest.mark.parametrize("name", ["threads", "work", "args", "kwargs"])
async def test_a_template_may_have_arguments_of_any_name_in_a_thread_too(
    make: Make, name: str
) -> None:
    harness = make(0, 1)
    harness.decodes[0].max_tokens = 100_000
    await harness.start()
    long = [{"role": "user", "content": "hi " * 3000}]
    body = {"model": MODEL, "messages": long, "max_tokens": 1, "chat_template_kwargs": {name: 1}}
    assert (await harness.http().post("/v1/chat/completions", json=body)).status_code == 200


async def test_request_ids(make: Make) -> None:
    harness = await make(1, 1).start()
    http = harness.http()
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
    for _ in range(2):  # a client may repeat itself
        answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "abc"})
        assert answer.json()["id"] == "cmpl-abc"
    assert len({submit.key.request_id for submit in harness.prefills[0].submits()}) == 2
    bad = await http.post("/v1/completions", json=body, headers={"x-request-id": "a b"})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "x-request-id"


GOOD = {"model": MODEL, "prompt": PROMPT}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [403]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [5] * 256}, "prompt"),
        ({"max_tokens": 237}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"max_tokens": None, "min_tokens": 300}, "min_tokens"),
        ({"n": 65}, "n"),
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logit_bias": {"403": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop_token_ids": [403]}, "stop_token_ids"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": ["x" * 1000] * 9}, "stop"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(400)}, "prompt": [[5]] * 2622}, "logit_bias"),
        ({"stop_token_ids": [*range(3, 403)], "prompt": [[5]] * 1311, "n": 2}, "stop_token_ids"),
        ({"prompt": [[5]] * 4097, "n": 2}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"bogus": 1}}, "stream_options"),
        ({"temperatur": 1}, "temperatur"),
        ({"echo": "yes"}, "echo"),
        ({"model": None}, "model"),
    ],
)
async def test_bad_values_are_named_and_cost_nothing(
    make: Make, change: dict[str, Any], param: str
) -> None:
    harness = await make(1, 1).start()
    answer = await harness.http().post("/v1/completions", json=GOOD | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (
        400,
        param,
        "invalid_request_error",
    )
    assert error["message"] and set(error) == {"message", "type", "param", "code"}
    assert not harness.prefills[0].submits() and not harness.decodes[0].submits()


@pytest.mark.parametrize("n", [4, 70_000, 10**30])  # the second is more than any worker takes, too
@pytest.mark.parametrize("chat", [False, True])
async def test_too_many_choices_are_refused_with_the_bound(make: Make, n: int, chat: bool) -> None:
    harness = await make(0, 1, max_n=3).start()
    path, body = ("/v1/chat/completions", CHAT) if chat else ("/v1/completions", GOOD)
    answer = await harness.http().post(path, content=json.dumps(body | {"n": n}))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "n")
    assert (
        error["message"].startswith(f"n must be at most 3, not {n}: ")
        and "router.max_n" in error["message"]
    )
    assert (await harness.http().post(path, json=body | {"n": 3})).status_code == 200


async def test_the_product_of_choices_and_prompts_has_a_bound_of_its_own(make: Make) -> None:
    harness = await make(0, 1, max_n=10_000).start()
    for prompt, n, param in ([5], 9000, "n"), ([[5], [6]], 5000, "prompt"):
        answer = await harness.http().post(
            "/v1/completions", json=GOOD | {"prompt": prompt, "n": n}
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert (
            error["message"].startswith(f"n ({n}) ")
            and "must be at most 8192: " in error["message"]
        )


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto", "tools": []}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": False}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"prompt": "x"}, "prompt"),
        ({"add_special_tokens": True}, "add_special_tokens"),
    ],
)
async def test_bad_chat_values_are_named(make: Make, change: dict[str, Any], param: str) -> None:
    harness = await make(1, 1).start()
    answer = await harness.http().post("/v1/chat/completions", json=CHAT | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_harmless_parameters_are_taken(make: Make) -> None:
    harness = await make(1, 1).start()
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "temperature": None,
        "response_format": {"type": "text"},
    }
    assert (
        await harness.http().post("/v1/chat/completions", json=CHAT | harmless)
    ).status_code == 200
    neutral = {
        "best_of": 1,
        "suffix": None,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "logit_bias": {"5": -3},
    }
    assert (await harness.http().post("/v1/completions", json=GOOD | neutral)).status_code == 200
    assert harness.prefills[0].submits()[-1].sampling.logit_bias == {5: -3.0}
    for asks in ({"length_penalty": True}, {"use_beam_search": 0}):
        assert (await harness.http().post("/v1/completions", json=GOOD | asks)).status_code == 400


async def test_other_error_statuses(make: Make) -> None:
    harness = await make(1, 1, max_body_bytes=2048).start()
    http = harness.http()
    answer = await http.post("/v1/completions", json=GOOD | {"model": "other"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    answer = await http.post("/v1/completions", content=b"x" * 3000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

    async def parts() -> AsyncIterator[bytes]:  # of unknown length
        for _ in range(2):
            yield b"x" * 1500

    answer = await http.post("/v1/completions", content=parts())
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    for body in (b"{", b"[]", b'{"model": "\xff"}'):
        answer = await http.post("/v1/completions", content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert (await http.get("/v1/nothing")).json()["error"]["type"] == "not_found_error"
    refused = await http.get("/v1/completions", headers={"x-request-id": "here"})
    assert refused.status_code == 405 and refused.headers["x-request-id"] == "here"
    page = (await http.get("/metrics")).text
    for reason, status in (("not_found_error", 404), ("invalid_request_error", 405)):
        name = "pdserve_router_rejections_total"
        assert f'{name}{{reason="{reason}",status="{status}"}} 1.0' in page


def always(kind: str, submit: Submit) -> str:
    return kind


@pytest.mark.parametrize("stream", [False, True])
async def test_failures_before_the_first_token_have_a_status(make: Make, stream: bool) -> None:
    harness = await make(0, 1).start()
    for kind, status in (("invalid", 400), ("internal", 500)):
        harness.decodes[0].fail_submit = partial(always, kind)
        answer = await harness.http().post("/v1/completions", json=GOOD | {"stream": stream})
        assert (answer.status_code, "retry-after" in answer.headers) == (status, False)
    harness.decodes[0].die()
    await until(lambda: not harness.fleet.worker_ids)
    answer = await harness.http().post("/v1/completions", json=GOOD | {"stream": stream})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_workers")


async def test_a_failure_after_the_start_is_an_event_in_the_stream(make: Make) -> None:
    harness = await make(0, 1, resume_wait_s=0.02).start()
    harness.decodes[0].before_batch = lambda number: (
        harness.decodes[0].die() if number == 4 else None
    )
    answer = await harness.http().post(
        "/v1/completions", json=GOOD | {"stream": True, "ignore_eos": True}
    )
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert answer.status_code == 200 and answer.headers["content-type"].startswith(
        "text/event-stream"
    )
    assert events[-1] == "[DONE]" and json.loads(events[-2])["error"]["code"] == "no_workers"


async def test_models_health_and_metrics(make: Make) -> None:
    harness = await make(1, 1).start()
    http = harness.http()
    await http.post("/v1/completions", json=GOOD | {"max_tokens": 3, "ignore_eos": True})
    models = await harness.openai().models.list()
    assert [model.id for model in models.data] == [MODEL]
    assert (await http.get("/health")).status_code == 200
    page = (await http.get("/metrics")).text
    assert 'pdserve_engine_steps_total{kind="a\\"b",worker="d0",role="decode"} 3.0' in page
    assert page.count("# TYPE pdserve_engine_steps_total counter") == 1 and 'worker="p0"' in page
    assert 'pdserve_router_requests_total{outcome="ok"} 1.0' in page
    assert 'pdserve_router_workers{role="decode"} 1.0' in page
    harness.fleet.leave("d0")
    assert (await http.get("/health")).status_code == 503


@pytest.mark.parametrize("name", [MODEL, "org/name 1.0"])
async def test_one_model_by_its_name(make: Make, name: str) -> None:
    harness = await make(0, 1).start()
    harness.service.model_name = name
    client = harness.openai()
    model = await client.models.retrieve(name)
    assert (model.id, model.object) == (name, "model")
    assert model == (await client.models.list()).data[0]
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("gpt/x")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    assert "'gpt/x' does not exist" in caught.value.message and name in caught.value.message
    wrong = await harness.http().post(f"/v1/models/{MODEL}")
    assert wrong.status_code == 405 and wrong.json()["error"]["type"] == "invalid_request_error"
    assert set(wrong.headers["allow"].split(", ")) == {"GET", "HEAD"}


async def test_several_names_of_one_model(make: Make) -> None:
    """Any of them may be asked for, and the answer has it; metrics have the first."""
    harness = await make(0, 1).start()
    harness.service.aliases = ("org/other",)
    client = harness.openai()
    assert [model.id for model in (await client.models.list()).data] == [MODEL, "org/other"]
    assert (await client.models.retrieve("org/other")).id == "org/other"
    for name in (MODEL, "org/other"):
        body = GOOD | {"model": name, "max_tokens": 2}
        answer = await harness.http().post("/v1/completions", json=body)
        assert answer.json()["model"] == name
        lines = (await harness.http().post("/v1/completions", json=body | {"stream": True})).text
        assert f'"model":"{name}"' in lines
    with pytest.raises(openai.NotFoundError, match="this server has 'demo', 'org/other'"):
        await client.models.retrieve("third")
    page = (await harness.http().get("/metrics")).text
    assert f'model_name="{MODEL}"' in page and "org/other" not in page
    document = (await harness.http().get("/openapi.json")).json()
    model = document["components"]["schemas"]["CompletionRequest"]["properties"]["model"]
    assert model["enum"] == [MODEL, "org/other"]


def with_times(events: list[Event]) -> list[Event]:
    """As a worker sends them: the last token of each choice says where the leg's time went."""
    times = LegTimes(0.001, 0.002, 0.004, 0.005)
    return [
        msgspec.structs.replace(e, times=times) if isinstance(e, Delta) and e.finish_reason else e
        for e in events
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_parts_of_a_requests_time_add_up(make: Make, stream: bool) -> None:
    harness = await make(0, 1).start()
    harness.decodes[0].step_s = 0.02
    harness.decodes[0].mangle = with_times
    http = harness.http()
    body = GOOD | {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True, "stream": stream}
    for _ in range(2):
        await http.post("/v1/completions", json=body)
    registry = harness.service.metrics.registry

    def spent(part: str) -> float:
        value = registry.get_sample_value(
            "pdserve_router_request_time_seconds_total", {"part": part}
        )
        assert value is not None
        return value

    expected = {"queue": 0.002, "engine_host": 0.002, "device": 0.010}
    assert {part: spent(part) for part in expected} == pytest.approx(expected)
    total = registry.get_sample_value("pdserve_router_e2e_request_latency_seconds_sum")
    assert registry.get_sample_value("pdserve_router_e2e_request_latency_seconds_count") == 2
    assert total is not None and total > 0.08
    assert total == pytest.approx(0.014 + spent("admission") + spent("transport"))
    assert spent("admission") > 0 and spent("transport") > 2 * 3 * 0.02 - 0.014, (
        "steps that no worker told of"
    )
    before = spent("transport")
    await http.post(
        "/v1/completions",
        json=GOOD | {"prompt": [PROMPT, PROMPT], "max_tokens": 3, "stream": stream},
    )
    assert registry.get_sample_value("pdserve_router_e2e_request_latency_seconds_count") == 3
    assert spent("transport") == before, "several prompts share their time"


async def test_time_that_no_worker_told_is_not_called_transport(make: Make) -> None:
    """A stop string is found here while the worker goes on: it is cancelled, and its times never
    come."""
    harness = await make(0, 1).start()
    harness.decodes[0].step_s = 0.02
    harness.decodes[0].mangle = with_times
    http = harness.http()
    registry = harness.service.metrics.registry

    def told() -> dict[str, float]:
        name = "pdserve_router_request_time_seconds_total"
        return {
            p: registry.get_sample_value(name, {"part": p}) or 0.0
            for p in ("transport", "unreported", "device")
        }

    async def spent(**body: Any) -> dict[str, float]:
        before = told()
        answer = await http.post(
            "/v1/completions", json=GOOD | {"max_tokens": 12, "seed": 5} | body
        )
        texts.append(answer.json()["choices"][0]["text"])
        return {part: seconds - before[part] for part, seconds in told().items()}

    texts: list[str] = []
    whole = await spent()
    assert (
        whole["unreported"] == 0
        and whole["transport"] > 0.1
        and whole["device"] == pytest.approx(0.005)
    )
    stopped = await spent(stop=texts[0][8:10])
    assert len(texts[1]) < len(texts[0])
    assert stopped["transport"] == stopped["device"] == 0 and stopped["unreported"] > 0.02


class Client:
    """One ASGI call whose client can leave at any moment; httpx's transport cannot do that."""

    def __init__(self, harness: Harness, path: str, body: dict[str, Any]) -> None:
        self.sent: list[bytes] = []
        self.status = 0
        self.begun = False  # the answer: its head is always taken
        self.taking = asyncio.Event()
        self.taking.set()
        self._gone = asyncio.Event()
        self._body = json.dumps(body).encode()
        self._begun = False
        scope: Any = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "headers": [(b"content-type", b"application/json")],
        }
        scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": ""}
        scope |= {
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "server": ("x", 80),
            "client": ("y", 1),
        }
        self.call = asyncio.create_task(harness.app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if not self._begun:
            self._begun = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await asyncio.sleep(0)
        if self.begun:
            await self.taking.wait()
        self.begun = True
        self.status = message.get("status", self.status)
        self.sent.append(message.get("body", b""))

    def leave(self) -> None:
        self._gone.set()

    @property
    def complete(self) -> bool:
        return b"".join(self.sent).endswith(b"data: [DONE]\n\n") or (
            self.status == 200 and b"usage" in b"".join(self.sent)
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_everything_at_once(make: Make, stream: bool) -> None:
    harness = await make(1, 1).start()
    body = GOOD | {"max_tokens": 200, "ignore_eos": True, "stream": stream, "n": 2}
    harness.decodes[0].step_s = 0.01
    client = Client(harness, "/v1/completions", body)
    await until(lambda: harness.decodes[0].num_batches > 2)
    harness.decodes[0].going.clear()
    assert harness.world.held() > 0
    client.leave()
    await asyncio.wait_for(client.call, 60)
    assert await harness.world.settled() == 0
    assert any(isinstance(command, Cancel) for command in harness.decodes[0].commands)
    assert (
        harness.service.metrics.registry.get_sample_value(
            "pdserve_router_requests_total", {"outcome": "cancelled"}
        )
        == 1
    )


@pytest.mark.parametrize("turns", range(6))
async def test_a_call_that_is_cancelled_as_it_is_admitted_keeps_no_seat(
    make: Make, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long body is admitted in a task of its own, which may have ended before its caller knows
    it."""
    harness = await make(0, 1).start()
    admitted = asyncio.Event()
    admit = harness.service.admit

    async def noting(*args: Any, **kwargs: Any) -> Any:
        generation = await admit(*args, **kwargs)
        admitted.set()
        return generation

    monkeypatch.setattr(harness.service, "admit", noting)
    client = Client(
        harness, "/v1/completions", GOOD | {"prompt": [[10, 11, 12]] * 5000, "max_tokens": 1}
    )
    await admitted.wait()
    assert harness.service.admission.num_prompts == 5000
    for _ in range(turns):
        await asyncio.sleep(0)
    client.call.cancel()
    await asyncio.wait({client.call})
    await until(lambda: harness.service.admission.num_prompts == 0)


@pytest.mark.parametrize("moment", ["server_cancels", "send_fails"])
async def test_other_ways_to_lose_a_client(make: Make, moment: str) -> None:
    harness = await make(1, 1).start()
    harness.decodes[0].step_s = 0.01
    client = Client(
        harness, "/v1/completions", GOOD | {"max_tokens": 200, "ignore_eos": True, "stream": True}
    )
    await until(lambda: len(client.sent) > 3)
    if moment == "server_cancels":
        client.call.cancel()
    else:
        client._send = broken_send  # type: ignore[method-assign]
        client.sent = Broken()
    await asyncio.wait({client.call}, timeout=60)
    assert client.call.done()
    assert await harness.world.settled() == 0
    assert any(isinstance(command, Cancel) for command in harness.decodes[0].commands), (
        "it does not run to its end"
    )


async def broken_send(message: Any) -> None:
    raise OSError("broken pipe")


class Broken(list[bytes]):
    def append(self, item: bytes) -> None:
        raise OSError("broken pipe")


async def test_half_of_fifty_clients_leave_at_random_moments(make: Make) -> None:
    harness = await make(2, 2).start()
    for worker in [*harness.prefills, *harness.decodes]:
        worker.step_s = 0.002
    chance = random.Random(11)

    async def one(number: int) -> bool:
        prompt: Any = [PROMPT, [*PROMPT, number]] if number % 5 == 0 else [*PROMPT, number]
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": 25,
            "stream": number % 4 < 2,
            "n": 1 + number % 2,
        }
        client = Client(harness, "/v1/completions", body)
        if number % 2:
            await asyncio.sleep(chance.uniform(0, 0.08))
            client.leave()
        await asyncio.wait_for(client.call, 60)
        return client.complete

    complete = await asyncio.gather(*[one(number) for number in range(50)])
    assert all(complete[0::2]) and not all(complete[1::2])
    assert await harness.world.settled() == 0
    assert all(
        worker.outstanding_tokens == 0 and not worker.legs for worker in harness.fleet.workers
    )


async def test_the_first_token_is_flushed_alone(make: Make) -> None:
    harness = await make(1, 1).start()
    harness.decodes[0].going.clear()
    client = Client(
        harness,
        "/v1/chat/completions",
        CHAT | {"max_tokens": 2, "ignore_eos": True, "stream": True, "seed": 4},
    )
    await until(lambda: b'"role":"assistant"' in b"".join(client.sent))
    assert not client.complete
    harness.decodes[0].going.set()
    await client.call
    assert client.complete


async def test_httpx_sees_the_stream_headers(make: Make) -> None:
    harness = await make(1, 1).start()
    async with (
        harness.http() as http,
        http.stream("POST", "/v1/completions", json=GOOD | {"stream": True}) as answer,
    ):
        assert (
            answer.headers["cache-control"] == "no-cache" and "content-length" not in answer.headers
        )
        assert isinstance(answer, httpx.Response) and (await answer.aread()).endswith(
            b"data: [DONE]\n\n"
        )


async def test_a_stream_that_is_not_taken_is_given_up(make: Make) -> None:
    harness = await make(0, 1, client_timeout_s=0.2).start()
    client = Client(
        harness, "/v1/completions", GOOD | {"stream": True, "ignore_eos": True, "max_tokens": 200}
    )
    client.taking.clear()
    await asyncio.wait_for(client.call, 60)
    assert harness.service.admission.num_prompts == 0 and harness.world.held() == 0


RECOMMENDED: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.05,
}
NEUTRAL_VALUES: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def values_of(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in RECOMMENDED}


@pytest.mark.parametrize("chat", [False, True])
async def test_the_models_own_values_stand_for_what_is_not_said(make: Make, chat: bool) -> None:
    harness = await make(0, 1, sampling_defaults=RECOMMENDED).start()
    path, body = ("/v1/chat/completions", CHAT) if chat else ("/v1/completions", GOOD)
    for said in (
        {},
        dict.fromkeys(RECOMMENDED),
        NEUTRAL_VALUES,
        {"temperature": 1.0},
        {"top_k": 5, "min_p": None},
    ):
        answer = await harness.http().post(path, json=body | said)
        assert answer.status_code == 200, answer.text
        given = {name: value for name, value in said.items() if value is not None}
        assert values_of(harness.decodes[0].submits()[-1].sampling) == RECOMMENDED | given


async def test_without_a_call_s_parameters_the_models_count(make: Make) -> None:
    harness = await make(0, 1, sampling_defaults=RECOMMENDED | {"max_tokens": 9}).start()
    [result] = await harness.service.collect([[5, 6]], None)
    assert (
        values_of(harness.decodes[0].submits()[-1].sampling) == RECOMMENDED
        and len(result.token_ids) <= 9
    )
    await harness.service.collect([[5, 6]], SamplingParams())
    assert values_of(harness.decodes[0].submits()[-1].sampling) == NEUTRAL_VALUES


async def test_the_models_max_new_tokens_are_for_chat_and_no_promise(make: Make) -> None:
    harness = make(0, 2, sampling_defaults={"max_tokens": 60})
    small, large = harness.decodes
    small.max_tokens = 50
    large.max_tokens = 200
    await harness.start()

    async def usage(path: str, body: dict[str, Any]) -> int:
        answer = await harness.http().post(path, json=body | {"ignore_eos": True})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        return answer.json()["usage"]["completion_tokens"]

    chat = {name: value for name, value in CHAT.items() if name != "max_tokens"}
    num_prompt = len(harness.tokenizer.apply_chat_template(CHAT["messages"]))
    lengths = [await usage("/v1/chat/completions", chat | {"cache_salt": str(i)}) for i in range(4)]
    assert sorted(set(lengths)) == [50 - num_prompt, 60], (
        "what fits the one worker, and all of it at the other"
    )
    assert await usage("/v1/chat/completions", chat | {"max_tokens": 70}) == 70, "what is said wins"
    assert await usage("/v1/completions", {"model": MODEL, "prompt": [5, 6]}) == 16


def test_a_default_that_cannot_be_stops_the_router(make: Make) -> None:
    with pytest.raises(ValueError, match=r"generation_config.json: top_p must .*'none'"):
        make(0, 1, sampling_defaults={"top_p": 7})
