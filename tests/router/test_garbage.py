"""An answered request leaves no garbage that only a collection finds: its prompts and tokens are
gone with it."""

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from router.harness import MODEL, Harness, settle
from starlette.types import ASGIApp, Message, Scope

from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import RequestFailed

Make = Callable[..., Harness]
NUM_CALLS = 10


async def call(app: ASGIApp, path: str, body: bytes, status: int = 200) -> None:
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    ended = asyncio.Event()

    async def receive() -> Message:
        if not parts:
            await ended.wait()
            return {"type": "http.disconnect"}
        return parts.pop()

    async def send(message: Message) -> None:
        assert message.get("status", status) == status

    headers = [(b"content-type", b"application/json")]
    scope: Scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
    scope["headers"] = headers
    await app(scope, receive, send)


async def garbage(work: Callable[[], Any]) -> Counter[str]:
    """Counts the objects per call that the work leaves for the collector, by type."""
    await work()
    await settle()
    gc.collect()
    gc.disable()
    try:
        for _ in range(NUM_CALLS):
            await work()
        await settle()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return Counter(
            {
                name: count // NUM_CALLS
                for name, count in Counter(type(o).__name__ for o in gc.garbage).items()
            }
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {"prompt": [5, 6]},
        {"prompt": [[5, 6]] * 30, "n": 2},
        {"prompt": "fox " * 300},
        {"prompt": "x", "stop": "zzz"},
    ],
    ids=["one", "many", "text", "stop"],
)
async def test_completions(make: Make, stream: bool, change: dict[str, Any]) -> None:
    harness = make(1, 1)
    for worker in [*harness.prefills, *harness.decodes]:
        worker.max_tokens = 10_000
    await harness.start()
    body = json.dumps(
        {"model": MODEL, "max_tokens": 2, "seed": 1, "stream": stream} | change
    ).encode()
    found = await garbage(lambda: call(harness.app, "/v1/completions", body))
    assert not found["RequestRun"] and not found["Generation"] and sum(found.values()) < 30, found


async def test_requests_that_are_cut_off_or_end_early(make: Make) -> None:
    harness = await make(0, 1).start()

    async def cut() -> None:
        generation = await harness.service.admit(
            [[5, 6]], SamplingParams(max_tokens=50, ignore_eos=True)
        )
        generation.account.cut()
        with pytest.raises(RequestFailed):
            await generation.collect()

    async def cut_many() -> None:
        generation = await harness.service.admit(
            [[5, 6]] * 3, SamplingParams(max_tokens=50, ignore_eos=True)
        )

        async def cut_soon() -> None:
            await settle()
            generation.account.cut()

        cutting = asyncio.create_task(cut_soon())
        with pytest.raises(RequestFailed):
            await generation.collect()
        await cutting

    async def leave() -> None:
        generation = await harness.service.admit(
            [[5, 6]] * 3, SamplingParams(max_tokens=50, ignore_eos=True)
        )
        batches = generation.stream()
        await anext(batches)
        await batches.aclose()

    for work in (cut, cut_many, leave):
        found = await garbage(work)
        assert not found["RequestRun"] and not found["Generation"], (work, found)


@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6]] * 30])
async def test_whole_answers_that_are_cut_off(make: Make, prompt: list[Any]) -> None:
    """They are cut off because they hold most."""
    harness = make(0, 1, max_held_bytes=1 << 16)
    harness.decodes[0].max_tokens = 10_000
    await harness.start()
    body = json.dumps(
        {"model": MODEL, "prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "seed": 1}
    ).encode()
    found = await garbage(lambda: call(harness.app, "/v1/completions", body, 503))
    assert not found["RequestRun"] and not found["Generation"], found
