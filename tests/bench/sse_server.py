"""A small completions server with faults, in a thread of its own, so that a client under test may
block."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class Behaviour:
    """How the server answers. fault: applied to every `every`-th request. gap_s: between tokens."""

    gap_s: float = 0.0
    first_s: float = 0.0
    fault: str = ""
    every: int = 1
    token_ids: bool = True
    usage: bool = True
    cached_tokens: int | None = None
    line_end: str = "\n"
    bodies: list[dict] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0


async def complete(request: web.Request) -> web.StreamResponse:
    behaviour: Behaviour = request.app[BEHAVIOUR]
    body = await request.json()
    behaviour.bodies.append(body)
    behaviour.keys.append(request.headers.get("authorization"))
    behaviour.in_flight += 1
    behaviour.most_in_flight = max(behaviour.most_in_flight, behaviour.in_flight)
    try:
        fault = behaviour.fault if len(behaviour.bodies) % behaviour.every == 0 else ""
        return await answer(request, behaviour, body["max_tokens"], fault)
    finally:
        behaviour.in_flight -= 1


async def answer(
    request: web.Request, behaviour: Behaviour, num_tokens: int, fault: str
) -> web.StreamResponse:
    if fault == "refuse":
        return web.json_response({"error": {"message": "max_tokens is wrong"}}, status=400)
    if fault == "busy":
        return web.json_response({"error": {"message": "too many wait"}}, status=429)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)

    async def event(data: object) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        await response.write(f"data: {text}{behaviour.line_end * 2}".encode())

    await asyncio.sleep(behaviour.first_s)
    for i in range(num_tokens):
        if i == num_tokens // 2:
            if fault == "drop":
                assert request.transport is not None
                request.transport.abort()
                return response
            if fault == "hang":
                await asyncio.sleep(600)
            if fault == "garbage":
                await event("{not json")
            if fault == "error":
                await event({"error": {"message": "the worker died"}})
                return response
            if fault == "end":
                return response
        choice = {
            "index": 0,
            "text": "ab",
            "finish_reason": "length" if i == num_tokens - 1 else None,
        }
        await event(
            {
                "choices": [choice | ({"token_ids": [i]} if behaviour.token_ids else {})],
                "usage": None,
            }
        )
        await asyncio.sleep(behaviour.gap_s)
    if behaviour.usage:
        usage: dict = {"completion_tokens": num_tokens, "prompt_tokens": 3}
        if behaviour.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": behaviour.cached_tokens}
        await event({"choices": [], "usage": usage})
    await event("[DONE]")
    return response


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "fake"}]})


BEHAVIOUR = web.AppKey("behaviour", Behaviour)


@contextmanager
def served(behaviour: Behaviour) -> Iterator[str]:
    """Starts the server and yields its URL."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    over = asyncio.Event()
    urls: list[str] = []

    async def start() -> web.AppRunner:
        app = web.Application(client_max_size=1 << 24)
        app[BEHAVIOUR] = behaviour
        app.router.add_post("/v1/completions", complete)
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        return runner

    def serve() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_until_complete(over.wait())
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
