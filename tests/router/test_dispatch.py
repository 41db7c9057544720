"""Whole requests through a router over fake workers: streams, choices, stop strings, failover,
cancellation."""

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
import pytest
from router.fake_worker import FakeWorker, expected_tokens, finish_of
from router.harness import Harness, settle, until

from pdserve.protocol.commands import Cancel, Command, Prepare, Submit
from pdserve.protocol.events import Arrived, Delta, Event, Failed
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import ApiError, RequestFailed
from pdserve.text.stop import StopStrings

PROMPT = tuple(range(10, 30))
Make = Callable[..., Harness]


@pytest.fixture(autouse=True, params=[0, 5], ids=["", "overlapped"])
def parts_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every test with D prepared while P computes, and without."""
    monkeypatch.setattr(FakeWorker, "parts_from", request.param)
    return request.param


announces_nothing = pytest.mark.parametrize("parts_from", [0], indirect=True, ids=[""])
"""Marks tests in which no prompt is announced: overlapped they would run twice on the same
thing."""


def sampling(**values: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 7, "max_tokens": 12, "ignore_eos": True} | values))


@pytest.mark.parametrize("n", [1, 3])
async def test_split_request(make: Make, n: int) -> None:
    harness = await make(1, 1).start()
    params = sampling(n=n)
    harness.check(await harness.collect(PROMPT, params), PROMPT, params)
    prefill = harness.prefills[0]
    decode = harness.decodes[0]
    assert [s.phase for s in prefill.submits()] == ["prefill"] and [
        s.phase for s in decode.submits()
    ] == ["decode"]
    assert all(len(start.forced) == 1 for start in decode.submits()[0].starts)
    assert prefill.submits()[0].key.attempt != decode.submits()[0].key.attempt
    assert await harness.world.settled() == 0


async def test_a_long_prompt_is_announced_to_d(make: Make, parts_from: int) -> None:
    harness = await make(1, 1).start()
    prefill = harness.prefills[0]
    decode = harness.decodes[0]
    prefill.step_s = 0.05
    params = sampling()
    for prompt in (PROMPT, PROMPT[:4]):
        harness.check(await harness.collect(prompt, params), prompt, params)
    kinds = [type(c).__name__ for c in decode.commands if isinstance(c, Prepare | Submit)]
    assert kinds == (["Prepare"] if parts_from else []) + ["Submit", "Submit"]
    assert [s.overlap for s in prefill.submits()] == [bool(parts_from), False]
    prepares = [c for c in decode.commands if isinstance(c, Prepare)]
    assert all(c.submit.key == decode.submits()[0].key for c in prepares)
    assert all(c.source.key == prefill.submits()[0].key for c in prepares)
    assert await harness.world.settled() == 0


async def test_a_prompt_is_not_cut_for_a_fast_link(
    make: Make, parts_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeWorker, "link_rate", 3e9)
    harness = await make(1, 1).start()
    harness.check(await harness.collect(PROMPT, sampling()), PROMPT, sampling())
    assert [s.overlap for s in harness.prefills[0].submits()] == [False]
    assert any(isinstance(c, Prepare) for c in harness.decodes[0].commands) == bool(parts_from)
    assert await harness.world.settled() == 0


async def test_the_announced_d_dies_while_p_computes(make: Make, parts_from: int) -> None:
    harness = await make(1, 2).start()
    harness.prefills[0].going.clear()
    params = sampling(n=2)
    answer = asyncio.create_task(harness.collect(PROMPT, params))
    await until(lambda: bool(harness.prefills[0].submits()))
    if parts_from:
        await until(lambda: any(d.prepared for d in harness.decodes))
    planned = next((d for d in harness.decodes if d.prepared), harness.decodes[0])
    planned.die()
    harness.prefills[0].going.set()
    harness.check(await answer, PROMPT, params)
    assert len(harness.prefills[0].submits()) == 1, "what P computes is not lost with D"
    assert await harness.world.settled() == 0


async def test_first_token_does_not_wait_for_the_transfer(make: Make) -> None:
    harness = await make(1, 1).start()
    on_its_way = asyncio.Event()
    send = harness.decodes[0].send

    async def slowly(command: Command) -> None:
        if isinstance(command, Submit):
            await on_its_way.wait()
        await send(command)

    harness.decodes[0].send = slowly  # type: ignore[method-assign]
    chunks = harness.service.generate([PROMPT], sampling(max_tokens=2))
    first = await asyncio.wait_for(anext(chunks), 60)
    assert len(first.token_ids) == 1
    on_its_way.set()
    assert [len(chunk.token_ids) async for chunk in chunks] == [1]


async def test_choices_that_end_at_p_do_not_reach_d(make: Make) -> None:
    harness = await make(1, 1).start()
    params = sampling(max_tokens=1, n=2)
    harness.check(await harness.collect(PROMPT, params), PROMPT, params)
    assert harness.decodes[0].submits() == []
    assert await harness.world.settled() == 0  # the ticket too

    first = expected_tokens(PROMPT, sampling(max_tokens=1), 0)[0][0]
    params = sampling(n=3, stop_token_ids=[first])
    results = await harness.collect(PROMPT, params)
    harness.check(results, PROMPT, params)
    assert results[0].stop_reason == first
    assert [start.choice for start in harness.decodes[0].submits()[-1].starts] == [1, 2]
    assert await harness.world.settled() == 0


@announces_nothing
async def test_short_prompts_and_missing_prefill_are_not_split(make: Make) -> None:
    harness = await make(1, 1, split_min_tokens=10).start()
    params = sampling()
    harness.check(await harness.collect(PROMPT[:9], params), PROMPT[:9], params)
    assert harness.decodes[0].submits()[0].phase == "full" and harness.prefills[0].submits() == []
    alone = await make(0, 1).start()
    alone.check(await alone.collect(PROMPT, params), PROMPT, params)
    assert [s.phase for s in alone.decodes[0].submits()] == ["full"]


async def test_eos_ends_and_its_text_is_hidden(make: Make) -> None:
    harness = await make(1, 1).start()
    endings = set()
    for seed in range(12):
        params = sampling(seed=seed, ignore_eos=False, max_tokens=40)
        results = await harness.collect(PROMPT, params)
        harness.check(results, PROMPT, params)
        endings.add(results[0].finish_reason)
    assert endings == {"stop", "length"}


async def test_seed_is_drawn_once(make: Make) -> None:
    harness = await make(1, 1).start()
    results = await harness.collect(PROMPT, sampling(seed=None))
    seeds = {w.submits()[0].sampling.seed for w in (harness.prefills[0], harness.decodes[0])}
    assert len(seeds) == 1 and None not in seeds
    harness.check(results, PROMPT, sampling(seed=seeds.pop()))
    again = await harness.collect(PROMPT, sampling(seed=None))
    assert again[0].token_ids != results[0].token_ids


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("at", [0, 4, 8])
async def test_stop_string_over_token_borders(make: Make, include: bool, at: int) -> None:
    harness = await make(1, 1).start()
    params = readable(harness)
    tokens = expected_tokens(PROMPT, params, 0)[0]
    text = harness.tokenizer.decode(tokens)
    before, through = (harness.tokenizer.decode(tokens[:i]) for i in (at, at + 2))
    stop = text[max(len(before) - 1, 0) : len(through) - 0]
    params = msgspec.structs.replace(params, stop=[stop], include_stop_str_in_output=include)
    harness.decodes[0].step_s = 0.005
    results = await harness.collect(PROMPT, params)
    begin = text.index(stop)
    assert results[0].text == text[: begin + len(stop) if include else begin]
    assert (results[0].finish_reason, results[0].stop_reason) == ("stop", stop)
    assert harness.tokenizer.decode(results[0].token_ids).startswith(text[: begin + len(stop)])
    assert not harness.tokenizer.decode(results[0].token_ids[:-1]).startswith(
        text[: begin + len(stop)]
    )
    assert await harness.world.settled() == 0


def readable(harness: Harness) -> SamplingParams:
    """A seed whose first choice is text without U+FFFD, so that tokens and characters line up."""
    for seed in range(2000):
        params = sampling(seed=seed)
        tokens = expected_tokens(PROMPT, params, 0)[0]
        texts = [harness.tokenizer.token_text(token) for token in tokens]
        if all("\ufffd" not in text and text for text in texts) and len(set(texts)) == len(texts):
            return params
    raise AssertionError("no seed gives readable text")


async def test_a_stop_string_cancels_only_its_choice(make: Make) -> None:
    harness = await make(1, 1).start()
    params = readable(harness)
    params = msgspec.structs.replace(params, n=3, max_tokens=12)
    text = harness.tokenizer.decode(expected_tokens(PROMPT, params, 0)[0])
    params = msgspec.structs.replace(params, stop=[text[6:14]])
    harness.decodes[0].step_s = 0.005
    results = await harness.collect(PROMPT, params)
    assert results[0].stop_reason == text[6:14] and results[0].text == text[:6]
    for result in results[1:]:
        assert result.token_ids == expected_tokens(PROMPT, params, result.index)[0]
    cancels = [c for c in harness.decodes[0].commands if isinstance(c, Cancel)]
    assert [c.choices for c in cancels] == [(0,)]
    assert await harness.world.settled() == 0


async def test_stop_strings_wait_for_min_tokens(make: Make) -> None:
    harness = await make(1, 1).start()
    params = readable(harness)
    tokens = expected_tokens(PROMPT, params, 0)[0]
    early = harness.tokenizer.token_text(tokens[1])
    late = harness.tokenizer.token_text(tokens[8])
    params = msgspec.structs.replace(params, stop=[early, late], min_tokens=6)
    results = await harness.collect(PROMPT, params)
    assert results[0].stop_reason == late and results[0].token_ids == tokens[:9]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("point", range(1, 9))
async def test_decode_worker_dies_at_any_point(make: Make, point: int, n: int) -> None:
    harness = await make(1, 2).start()
    params = sampling(n=n, max_tokens=7)
    for decode in harness.decodes:
        decode.before_batch = partial(die_once, harness, decode, point)
    results = await harness.collect(PROMPT, params)
    harness.check(results, PROMPT, params)
    assert await harness.world.settled() == 0
    dead = [worker for worker in harness.decodes if not worker.alive]
    assert len(dead) == (1 if point <= 7 else 0)  # one Arrived and six steps
    alive = next(worker for worker in harness.decodes if worker.alive)
    if dead:
        assert alive.submits()[0].phase == "full"
        assert len(alive.submits()[0].starts[0].forced) == max(1, point - 1)


def die_once(harness: Harness, worker: FakeWorker, point: int, number: int) -> None:
    if number == point and all(w.alive for w in [*harness.decodes, *harness.prefills]):
        worker.die()


@pytest.mark.parametrize("when", ["before", "at_handoff", "after"])
async def test_prefill_worker_dies(make: Make, when: str) -> None:
    harness = await make(2, 1).start()
    params = sampling()

    def die(worker: FakeWorker, number: int) -> None:
        if all(w.alive for w in harness.prefills):
            worker.die()

    def die_after(worker: FakeWorker, events: list[Event]) -> list[Event]:
        if all(w.alive for w in harness.prefills) and len(events) > 1:
            asyncio.get_running_loop().call_soon(worker.die)
        return events

    for prefill in harness.prefills:
        if when == "before":
            prefill.step_s = 0.02
            prefill.before_batch = partial(die, prefill)
        elif when == "at_handoff":
            prefill.mangle = partial(die_after, prefill)
    if when == "after":
        harness.decodes[0].before_batch = lambda number: (
            die(chosen(harness), number) if number == 3 else None
        )
    harness.check(await harness.collect(PROMPT, params), PROMPT, params)
    assert sum(worker.alive for worker in harness.prefills) == 1
    assert await harness.world.settled() == 0


def chosen(harness: Harness) -> FakeWorker:
    return next(worker for worker in harness.prefills if worker.submits())


async def test_the_only_decode_worker_dies_and_a_new_one_takes_over(make: Make) -> None:
    harness = await make(1, 1, resume_wait_s=60.0).start()
    harness.decodes[0].before_batch = lambda number: (
        harness.decodes[0].die() if number == 4 else None
    )
    task = asyncio.create_task(harness.collect(PROMPT, sampling()))
    await until(lambda: not harness.fleet.worker_ids - {"p0"})
    await settle()
    harness.add("d9", "decode")
    harness.check(await task, PROMPT, sampling())


async def test_nobody_left_is_unavailable(make: Make) -> None:
    harness = await make(1, 1, resume_wait_s=0.05).start()
    harness.decodes[0].before_batch = lambda number: (
        harness.decodes[0].die() if number == 4 else None
    )
    with pytest.raises(RequestFailed) as caught:
        await harness.collect(PROMPT, sampling())
    assert (caught.value.failure, caught.value.status) == ("unavailable", 503)
    with pytest.raises(RequestFailed):
        await harness.collect(PROMPT, sampling())


@pytest.mark.parametrize("role", ["prefills", "decodes"])
async def test_internal_failure_goes_to_another_worker(make: Make, role: str) -> None:
    harness = await make(2, 2).start()
    group = getattr(harness, role)
    for worker in group:
        worker.fail_submit = lambda submit: (
            "internal" if sum(len(w.submits()) for w in group) == 1 else None
        )
    harness.check(await harness.collect(PROMPT, sampling()), PROMPT, sampling())
    assert [len(worker.submits()) for worker in group].count(1) == 2
    assert await harness.world.settled() == 0


@announces_nothing
async def test_a_single_worker_that_fails_once_is_tried_again(make: Make) -> None:
    harness = await make(0, 1).start()
    decode = harness.decodes[0]
    decode.fail_submit = lambda submit: "internal" if len(decode.submits()) == 1 else None
    harness.check(await harness.collect(PROMPT, sampling()), PROMPT, sampling())


async def test_attempts_are_bounded(make: Make) -> None:
    harness = await make(1, 2, max_attempts=3).start()
    for decode in harness.decodes:
        decode.fail_submit = lambda submit: "internal"
    with pytest.raises(RequestFailed) as caught:
        await harness.collect(PROMPT, sampling())
    assert caught.value.status == 500 and "internal by test" in caught.value.message
    assert sum(len(decode.submits()) for decode in harness.decodes) == 3
    assert await harness.world.settled() == 0


@announces_nothing
async def test_attempts_count_only_those_without_progress(make: Make) -> None:
    harness = await make(0, 2, max_attempts=2).start()
    counts: dict[int, int] = {}

    def fail_third(events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, Delta):
                counts[event.attempt] = counts.get(event.attempt, 0) + 1
                if counts[event.attempt] == 3:
                    return [
                        Failed(
                            request_id=event.request_id,
                            attempt=event.attempt,
                            kind="internal",
                            message="third",
                        )
                    ]
        return events

    for decode in harness.decodes:
        decode.mangle = fail_third
    harness.check(
        await harness.collect(PROMPT, sampling(max_tokens=9)), PROMPT, sampling(max_tokens=9)
    )
    assert len(counts) == 5


@announces_nothing
async def test_a_refusal_reaches_the_client_and_is_not_tried_again(make: Make) -> None:
    harness = await make(0, 2).start()
    for decode in harness.decodes:
        decode.fail_submit = lambda submit: "invalid"
    with pytest.raises(ApiError) as caught:
        await harness.collect(PROMPT, sampling())
    assert caught.value.status == 400
    assert sum(len(d.submits()) for d in harness.decodes) == 1


async def test_a_prefill_worker_that_fails_leaves_the_work_to_d(make: Make) -> None:
    harness = await make(1, 1).start()
    harness.prefills[0].fail_submit = lambda submit: "internal"
    harness.check(await harness.collect(PROMPT, sampling()), PROMPT, sampling())
    assert [s.phase for s in harness.decodes[0].submits()] == ["full"]


async def test_duplicated_and_stale_events_change_nothing(make: Make) -> None:
    harness = await make(1, 2).start()
    old: list[Event] = []

    def noisy(events: list[Event]) -> list[Event]:
        old.extend(event for event in events if isinstance(event, Delta))
        return [*old[-6:], *events, *events, *old[:3]]

    for worker in [*harness.prefills, *harness.decodes]:
        worker.mangle = noisy
    harness.decodes[0].before_batch = lambda number: (
        harness.decodes[0].die() if number == 5 else None
    )
    for _ in range(3):
        harness.check(await harness.collect(PROMPT, sampling(n=2)), PROMPT, sampling(n=2))
    assert harness.fleet.intake.num_stale_events > 0
    assert await harness.world.settled() == 0


@announces_nothing
async def test_reordered_events_are_a_failure_of_the_leg_not_of_the_answer(make: Make) -> None:
    harness = await make(0, 2).start()
    kept: list[Event] = []

    def swap(events: list[Event]) -> list[Event]:
        if kept:
            events = [*events, *kept]
            kept.clear()
            return events
        if (
            any(isinstance(event, Delta) and event.position == 4 for event in events)
            and harness.fleet.intake.num_stale_events == 0
        ):
            kept.extend(events)
            return []
        return events

    for decode in harness.decodes:
        decode.mangle = swap
    harness.check(await harness.collect(PROMPT, sampling()), PROMPT, sampling())
    assert sum(len(decode.submits()) for decode in harness.decodes) >= 2
    assert await harness.world.settled() == 0


@pytest.mark.parametrize("slow", ["submit", "cancel"])
async def test_cancel_and_submit_may_cross(make: Make, slow: str) -> None:
    harness = await make(1, 1).start()
    kind = Submit if slow == "submit" else Cancel
    for worker in [*harness.prefills, *harness.decodes]:
        worker.step_s = 0.005
        worker.send_delay = lambda command: 0.05 if isinstance(command, kind) else 0.0
    for wait in (0.0, 0.02, 0.07, 0.13):
        task = asyncio.create_task(harness.collect(PROMPT, sampling(max_tokens=100)))
        await asyncio.sleep(wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.sleep(0.1)
    assert await harness.world.settled() == 0


async def test_cancelling_leaves_nothing_held(make: Make) -> None:
    harness = await make(2, 2).start()
    for worker in [*harness.prefills, *harness.decodes]:
        worker.step_s = 0.002
    chance = random.Random(3)

    async def one(number: int) -> bool:
        params = sampling(seed=number, n=1 + number % 3, max_tokens=30)
        task = asyncio.create_task(harness.collect((*PROMPT, number), params))
        if number % 2:
            harness.check(await task, (*PROMPT, number), params)
            return True
        await asyncio.sleep(chance.uniform(0, 0.06))
        task.cancel()
        return not await asyncio.wait({task}) or not task.cancelled()

    done = await asyncio.gather(*[one(number) for number in range(50)])
    assert sum(done) >= 25
    assert await harness.world.settled() == 0
    assert all(
        worker.outstanding_tokens == 0 and not worker.legs for worker in harness.fleet.workers
    )


async def test_logprobs_and_cached_tokens_survive_a_failover(make: Make) -> None:
    harness = await make(1, 2).start()
    for decode in harness.decodes:
        decode.before_batch = partial(die_once, harness, decode, 4)
    generation = await harness.service.admit([PROMPT], sampling(logprobs=2, prompt_logprobs=1))
    results = await generation.collect()
    assert [p.token_id for p in results[0].logprobs] == results[0].token_ids
    assert generation.num_cached_tokens == 1
    scored = list(generation.prompt_logprobs(0) or ())
    assert scored[0] is None
    assert [p.token_id for p in scored[1:] if p is not None] == list(PROMPT[1:])
    later = [s for d in harness.decodes for s in d.submits()]
    assert later and all(s.sampling.prompt_logprobs is None for s in later)


async def test_metrics_count_what_happened(make: Make) -> None:
    harness = await make(1, 2).start()
    for decode in harness.decodes:
        decode.before_batch = partial(die_once, harness, decode, 4)
    await harness.collect(PROMPT, sampling())
    value = harness.service.metrics.registry.get_sample_value
    assert value("pdserve_router_requests_total", {"outcome": "ok"}) == 1
    assert value("pdserve_router_failovers_total", {"reason": "lost"}) == 1
    assert value("pdserve_router_split_decisions_total", {"plan": "split", "reason": "always"}) == 1
    assert (
        value("pdserve_router_split_decisions_total", {"plan": "whole", "reason": "resumed"}) == 1
    )
    assert value("pdserve_router_kv_arrivals_total", {"source": "p2p"}) == 1
    assert value("pdserve_router_generation_tokens_total") == 12
    assert value("pdserve_router_prompt_tokens_total") == len(PROMPT)
    assert value("pdserve_router_num_requests_running") == 0
    assert value("pdserve_router_time_to_first_token_seconds_count") == 1
    assert value("pdserve_router_inter_token_latency_seconds_count") == 11
    assert value("pdserve_router_request_time_per_output_token_seconds_count") == 1
    assert value("pdserve_router_failover_pause_seconds_count") == 1
    assert value("pdserve_router_request_prompt_tokens_sum") == len(PROMPT)
    assert value("pdserve_router_request_generation_tokens_sum") == 12
    assert value("pdserve_router_request_success_total", {"finished_reason": "length"}) == 1


@announces_nothing
async def test_a_call_that_is_left_counts_as_aborted(make: Make) -> None:
    harness = await make(0, 1).start()
    harness.decodes[0].step_s = 0.01
    received = time.perf_counter() - 5
    generation = await harness.service.admit(
        [PROMPT], sampling(n=2, ignore_eos=True), received=received
    )
    async with aclosing(generation.stream()) as batches:
        await anext(batches)
    value = harness.service.metrics.registry.get_sample_value
    assert value("pdserve_router_request_success_total", {"finished_reason": "abort"}) == 2
    assert value("pdserve_router_requests_total", {"outcome": "cancelled"}) == 1
    first, count = (
        value(f"pdserve_router_time_to_first_token_seconds_{part}") for part in ("sum", "count")
    )
    assert first is not None and count
    assert 5 <= first / count < time.perf_counter() - received, "counts from the call's arrival"


@announces_nothing
def test_the_fake_worker_finishes_as_the_protocol_says() -> None:
    assert finish_of(sampling(max_tokens=2), [5, 6]) == ("length", None)
    assert finish_of(sampling(stop_token_ids=[6]), [5, 6]) == ("stop", 6)


@announces_nothing
@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("prompt: too large to send"), 400), (RuntimeError("odd"), 500)],
)
async def test_a_command_that_cannot_be_sent_costs_no_worker(
    make: Make, error: Exception, status: int
) -> None:
    harness = await make(0, 2).start()

    def refuse(command: Command) -> float:
        if isinstance(command, Submit):
            raise error
        return 0.0

    for decode in harness.decodes:
        decode.send_delay = refuse
    with pytest.raises(ApiError) as caught:
        await harness.collect(PROMPT, sampling())
    assert caught.value.status == status and str(error) in caught.value.message
    assert len(harness.fleet.workers) == 2
    assert all(
        worker.outstanding_tokens == 0 and not worker.legs for worker in harness.fleet.workers
    )


async def test_a_prefill_worker_is_free_for_others_after_its_hand_off(make: Make) -> None:
    harness = await make(1, 1).start()
    harness.decodes[0].step_s = 0.1
    task = asyncio.create_task(harness.collect(PROMPT, sampling(max_tokens=3)))
    await until(lambda: harness.decodes[0].submits())
    loads = {worker.worker_id: worker.outstanding_tokens for worker in harness.fleet.workers}
    assert loads["p0"] == 0 and loads["d0"] > len(PROMPT)
    assert harness.prefills[0].tickets
    harness.check(await task, PROMPT, sampling(max_tokens=3))


async def test_a_ticket_that_d_could_not_use_is_dropped_at_once(make: Make) -> None:
    harness = await make(1, 1).start()
    prefill = harness.prefills[0]
    decode = harness.decodes[0]

    def lose(number: int) -> None:
        if number == 1:  # the batch with Arrived is about to go out: pretend that the pull failed
            prefill.tickets[prefill.submits()[0].key] = PROMPT

    def recomputed(events: list[Event]) -> list[Event]:
        return [
            Arrived(request_id=e.request_id, attempt=e.attempt, source="recompute")
            if isinstance(e, Arrived)
            else e
            for e in events
        ]

    decode.step_s = 0.03
    decode.before_batch = lose
    decode.mangle = recomputed
    task = asyncio.create_task(harness.collect(PROMPT, sampling()))
    await until(
        lambda: (
            Cancel(key=prefill.submits()[0].key) in prefill.commands if prefill.submits() else False
        )
    )
    assert not task.done() and not prefill.tickets
    harness.check(await task, PROMPT, sampling())


async def test_the_tables_of_stop_strings_are_built_once_a_call(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And workers do not hear of the strings."""
    built: list[StopStrings] = []

    class Counted(StopStrings):
        def __init__(self, stops: Any) -> None:
            built.append(self)
            super().__init__(stops)

    monkeypatch.setattr("pdserve.router.request.service.StopStrings", Counted)
    harness = await make(1, 1).start()
    params = sampling(n=3, stop=["no such text", "nor this"])
    results = await harness.service.collect([PROMPT, PROMPT[1:]], params)
    assert len(results) == 6 and len(built) == 1
    assert all(
        not s.sampling.stop
        for worker in (*harness.prefills, *harness.decodes)
        for s in worker.submits()
    )
