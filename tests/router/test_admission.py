"""A router limits what it takes on. The rest is refused with 429 before anything is computed, and
counted by reason. Places are given back whatever happens."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from router.harness import MODEL, Harness, until

from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.admission import Admission, Rate
from pdserve.router.errors import ApiError

Make = Callable[..., Harness]
PROMPT = list(range(10, 30))
GOOD = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
SHORT = SamplingParams(max_tokens=4)
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def always(kind: str) -> Callable[[Any], str]:
    """For fail_submit: every submit ends so."""
    return lambda submit: kind


def is_free(harness: Harness) -> bool:
    admission = harness.service.admission
    return (admission.num_prompts, admission.queued_tokens) == (0, 0)


@pytest.mark.parametrize("chat", [False, True])
async def test_too_many_prompts_at_once(make: Make, chat: bool) -> None:
    harness = await make(1, 1, max_concurrent_prompts=2).start()
    harness.prefills[0].going.clear()
    http = harness.http()
    two = asyncio.create_task(
        http.post("/v1/completions", json=GOOD | {"prompt": [PROMPT, PROMPT]})
    )
    await until(lambda: len(harness.prefills[0].submits()) == 2)
    path, body = ("/v1/chat/completions", CHAT) if chat else ("/v1/completions", GOOD)
    answer = await http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (
        429,
        "rate_limit_error",
        "too_many_concurrent_prompts",
    )
    assert (
        1 <= int(answer.headers["retry-after"]) <= 60
        and "router.max_concurrent_prompts" in error["message"]
    )
    assert len(harness.prefills[0].submits()) == 2, "nothing was computed for it"
    page = (await http.get("/metrics")).text
    assert 'rejections_total{reason="too_many_concurrent_prompts",status="429"} 1.0' in page
    harness.prefills[0].going.set()
    assert (await two).status_code == 200 and is_free(harness)
    assert (await http.post(path, json=body)).status_code == 200


async def test_more_prompts_than_there_ever_will_be(make: Make) -> None:
    harness = await make(0, 1, max_concurrent_prompts=2).start()
    answer = await harness.http().post("/v1/completions", json=GOOD | {"prompt": [PROMPT] * 3})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (
        400,
        "prompt",
        "too_many_prompts",
    )
    assert is_free(harness)


async def test_too_many_queued_tokens(make: Make) -> None:
    harness = await make(1, 1, max_queued_tokens=30).start()
    [prefill] = harness.prefills
    [decode] = harness.decodes
    prefill.going.clear()
    decode.going.clear()
    http = harness.http()
    first = asyncio.create_task(http.post("/v1/completions", json=GOOD))
    await until(lambda: harness.service.admission.queued_tokens == 20)
    assert "pdserve_router_queued_tokens 20.0" in (await http.get("/metrics")).text
    answer = await http.post("/v1/completions", json=GOOD)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (429, "too_many_queued_tokens")
    assert "router.max_queued_tokens" in error["message"] and "retry-after" in answer.headers
    small = asyncio.create_task(http.post("/v1/completions", json=GOOD | {"prompt": PROMPT[:10]}))
    await until(lambda: harness.service.admission.queued_tokens == 30)
    prefill.going.set()
    await until(lambda: harness.service.admission.queued_tokens == 0)
    third = asyncio.create_task(http.post("/v1/completions", json=GOOD))
    await until(lambda: third.done() or len(decode.submits()) == 3)
    assert not first.done() and not third.done(), "computed prompts do not wait any more"
    decode.going.set()
    assert {(await task).status_code for task in (first, small, third)} == {200} and is_free(
        harness
    )


async def test_openais_client_knows_that_it_is_too_much(make: Make) -> None:
    harness = await make(0, 1, max_concurrent_prompts=1).start()
    harness.decodes[0].going.clear()
    client = harness.openai()
    retrying = harness.openai().with_options(max_retries=5)
    params: Any = {"model": MODEL, "messages": CHAT["messages"], "max_tokens": 2}
    first = asyncio.create_task(client.chat.completions.create(**params))
    await until(lambda: harness.service.admission.num_prompts == 1)
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(**params, stream=stream)
        assert int(caught.value.response.headers["retry-after"]) >= 1
    again = asyncio.create_task(
        retrying.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2)
    )
    refusals = (
        "pdserve_router_rejections_total",
        {"reason": "too_many_concurrent_prompts", "status": "429"},
    )
    await until(lambda: harness.service.metrics.registry.get_sample_value(*refusals) == 3)
    harness.decodes[0].going.set()
    assert (await again).usage is not None and (await first).usage is not None, (
        "it came again by itself"
    )
    assert is_free(harness)


async def test_a_call_alone_may_be_longer_than_the_queue(make: Make) -> None:
    harness = await make(0, 1, max_queued_tokens=5).start()
    assert (await harness.http().post("/v1/completions", json=GOOD)).status_code == 200


async def test_a_burst_does_not_slip_through_while_texts_are_tokenised(make: Make) -> None:
    """Long texts are tokenised in threads: all calls of a burst wait there at the same time."""
    harness = make(0, 1, max_concurrent_prompts=3)
    harness.decodes[0].max_tokens = 100_000
    harness.decodes[0].step_s = 0.05
    await harness.start()
    http = harness.http()
    text = "fox " * 2000
    bodies: list[Any] = [("/v1/completions", GOOD | {"prompt": text})] * 6
    bodies += [
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": text}]})
    ] * 6
    answers = await asyncio.gather(*(http.post(path, json=body) for path, body in bodies))
    statuses = sorted(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429} and statuses.count(200) >= 3 and is_free(harness)


@pytest.mark.parametrize("stream", [False, True])
async def test_places_are_given_back_when_it_fails(make: Make, stream: bool) -> None:
    harness = await make(0, 1, resume_wait_s=0.05).start()
    http = harness.http()
    bad: list[dict[str, Any]] = [
        {"prompt": [PROMPT, [403]]},
        {"max_tokens": 300},
        {"prompt": [PROMPT, [5] * 300]},
    ]
    for change in bad:
        assert (
            await http.post("/v1/completions", json=GOOD | change | {"stream": stream})
        ).status_code == 400
        assert is_free(harness)
    for kind in ("invalid", "internal"):
        harness.decodes[0].fail_submit = always(kind)
        for prompt in (PROMPT, [PROMPT, PROMPT]):
            await http.post("/v1/completions", json=GOOD | {"stream": stream, "prompt": prompt})
            assert is_free(harness)
    harness.decodes[0].fail_submit = lambda submit: None
    harness.decodes[0].going.clear()
    task = asyncio.create_task(
        harness.service.collect([PROMPT, PROMPT], SamplingParams(max_tokens=4))
    )
    await until(lambda: harness.decodes[0].held() == harness.service.admission.num_prompts == 2)
    task.cancel()
    await asyncio.wait([task])
    assert is_free(harness)


async def test_places_are_given_back_when_no_response_is_made(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await make(0, 1).start()

    def broken(*_: Any) -> Any:
        raise RuntimeError("by test")

    monkeypatch.setattr("pdserve.router.http.openai.dialects.CompletionResponder", broken)
    assert (await harness.http().post("/v1/completions", json=GOOD)).status_code == 500
    assert is_free(harness) and not harness.decodes[0].submits()


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"prompt": PROMPT[:9]}, "prompt", "router.max_prompt_tokens"),
        ({"prompt": "x" * 40_000}, "prompt", "at least 3077 tokens in prompt"),
        ({"priority": 2**31}, "priority", "from -2147483647 to 2147483647"),
        ({"priority": -(2**31)}, "priority", "the lowest runs first"),
        ({"priority": "high"}, "priority", "Expected `int"),
        ({"priority": 10**30}, "priority", "must be from"),
        ({"cache_salt": "s" * 257}, "cache_salt", "at most 256"),
    ],
)
async def test_limits_name_the_parameter_and_the_cure(
    make: Make, change: dict[str, Any], param: str, says: str
) -> None:
    harness = await make(0, 1, max_prompt_tokens=8).start()
    answer = await harness.http().post(
        "/v1/completions", content=json.dumps(GOOD | {"prompt": [5]} | change)
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and says in error["message"]
    assert not harness.decodes[0].submits() and is_free(harness)


async def test_what_is_too_long_in_a_chat_is_its_messages(make: Make) -> None:
    harness = await make(0, 1, max_prompt_tokens=8).start()
    answer = await harness.http().post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("priority", [None, 0, -5, 7, 7.0])
async def test_priority_reaches_the_workers(make: Make, priority: Any) -> None:
    harness = await make(1, 1).start()
    for path, body in (("/v1/completions", GOOD), ("/v1/chat/completions", CHAT)):
        assert (
            await harness.http().post(path, json=body | {"priority": priority})
        ).status_code == 200
    submits = [*harness.prefills[0].submits(), *harness.decodes[0].submits()]
    assert {submit.priority for submit in submits} == {int(priority or 0)}


async def test_strangers_may_not_overtake_where_a_lowest_priority_is_set(make: Make) -> None:
    harness = await make(0, 1, min_priority=0).start()
    for path, body in (("/v1/completions", GOOD), ("/v1/chat/completions", CHAT)):
        answer = await harness.http().post(path, json=body | {"priority": -1})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (
            400,
            "priority",
        ) and "router.min_priority" in error["message"]
        for allowed in (None, 0, 3):
            assert (
                await harness.http().post(path, json=body | {"priority": allowed})
            ).status_code == 200
    assert [
        choice.finish_reason
        for choice in await harness.service.collect([PROMPT], SHORT, priority=-1)
    ]
    document = (await harness.http().get("/openapi.json")).json()
    variants = document["components"]["schemas"]["ChatRequest"]["properties"]["priority"]["anyOf"]
    assert {"minimum": 0, "maximum": 2**31 - 1}.items() <= variants[0].items()


async def test_priority_is_kept_over_failover(make: Make) -> None:
    harness = await make(1, 2).start()
    for worker in harness.decodes:
        worker.step_s = 0.02
    sampling = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    asked = asyncio.create_task(harness.service.collect([PROMPT], sampling, priority=-3))
    await until(lambda: any(worker.submits() for worker in harness.decodes))
    victim = next(worker for worker in harness.decodes if worker.submits())
    victim.die()
    harness.check(await asked, tuple(PROMPT), sampling)
    submits = [s for worker in (*harness.prefills, *harness.decodes) for s in worker.submits()]
    assert len(submits) == 3 and {submit.priority for submit in submits} == {-3}


async def test_an_error_never_repeats_megabytes(make: Make) -> None:
    harness = await make(0, 1).start()
    long = "x" * (1 << 20)
    for change in ({"model": long}, {long: 1}, {"stop": [long, ""]}, {"echo": long}):
        answer = await harness.http().post("/v1/completions", json=GOOD | change)
        assert answer.status_code in (400, 404) and len(answer.content) < 5000


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 100_000, b'{"metadata":' + b"[" * 5000]
)
async def test_deep_json_is_refused(make: Make, body: bytes) -> None:
    harness = await make(0, 1).start()
    answer = await harness.http().post("/v1/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_retry_after_follows_from_the_pace() -> None:
    clock = Clock()
    rate = Rate(clock)
    assert rate.seconds_for(1000) == 1, "nothing is known yet"
    for _ in range(100):
        clock.now += 0.1
        rate.add(50)  # 500 a second
    assert 3 <= rate.seconds_for(2000) <= 5
    assert rate.seconds_for(1) == 1 and rate.seconds_for(10**9) == 60
    clock.now += 100
    assert rate.seconds_for(2000) == 1, "of long ago"


def test_seats_are_counted_once() -> None:
    admission = Admission(2, 100)
    first, second = admission.enter(2)
    with pytest.raises(ApiError):
        admission.enter(1)
    first.fill(30)
    second.fill(20)
    first.computed()
    first.computed()
    assert admission.queued_tokens == 20
    for seat in (first, first, second):
        seat.leave()
    first.computed()
    assert (admission.num_prompts, admission.queued_tokens) == (0, 0)
