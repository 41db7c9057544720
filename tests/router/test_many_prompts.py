"""Thousands of prompts in one call begin and end a few at a time: everybody else's turn comes
between."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from router.harness import MODEL, Harness, until
from router.turns import Turns

from pdserve.background.pace import Pace
from pdserve.protocol.codec import decode_routed
from pdserve.protocol.commands import Cancel
from pdserve.protocol.events import Delta, Event, PromptScored, RoutedBatch, TokenLogprob
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import RequestFailed
from pdserve.router.fleet import streams
from pdserve.router.fleet.inbox import Inbox, Lost
from pdserve.router.fleet.streams import EVENT_BYTES, EVENTS_AT_ONCE
from pdserve.router.fleet.wakes import WAKES_AT_ONCE
from pdserve.router.request.generation import RUNS_AT_ONCE, Generation
from pdserve.router.request.request_run import RequestRun

Make = Callable[..., Harness]
PROMPTS = [[5, 6 + number % 300] for number in range(600)]
LONG = SamplingParams(max_tokens=200, ignore_eos=True, seed=1)


def noted(turns: Turns, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Count each first call of the method of a run."""
    method = getattr(RequestRun, name)
    seen = set[int]()

    def noting(run: RequestRun, *args: Any) -> Any:
        if id(run) not in seen:
            seen.add(id(run))
            turns.note()
        return method(run, *args)

    monkeypatch.setattr(RequestRun, name, noting)


async def test_they_begin_and_are_cancelled_a_few_at_a_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(0, 2)
    for worker in harness.decodes:
        worker.going.clear()
    await harness.start()
    turns = Turns()
    noted(turns, monkeypatch, "_choose")
    generation = await harness.service.admit(PROMPTS, LONG)
    reading = asyncio.create_task(generation.collect())
    await until(lambda: harness.world.held() == len(PROMPTS))
    assert sum(turns.counts) == len(PROMPTS) and max(turns.counts) <= RUNS_AT_ONCE
    noted(turns, monkeypatch, "close")
    turns.counts = [0]
    generation.close()
    assert max(turns.counts) == 0, "it does not wait for them"
    generation.close()
    reading.cancel()
    await until(lambda: harness.world.held() == 0)
    assert max(turns.counts) <= RUNS_AT_ONCE
    assert harness.service.admission.num_prompts == harness.service.admission.queued_tokens == 0
    assert sum(isinstance(c, Cancel) for worker in harness.decodes for c in worker.commands) == len(
        PROMPTS
    )
    turns.close()
    await asyncio.wait([reading])
    assert all(not worker.legs for worker in harness.fleet.workers)


@pytest.mark.parametrize("after", [0.0, 0.01, 0.05])
async def test_a_client_that_leaves_while_they_begin(make: Make, after: float) -> None:
    harness = await make(0, 1).start()
    body = {"model": MODEL, "prompt": PROMPTS, "max_tokens": 200, "ignore_eos": True}
    asked = asyncio.create_task(harness.http().post("/v1/completions", json=body))
    await asyncio.sleep(after)
    asked.cancel()
    await asyncio.wait([asked])
    admission = harness.service.admission
    await until(
        lambda: (harness.world.held(), admission.num_prompts, admission.queued_tokens) == (0, 0, 0)
    )
    assert all(not worker.legs for worker in harness.fleet.workers)


@pytest.mark.parametrize("stream", [False, True])
async def test_they_are_answered(make: Make, stream: bool) -> None:
    harness = await make(0, 2).start()
    body = {"model": MODEL, "prompt": PROMPTS, "max_tokens": 2, "seed": 3, "stream": stream}
    answer = await harness.http(timeout=120).post("/v1/completions", json=body)
    assert answer.status_code == 200
    if stream:
        assert answer.text.count('"finish_reason":"') == len(PROMPTS) and answer.text.endswith(
            "data: [DONE]\n\n"
        )
    else:
        expected = await harness.service.collect(PROMPTS, SamplingParams(max_tokens=2, seed=3))
        texts = [choice["text"] for choice in answer.json()["choices"]]
        assert texts == [choice.text for choice in expected]
    assert harness.service.admission.num_prompts == 0


async def test_an_error_while_they_begin_ends_the_call(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would wait for prompts that nobody began."""
    harness = await make(0, 1).start()

    async def broken(pace: Pace) -> None:
        raise KeyError("by test")

    generation = await harness.service.admit(PROMPTS, LONG)
    monkeypatch.setattr(Pace, "rest", broken)
    with pytest.raises(KeyError, match="by test"):
        await asyncio.wait_for(generation.collect(), 60)
    monkeypatch.undo()
    generation.close()


async def test_they_end_a_few_at_a_time_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's message that ends all of them wakes a part of them in each turn."""
    harness = make(0, 1)
    harness.decodes[0].going.clear()
    await harness.start()
    generation = await harness.service.admit(PROMPTS, LONG)
    reading = asyncio.create_task(generation.collect())
    await until(lambda: harness.world.held() == len(PROMPTS))
    [worker] = harness.fleet.workers
    ends: list[Event] = [
        Delta(request_id, attempt, 0, 0, tuple(range(3, 203)), "length")
        for request_id, attempt in list(worker.legs)
    ]
    turns = Turns()
    noted(turns, monkeypatch, "_drain")
    harness.decodes[0].push(None, ends)
    await asyncio.wait_for(reading, 60)
    assert sum(turns.counts) == len(PROMPTS) and max(turns.counts) <= EVENTS_AT_ONCE
    turns.close()


async def test_what_has_ended_keeps_no_prompt_though_others_of_its_call_go_on(make: Make) -> None:
    """A call of hundreds of texts takes its time, and each text's ids and keys take 16 bytes a
    token."""

    def kept() -> list[bool]:
        return [
            bool(run._job.prompt_token_ids or run._prompt._token_ids or run._prompt._chains)
            for run in runs
        ]

    harness = make(0, 1)
    harness.decodes[0].going.clear()
    await harness.start()
    generation = await harness.service.admit(PROMPTS[:3], LONG)
    runs = generation._runs
    reading = asyncio.create_task(generation.collect())
    await until(lambda: harness.world.held() == 3)
    assert kept() == [True, True, True]
    [worker] = harness.fleet.workers
    name, attempt = list(worker.legs)[1]
    end = Delta(name, attempt, 0, 0, tuple(range(3, 203)), "length")
    harness.decodes[0].push(None, [end])
    await until(lambda: kept() == [True, False, True], 5)
    assert generation.num_prompt_tokens == 6 and [
        line.prompt_tokens for line in generation.timelines()
    ] == [2, 2, 2]
    await ended(generation, reading)


@pytest.mark.parametrize("shows", [{}, {"echo": True}, {"return_token_ids": True}])
async def test_prompts_stay_only_for_answers_that_show_them(
    make: Make, monkeypatch: pytest.MonkeyPatch, shows: dict[str, bool]
) -> None:
    harness = await make(0, 1).start()
    kept: list[int] = []
    served = Generation.served

    def noting(generation: Generation) -> None:
        kept.append(len(generation.prompts))
        served(generation)

    monkeypatch.setattr(Generation, "served", noting)
    body = {"model": MODEL, "prompt": [[5, 6], [7, 8]], "max_tokens": 2, "seed": 1} | shows
    answer = await harness.http().post("/v1/completions", json=body)
    assert answer.json()["usage"]["prompt_tokens"] == 4
    assert kept == [2 if shows else 0]


@pytest.mark.parametrize("is_large", [False, True], ids=["small messages", "large messages"])
async def test_messages_that_wait_are_read_a_few_at_a_time(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """A worker sent them while this router was busy: tokens in one message per step, or pieces of a
    prompt's scores."""
    harness = await make(0, 1).start()
    entries = tuple(
        TokenLogprob(5, -1.0, 1, ((5, -1.0),) * 20) for _ in range(1000 if is_large else 1)
    )
    event = PromptScored(request_id="a", attempt=1, cached_tokens=0, logprobs=entries)
    worker = harness.decodes[0]
    turns = Turns()
    [stream] = worker._streams.values()
    message = worker._batch([event])
    num_messages = 640 if not is_large else 20
    at_once = EVENTS_AT_ONCE if not is_large else EVENTS_AT_ONCE * EVENT_BYTES / len(message) + 1

    def decode(data: bytes) -> RoutedBatch:
        turns.note()
        return decode_routed(data)

    monkeypatch.setattr(streams, "decode_routed", decode)
    for _ in range(num_messages):
        stream.put_nowait(message)
    await until(lambda: harness.fleet.intake.num_stale_events == num_messages, 20)
    assert sum(turns.counts) == num_messages and max(turns.counts) <= at_once
    turns.close()


async def begun(harness: Harness) -> tuple[Generation, asyncio.Task[Any]]:
    """All of them are at workers that take their time."""
    for worker in harness.decodes:
        worker.step_s = 30.0
    await harness.start()
    generation = await harness.service.admit(PROMPTS, LONG)
    reading = asyncio.create_task(generation.collect())
    await until(lambda: harness.world.held() == len(PROMPTS), 20)
    return generation, reading


async def ended(generation: Generation, reading: asyncio.Task[Any]) -> None:
    generation.close()
    reading.cancel()
    await asyncio.wait([reading])


async def test_they_go_on_elsewhere_a_few_at_a_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers die in the same moment: what they had goes on at the third."""
    harness = make(0, 3)
    generation, reading = await begun(harness)
    dying = harness.decodes[:2]
    num_lost = sum(worker.held() for worker in dying)
    turns = Turns()
    noted(turns, monkeypatch, "_recover")
    for worker in dying:
        worker.die()
    await until(lambda: harness.decodes[2].held() == len(PROMPTS), 20)
    assert sum(turns.counts) == num_lost > 10 * WAKES_AT_ONCE and max(turns.counts) <= WAKES_AT_ONCE
    turns.close()
    await ended(generation, reading)


async def test_those_that_wait_for_a_worker_go_on_a_few_at_a_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(0, 1, resume_wait_s=30.0)
    generation, reading = await begun(harness)
    harness.decodes[0].die()
    await until(lambda: harness.fleet.changes.num_awaiting == len(PROMPTS), 20)
    turns = Turns()
    noted(turns, monkeypatch, "_begin")
    joined = harness.add("d9", "decode")
    joined.step_s = 30.0
    await until(lambda: joined.held() == len(PROMPTS), 20)
    assert sum(turns.counts) == len(PROMPTS) and max(turns.counts) <= WAKES_AT_ONCE
    assert not harness.fleet.changes.num_awaiting
    turns.close()
    await ended(generation, reading)


async def test_those_that_wait_in_vain_leave_nothing(make: Make) -> None:
    harness = make(0, 1, resume_wait_s=0.1)
    _, reading = await begun(harness)
    harness.decodes[0].die()
    await asyncio.wait_for(asyncio.wait([reading]), 20)
    assert isinstance(reading.exception(), RequestFailed)
    await until(lambda: not harness.fleet.changes.num_awaiting)


async def test_silent_legs_go_on_elsewhere_a_few_at_a_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(0, 2)
    generation, reading = await begun(harness)
    [silent, _] = harness.fleet.workers
    legs = list(silent.legs.values())
    turns = Turns()
    noted(turns, monkeypatch, "_recover")
    for leg in legs:
        leg.last_sign -= 3600.0
    harness.decodes[0].report()
    await until(lambda: sum(turns.counts) == len(legs), 20)
    assert len(legs) > 10 * WAKES_AT_ONCE and max(turns.counts) <= WAKES_AT_ONCE
    turns.close()
    await ended(generation, reading)


async def test_a_router_that_stops_tells_all_of_them(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(0, 1)
    generation, reading = await begun(harness)
    told: list[Any] = []
    monkeypatch.setattr(Inbox, "put", lambda _, leg, event: told.append(event))
    await harness.fleet.close()
    assert told == [Lost("the router stops")] * len(PROMPTS)
    await ended(generation, reading)
