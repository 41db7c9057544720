"""The routers' own HTTP server, without Ray."""

import asyncio
import socket

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from pdserve.cluster.http_server import Address, HttpServer

ANYWHERE = Address("127.0.0.1", 0)


def named(name: str, gate: asyncio.Event | None = None) -> Starlette:
    async def answer(request: Request) -> PlainTextResponse:
        if gate is not None:
            await gate.wait()
        return PlainTextResponse(name)

    return Starlette(routes=[Route("/", answer)])


async def ask(port: int) -> str:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://127.0.0.1:{port}/", timeout=10)).text


async def test_two_servers_share_a_port_and_one_goes_on_alone() -> None:
    first = HttpServer(named("first"), ANYWHERE)
    second = HttpServer(named("second"), Address("127.0.0.1", first.port))
    first.start()
    second.start()
    async with asyncio.timeout(10):
        while {"first", "second"} - {await ask(first.port) for _ in range(20)}:
            pass
    port = first.port
    await first.close()
    assert not first.running and second.running
    assert {await ask(port) for _ in range(20)} == {"second"}
    await second.close()
    with pytest.raises(httpx.ConnectError):
        await ask(port)


async def test_closing_waits_for_answers_that_are_being_written() -> None:
    gate = asyncio.Event()
    server = HttpServer(named("late", gate), ANYWHERE)
    server.start()
    answer = asyncio.create_task(ask(server.port))
    await asyncio.sleep(0.2)
    closing = asyncio.create_task(server.close())
    await asyncio.sleep(0.3)
    assert not closing.done() and not answer.done()
    gate.set()
    assert await answer == "late"
    await closing


async def test_a_port_of_somebody_else_is_an_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="in use"):
            HttpServer(named("x"), Address("127.0.0.1", other.getsockname()[1]))
