"""Timelines: what the router keeps of each leg and hand-over, shown on demand, logged, and read by
its metrics."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest
from router.fake_worker import FakeWorker, expected_tokens
from router.harness import MODEL, Harness, until
from support.clock import Clock

from pdserve.protocol.commands import Submit
from pdserve.protocol.events import Arrived, Delta, Event, LegTimes
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import RequestFailed
from pdserve.router.request.generation import Generation
from pdserve.router.request.timeline import LegReport, PromptTimeline, Timeline

PROMPT = tuple(range(10, 30))
GREEDY = SamplingParams(seed=7, max_tokens=8, ignore_eos=True)
TIMES = LegTimes(0.001, 0.002, 0.004, 0.005)
P2P = {
    "num_bytes": 3_000_000,
    "num_early_bytes": 1_000_000,
    "num_descriptors": 4,
    "transport": "tcp",
    "seconds": 0.005,
    "wait_s": 0.001,
    "read_s": 0.006,
    "lag_s": 0.0025,
    "cached_tokens": 16,
}
ASK = {"x-pdserve-timeline": "1"}
BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": list(PROMPT),
    "max_tokens": 8,
    "seed": 7,
    "ignore_eos": True,
}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello you"}],
    "max_tokens": 8,
}
Make = Callable[..., Harness]
MakeRunning = Callable[..., Awaitable[Harness]]


def told(events: list[Event]) -> list[Event]:
    """As a worker tells it: times with the last token of each choice, and what it pulled."""
    handed = any(type(event).__name__ == "Handoff" for event in events)

    def one(event: Event) -> Event:
        if isinstance(event, Delta) and (event.finish_reason or handed):
            return msgspec.structs.replace(event, times=TIMES)
        if isinstance(event, Arrived) and event.source == "p2p":
            return msgspec.structs.replace(event, **P2P)
        return event

    return [one(event) for event in events]


@pytest.fixture
async def start(make: Make) -> MakeRunning:
    async def started(num_prefill: int, num_decode: int, **config: Any) -> Harness:
        harness = await make(num_prefill, num_decode, **config).start()
        for worker in harness.world.workers.values():
            worker.mangle = told
        return harness

    return started


async def run(harness: Harness, *prompts: tuple[int, ...], **sampling: Any) -> list[PromptTimeline]:
    asked = msgspec.structs.replace(GREEDY, **sampling)
    generation = await harness.service.admit(prompts or [PROMPT], asked)
    await asyncio.wait_for(generation.collect(), 60)
    return list(generation.timelines())


def in_order(*moments: float | None) -> bool:
    known = [moment for moment in moments if moment is not None]
    return len(known) == len(moments) and sorted(known) == known and known[0] >= 0


@pytest.mark.parametrize("parts_from", [0, 5], ids=["", "overlapped"])
async def test_split(start: MakeRunning, parts_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWorker, "parts_from", parts_from)
    harness = await start(1, 1)
    for worker in harness.world.workers.values():
        worker.step_s = 0.01
    [line] = await run(harness)
    p, d = line.legs
    assert (p.worker, p.role, p.phase, p.end, p.prepared_s) == (
        "p0",
        "prefill",
        "prefill",
        "handed over",
        None,
    )
    assert (d.worker, d.role, d.phase, d.end, d.reason) == (
        "d0",
        "decode",
        "decode",
        "finished",
        "",
    )
    assert (d.prepared_s is not None) == bool(parts_from) and p.attempt != d.attempt
    assert p.kv == []
    [moved] = d.kv
    assert (moved.source, moved.bytes, moved.early_bytes, moved.descriptors) == (
        "p2p",
        3_000_000,
        1_000_000,
        4,
    )
    assert (moved.transport, moved.cached_tokens, moved.reason, moved.detail) == ("tcp", 16, "", "")
    assert (moved.seconds, moved.wait_s, moved.transfer_s, moved.lag_s) == (
        0.005,
        0.001,
        0.004,
        0.0025,
    )
    assert moved.gb_per_s == pytest.approx(0.5)
    assert [(leg.queue_s, leg.prefill_s, leg.decode_s, leg.device_s) for leg in (p, d)] == [
        (0.001, 0.002, 0.004, 0.005)
    ] * 2
    assert in_order(
        p.submitted_s, line.first_token_s, d.submitted_s, p.ended_s, d.ended_s, line.total_s
    )
    assert p.submitted_s is not None and line.first_token_s is not None
    assert line.first_token_s - p.submitted_s > 0.009, "P's step is between them"
    assert (
        line.transport_s == pytest.approx(line.total_s - 0.014, abs=2e-6)
        and line.unreported_s is None
    )
    assert (line.outcome, line.prompt_tokens, line.cached_tokens, line.generated_tokens) == (
        "ok",
        20,
        1,
        8,
    )
    assert line.failovers == 0 and line.admission_s > 0


async def test_whole(start: MakeRunning) -> None:
    [line] = await run(await start(0, 1))
    [leg] = line.legs
    assert (leg.worker, leg.phase, leg.end, leg.kv, leg.complete) == (
        "d0",
        "full",
        "finished",
        [],
        True,
    )
    assert line.transport_s is not None


def lines_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "pdserve.timeline"]


async def test_failed_pull_says_why(start: MakeRunning, caplog: pytest.LogCaptureFixture) -> None:
    harness = await start(1, 1)
    failed = {
        "source": "recompute",
        "reason": "peer-lost",
        "detail": "no route to host",
        "seconds": 0.2,
        "num_bytes": 0,
    }

    def fail(events: list[Event]) -> list[Event]:
        found = []
        for event in told(events):
            found.append(
                msgspec.structs.replace(event, **failed) if isinstance(event, Arrived) else event
            )
            if isinstance(event, Arrived):
                found.append(
                    msgspec.structs.replace(event, source="pool", num_bytes=512, seconds=0.05)
                )
        return found

    harness.decodes[0].mangle = fail
    with caplog.at_level(logging.INFO, "pdserve.timeline"):
        [line] = await run(harness)
    p, d = line.legs
    assert (p.end, d.end, line.outcome) == ("handed over", "finished", "ok")
    lost, pool = d.kv
    assert (lost.source, lost.reason, lost.detail, lost.seconds) == (
        "recompute",
        "peer-lost",
        "no route to host",
        0.2,
    )
    assert lost.lag_s is None and lost.bytes == 0
    assert (pool.source, pool.bytes, pool.seconds, pool.lag_s) == ("pool", 512, 0.05, None)
    [record] = lines_of(caplog)
    assert record.levelno == logging.INFO and line.request_id in record.message
    assert msgspec.json.decode(record.message.split(": ", 1)[1], type=PromptTimeline) == line


async def test_good_prompts_are_logged_for_debugging_only(
    start: MakeRunning, caplog: pytest.LogCaptureFixture
) -> None:
    harness = await start(1, 1)
    with caplog.at_level(logging.INFO, "pdserve.timeline"):
        await run(harness)
    assert not lines_of(caplog)
    with caplog.at_level(logging.DEBUG, "pdserve.timeline"):
        [line] = await run(harness)
    assert [(r.levelno, line.request_id in r.message) for r in lines_of(caplog)] == [
        (logging.DEBUG, True)
    ]


async def test_failover(start: MakeRunning, caplog: pytest.LogCaptureFixture) -> None:
    harness = await start(1, 2)
    for worker in harness.decodes:
        worker.step_s = 0.02

    def die_at_the_third_token(number: int) -> None:
        busy = next((d for d in harness.decodes if d.submits() and d.num_batches >= 3), None)
        if busy is not None and all(d.alive for d in harness.decodes):
            busy.die()

    for worker in harness.decodes:
        worker.before_batch = die_at_the_third_token
    with caplog.at_level(logging.INFO, "pdserve.timeline"):
        [line] = await run(harness)
    p, lost, again = line.legs
    assert (p.end, lost.end, again.end) == ("handed over", "lost", "finished")
    assert lost.reason and lost.worker != again.worker and again.phase == "full"
    assert lost.complete is False and lost.queue_s is None and again.complete
    assert line.failovers == 1 and line.transport_s is None and line.unreported_s is not None
    assert [r.levelno for r in lines_of(caplog)] == [logging.INFO]


async def test_refused_attempt_and_silence_are_named(start: MakeRunning) -> None:
    clock = Clock()
    harness = await start(0, 2, attempt_deadline_s=3, now=clock)
    refused = iter([True])
    for worker in harness.decodes:
        worker.fail_submit = lambda submit: "internal" if next(refused, False) else None
    [line] = await run(harness)
    assert [(leg.end, leg.reason) for leg in line.legs] == [
        ("lost", "internal: internal by test"),
        ("finished", ""),
    ]
    lost: list[Submit] = []

    def loses(submit: Submit) -> bool:
        lost.append(submit)
        return len(lost) == 1

    for worker in harness.decodes:
        worker.loses = loses
    running = asyncio.create_task(run(harness))
    await until(lambda: lost)
    await harness.pass_time(clock, 4)
    [line] = await running
    assert line.failovers == 1 and line.legs[0].reason == "no sign of progress for 3 s"


async def test_choices_share_a_leg(start: MakeRunning) -> None:
    harness = await start(1, 1)
    [line] = await run(harness, n=3)
    assert [leg.end for leg in line.legs] == ["handed over", "finished"]
    assert line.generated_tokens == 24
    first = expected_tokens(PROMPT, GREEDY, 0)[0][0]
    [line] = await run(harness, n=1, stop_token_ids=[first])
    assert [leg.end for leg in line.legs] == ["finished"], "nothing was left to hand over"


async def test_a_line_a_prompt(start: MakeRunning) -> None:
    lines = await run(await start(1, 1), PROMPT, PROMPT[:10], n=2)
    assert [(line.prompt, line.prompt_tokens, len(line.legs)) for line in lines] == [
        (0, 20, 2),
        (1, 10, 2),
    ]
    assert lines[0].request_id != lines[1].request_id


async def test_cancelled(start: MakeRunning) -> None:
    harness = await start(1, 1)
    harness.decodes[0].step_s = 0.05
    generation: Generation = await harness.service.admit([PROMPT], GREEDY)
    batches = generation.stream()
    await anext(batches)
    await until(lambda: bool(harness.decodes[0].submits()))
    await batches.aclose()
    [line] = generation.timelines()
    assert line.outcome == "cancelled" and {leg.end for leg in line.legs} <= {
        "cancelled",
        "handed over",
    }
    assert line.legs[-1].end == "cancelled" and line.unreported_s is not None
    again = list(generation.timelines())
    assert again == [line], "it stands still behind its end"


async def test_hopeless_request_is_told_in_the_log(
    start: MakeRunning, caplog: pytest.LogCaptureFixture
) -> None:
    harness = await start(0, 1, max_attempts=2)
    harness.decodes[0].fail_submit = lambda submit: "internal"
    with caplog.at_level(logging.INFO, "pdserve.timeline"), pytest.raises(RequestFailed):
        await run(harness)
    [record] = lines_of(caplog)
    line = json.loads(record.message.split(": ", 1)[1])
    assert line["outcome"] == "internal" and [leg["end"] for leg in line["legs"]] == [
        "lost",
        "lost",
    ]
    assert line["first_token_s"] is None and line["generated_tokens"] == 0


def test_bookkeeping_of_one_leg() -> None:
    """The first end counts, the newest times do, and a leg owes them from its Submit on."""
    line = Timeline()
    line.opened(0, "w", "both", "full")
    assert line.complete and line.times == []
    line.submitted(0, 11.0)
    assert not line.complete
    line.told(0, LegTimes(1, 1, 1, 1))
    line.told(0, TIMES)
    assert line.complete and line.times == [TIMES] and not line.is_troubled
    line.owes_times(0)
    line.ended(0, "lost", 12.0, "why")
    line.ended(0, "cancelled", 13.0)
    [leg] = line.legs(10.0)
    assert isinstance(leg, LegReport)
    assert (leg.submitted_s, leg.ended_s, leg.end, leg.reason, leg.complete) == (
        1.0,
        2.0,
        "lost",
        "why",
        False,
    )
    assert leg.queue_s == TIMES.queue_s


# --- over HTTP ---


def data_of(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize(("path", "body"), [("completions", BODY), ("chat/completions", CHAT)])
async def test_only_on_demand(start: MakeRunning, path: str, body: dict[str, Any]) -> None:
    harness = await start(1, 1, split_min_tokens=1)
    http = harness.http()

    async def post(given: dict[str, str], **more: Any) -> httpx.Response:
        headers = {"x-request-id": "r", **given}
        return await http.post(
            f"/v1/{path}", json=body | {"temperature": 0, "seed": 7} | more, headers=headers
        )

    plain = (await post({})).json()
    shown = (await post(ASK)).json()
    [line] = shown.pop("timeline")
    parsed = msgspec.convert(line, PromptTimeline)
    assert parsed.request_id.startswith(shown["id"]) and [leg.phase for leg in parsed.legs] == [
        "prefill",
        "decode",
    ]
    assert parsed.outcome == "ok" and parsed.legs[1].kv[0].bytes == 3_000_000
    plain["created"] = shown["created"] = 0
    assert shown == plain and list(shown) == list(plain)

    for usage in (False, True):
        options = {"stream": True, "stream_options": {"include_usage": usage}}
        without = data_of(await post({"x-pdserve-timeline": "0"}, **options))
        events = data_of(await post(ASK, **options))
        last = events[-1]
        assert last["choices"] == [] and ("usage" in last) == usage
        assert [line["outcome"] for line in last.pop("timeline")] == ["ok"]
        if not usage:
            assert events.pop().keys() == {"id", "object", "created", "model", "choices"}
        for event in (*without, *events):
            event["created"] = 0
        assert events == without


async def test_without_the_header_not_a_byte_differs(
    start: MakeRunning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against what is sent when timelines cannot be shown at all."""
    harness = await start(1, 1)
    monkeypatch.setattr("pdserve.router.http.openai.responder.time.time", lambda: 1.0)
    http = harness.http()
    headers = {"x-request-id": "r"}

    async def bodies() -> list[bytes]:
        streamed = BODY | {"stream": True, "stream_options": {"include_usage": True}}
        return [
            (await http.post("/v1/completions", json=b, headers=headers)).content
            for b in (BODY, streamed)
        ]

    before = await bodies()
    monkeypatch.delattr(Generation, "timelines")
    assert await bodies() == before


@pytest.mark.parametrize("value", ["", "2", "true", "01"])
async def test_other_values_are_refused(start: MakeRunning, value: str) -> None:
    harness = await start(0, 1)
    for path, body in (("completions", BODY), ("chat/completions", CHAT)):
        answer = await harness.http().post(
            f"/v1/{path}", json=body, headers={"x-pdserve-timeline": value}
        )
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (
            error["param"] == "x-pdserve-timeline"
            and f"must be 0 or 1, not {value!r}" in error["message"]
        )
    assert not harness.decodes[0].submits()


@pytest.mark.parametrize("usage", [False, True])
async def test_openai_client_goes_on_working(start: MakeRunning, usage: bool) -> None:
    client = (await start(1, 1)).openai()
    options: dict[str, Any] = {"extra_headers": ASK, "seed": 7, "temperature": 0}
    whole: Any = await client.chat.completions.create(**CHAT, **options)
    assert whole.timeline[0]["outcome"] == "ok"
    streamed: dict[str, Any] = CHAT | options | {"stream_options": {"include_usage": usage}}
    chunks: list[Any] = [
        chunk async for chunk in await client.chat.completions.create(**streamed, stream=True)
    ]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].timeline[0]["legs"][0]["worker"] and (chunks[-1].usage is not None) == usage
    async with client.chat.completions.stream(**streamed) as stream:  # the client's own accumulator
        events = [event async for event in stream]
    assert events and stream.current_completion_snapshot.choices[0].message.content == text
    plain: dict[str, Any] = {
        **BODY,
        "seed": 7,
        "extra_body": {"ignore_eos": True},
        "extra_headers": ASK,
    }
    del plain["ignore_eos"]
    pieces: list[Any] = [
        chunk async for chunk in await client.completions.create(**plain, stream=True)
    ]
    assert pieces[-1].choices == [] and pieces[-1].timeline[0]["generated_tokens"] == 8
