"""Hundreds of small requests at once begin and end a few in each turn of the event loop, by one
budget for all."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from router.harness import MODEL, Harness, until
from router.turns import Turns

from pdserve.background import pace
from pdserve.background.pace import Pacer
from pdserve.protocol.events import Delta, Event
from pdserve.router.fleet.streams import EVENTS_AT_ONCE
from pdserve.router.http import calls
from pdserve.router.http.answers import CHUNKS_AT_ONCE
from pdserve.router.http.openai.completions import CompletionResponder
from pdserve.router.request.chunks import OutputChunk
from pdserve.router.request.request_run import RequestRun
from pdserve.router.request.run_report import RunReport

Make = Callable[..., Harness]
COUNT = 60
BODY = {"model": MODEL, "prompt": [5, 6], "max_tokens": 2, "seed": 3}


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice is over as soon as it begins."""
    monkeypatch.setattr(pace, "SLICE_S", 0.0)


def noting(turns: Turns, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Count its calls."""
    method = getattr(owner, name)

    def noted(*args: Any, **options: Any) -> Any:
        turns.note()
        return method(*args, **options)

    monkeypatch.setattr(owner, name, noted)


async def test_what_begins_in_one_turn_shares_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    pacer = Pacer()
    turns = Turns()

    async def work() -> None:
        await pacer.turn()
        turns.note()

    await asyncio.gather(*(work() for _ in range(COUNT)))
    assert max(turns.counts) == 1
    monkeypatch.setattr(pace, "SLICE_S", 60.0)
    await asyncio.sleep(0)  # the slice of another turn
    turns.counts = [0]
    await asyncio.gather(*(work() for _ in range(COUNT)))
    assert max(turns.counts) == COUNT, "as long as there is time nobody waits"
    turns.close()


@pytest.mark.parametrize(
    ("owner", "name"),
    [(calls, "parse"), (RequestRun, "__init__"), (RequestRun, "_choose"), (RunReport, "tell")],
    ids=["parsed", "made", "begun", "ended"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_requests_at_once(
    make: Make, stream: bool, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await make(0, 1).start()
    turns = Turns()
    noting(turns, monkeypatch, owner, name)
    http = harness.http(timeout=120)
    answers = await asyncio.gather(
        *(http.post("/v1/completions", json=BODY | {"stream": stream}) for _ in range(COUNT))
    )
    turns.close()
    assert {answer.status_code for answer in answers} == {200}
    assert sum(turns.counts) == COUNT and max(turns.counts) == 1


async def test_requests_that_one_message_ends(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes some dozens in a turn, and each has more to do at its end than with a token."""
    harness = make(0, 1)
    harness.decodes[0].step_s = 30.0
    await harness.start()
    http = harness.http(timeout=120)
    body = BODY | {"max_tokens": 50, "ignore_eos": True}
    asked = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(COUNT)]
    await until(lambda: harness.world.held() == COUNT)
    [worker] = harness.fleet.workers
    ends: list[Event] = [
        Delta(name, attempt, 0, 0, tuple(range(3, 53)), "length") for name, attempt in worker.legs
    ]
    turns = Turns()
    noting(turns, monkeypatch, RunReport, "tell")
    harness.decodes[0].push(None, ends)
    answers = await asyncio.gather(*asked)
    turns.close()
    assert {answer.status_code for answer in answers} == {200} and COUNT < EVENTS_AT_ONCE
    assert sum(turns.counts) == COUNT and max(turns.counts) == 1


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_timeline_within_a_long_answer_waits_for_no_slice_of_its_own(
    make: Make, path: str, stream: bool
) -> None:
    """It would wait for ever, since the answer has the turn."""
    harness = await make(0, 1).start()
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "stream": stream}
    body |= (
        {"messages": [{"role": "user", "content": "Hi"}]}
        if "chat" in path
        else {"prompt": [[5, 6]] * 5}
    )
    asked = harness.http().post(f"/v1/{path}", json=body, headers={"x-pdserve-timeline": "1"})
    answer = await asyncio.wait_for(asked, 60)
    assert answer.status_code == 200 and "queue_s" in answer.text


@pytest.mark.parametrize("change", [{"echo": True}, {"return_token_ids": True}])
async def test_events_that_repeat_a_long_prompt_are_sent_as_they_are_made(
    make: Make, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make(0, 1)
    harness.decodes[0].max_tokens = 100_000
    await harness.start()
    turns = Turns()
    encode = CompletionResponder.stream

    def noted(responder: CompletionResponder, chunk: OutputChunk) -> bytes:
        events = encode(responder, chunk)
        if len(events) > 50_000:
            turns.note()
        return events

    monkeypatch.setattr(CompletionResponder, "stream", noted)
    body = BODY | {"prompt": [300] * 50_000, "n": 32, "stream": True, "ignore_eos": True} | change
    answer = await harness.http(timeout=120).post("/v1/completions", json=body)
    turns.close()
    assert answer.text.count('"finish_reason":"length"') == 32 and len(answer.content) > 32 * 50_000
    assert sum(turns.counts) == 32 and max(turns.counts) <= CHUNKS_AT_ONCE
