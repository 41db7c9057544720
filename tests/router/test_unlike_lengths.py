"""Requests without max_tokens at decode workers of unlike limits: each fills the worker that
decodes it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from router.fake_worker import FakeWorker, expected_tokens
from router.harness import Harness, until

from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import RequestFailed

PROMPT = tuple(range(10, 30))
Make = Callable[..., Harness]


def open_ended(**values: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 7, "max_tokens": None, "ignore_eos": True} | values))


async def start(make: Make, num_prefill: int, *limits: int, **config: Any) -> Harness:
    """Decode workers that take so many tokens."""
    harness = make(num_prefill, len(limits), **config)
    for worker, limit in zip(harness.decodes, limits, strict=True):
        worker.max_tokens = limit
    return await harness.start()


def tokens_at(worker: FakeWorker, choice: int = 0, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    """All that fit this worker."""
    return expected_tokens(prompt, open_ended(max_tokens=worker.max_tokens - len(prompt)), choice)[
        0
    ]


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_pools_that_differ_by_one_token_share_the_work(make: Make, num_prefill: int) -> None:
    harness = await start(make, num_prefill, 60, 60, 61, 60)
    results = await asyncio.gather(*(harness.collect(PROMPT, open_ended()) for _ in range(40)))
    shares = [len(worker.submits()) for worker in harness.decodes]
    assert sum(shares) == 40 and min(shares) >= 4
    assert {result.finish_reason for [result] in results} == {"length"}
    assert sorted({len(result.token_ids) for [result] in results}) == [40, 41]
    assert all(
        s.sampling.max_tokens is None for worker in harness.decodes for s in worker.submits()
    )
    assert await harness.world.settled() == 0


async def test_a_request_survives_the_worker_that_has_the_most_room(make: Make) -> None:
    harness = await start(make, 0, 61, 60, 60, 60, split="never")
    large, *others = harness.decodes
    for worker in harness.decodes:
        worker.step_s = 0.01
    answers = [asyncio.create_task(harness.collect(PROMPT, open_ended())) for _ in range(8)]
    await until(lambda: large.held() > 0 and sum(worker.held() for worker in harness.decodes) == 8)
    large.die()
    for [result] in await asyncio.gather(*answers):
        assert (result.token_ids, result.finish_reason) == (tokens_at(others[0]), "length")


async def test_explicit_max_tokens_go_where_they_fit(make: Make) -> None:
    harness = await start(make, 1, 60, 61)
    params = open_ended(max_tokens=41)
    for _ in range(4):
        harness.check(await harness.collect(PROMPT, params), PROMPT, params)
    assert [len(worker.submits()) for worker in harness.decodes] == [0, 4]


async def test_min_tokens_ask_for_room_as_well(make: Make) -> None:
    harness = await start(make, 0, 60, 80, split="never")
    for _ in range(4):
        [result] = await harness.collect(PROMPT, open_ended(min_tokens=50))
        assert len(result.token_ids) == 60
    assert [len(worker.submits()) for worker in harness.decodes] == [0, 4]


async def test_what_has_more_tokens_than_a_worker_takes_goes_to_one_that_can(make: Make) -> None:
    harness = await start(make, 0, 80, 30, 70, split="never")
    first, small, other = harness.decodes
    small.max_tokens = 30
    first.step_s = other.step_s = 0.005
    for worker in (small, other):
        worker.queue_tokens = 100_000  # so that it begins at the first
        worker.push(None, [worker.snapshot()])
    answer = asyncio.create_task(harness.collect(PROMPT, open_ended()))
    await until(lambda: first.num_batches > 15)
    first.die()
    [result] = await answer
    assert (result.token_ids, result.finish_reason) == (tokens_at(other), "length")
    assert small.submits() == [] and len(other.submits()[0].starts[0].forced) >= 10


async def begun_at(
    harness: Harness, worker: FakeWorker, params: SamplingParams, num_steps: int
) -> asyncio.Task[Any]:
    """A request that this worker alone takes at first, after so many steps."""
    worker.step_s = 0.005
    answer = asyncio.create_task(harness.collect(PROMPT, params))
    await until(lambda: worker.num_batches >= num_steps)
    return answer


async def test_it_ends_by_length_where_no_worker_has_more_room(make: Make) -> None:
    harness = await start(make, 0, 80, split="never")
    answer = await begun_at(harness, harness.decodes[0], open_ended(n=2), 15)
    harness.add("small", "decode").max_tokens = 25
    await until(lambda: len(harness.fleet.decode_workers) == 2)
    harness.decodes[0].die()
    results = await answer
    for result in results:
        expected = expected_tokens(PROMPT, open_ended(max_tokens=80), result.index)[0]
        assert result.finish_reason == "length" and len(result.token_ids) >= 14
        assert result.token_ids == expected[: len(result.token_ids)]
        assert result.text == harness.tokenizer.decode(result.token_ids)
    assert harness.world.workers["small"].submits() == []
    assert await harness.world.settled() == 0


async def test_a_choice_that_still_has_room_goes_on(make: Make) -> None:
    """One choice has as many tokens as the other worker takes, the other choice does not."""
    harness = await start(make, 0, 80, split="never")
    large = harness.decodes[0]
    first = expected_tokens(PROMPT, open_ended(max_tokens=60), 1)[0]

    def without_the_second(events: list[Any]) -> list[Any]:
        return [
            event
            for event in events
            if not (getattr(event, "choice", 0) == 1 and event.position > 2)
        ]

    large.mangle = without_the_second
    answer = await begun_at(harness, large, open_ended(n=2), 15)
    harness.add("small", "decode").max_tokens = 30
    await until(lambda: len(harness.fleet.decode_workers) == 2)
    large.die()
    results = await answer
    assert [result.finish_reason for result in results] == ["length", "length"]
    assert len(results[0].token_ids) >= 14 and results[1].token_ids == first[:10]
    [submit] = harness.world.workers["small"].submits()
    assert [start.choice for start in submit.starts] == [1]


async def test_min_tokens_are_no_reason_to_end(make: Make) -> None:
    """Fewer tokens than min_tokens, and nobody who could make the rest: that is an error, and no
    short answer."""
    harness = await start(make, 0, 80, split="never")
    answer = await begun_at(harness, harness.decodes[0], open_ended(min_tokens=50), 15)
    harness.add("small", "decode").max_tokens = 30
    await until(lambda: len(harness.fleet.decode_workers) == 2)
    harness.decodes[0].die()
    with pytest.raises(RequestFailed) as caught:
        await answer
    assert caught.value.failure == "unavailable"


async def test_a_prompt_with_room_for_one_token_is_not_handed_over(make: Make) -> None:
    harness = await start(make, 1, 30)
    prompt = tuple(range(10, 39))
    [result] = await harness.collect(prompt, open_ended())
    assert (len(result.token_ids), result.finish_reason) == (1, "length")
    assert [s.phase for s in harness.decodes[0].submits()] == ["full"] and not harness.prefills[
        0
    ].submits()
    [result] = await harness.collect(prompt[1:], open_ended())
    assert (len(result.token_ids), result.finish_reason) == (2, "length")
    assert [s.phase for s in harness.prefills[0].submits()] == ["prefill"]
    assert await harness.world.settled() == 0


async def test_a_full_prefill_worker_does_not_matter(make: Make) -> None:
    """P takes the prompt and no token more than the one it samples."""
    harness = make(1, 1)
    harness.prefills[0].max_tokens = len(PROMPT) + 1
    await harness.start()
    [result] = await harness.collect(PROMPT, open_ended())
    assert result.token_ids == tokens_at(harness.decodes[0])
    assert len(harness.prefills[0].submits()) == 1
