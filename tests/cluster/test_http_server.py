"""The routers' own HTTP server, without Ray."""

import asyncio
import socket
import time

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from pdserve.cluster import http_server
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
    first = HttpServer(named("first"), ANYWHERE, 60)
    second = HttpServer(named("second"), Address("127.0.0.1", first.port), 60)
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
    server = HttpServer(named("late", gate), ANYWHERE, 60)
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
            HttpServer(named("x"), Address("127.0.0.1", other.getsockname()[1]), 60)


async def opened(server: HttpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection, as soon as the server listens."""
    async with asyncio.timeout(5):
        while True:
            try:
                return await asyncio.open_connection("127.0.0.1", server.port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.01)


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(), 5)


async def test_headers_that_do_not_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_DEADLINE_S", 0.3)
    server = HttpServer(named("x"), Address("127.0.0.1", 0, keep_alive_s=1), 60)
    server.start()
    reader, writer = await opened(server)
    for _ in range(3):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")  # whole ones take no harm
        assert (await reader.readuntil(b"\r\n\r\nx")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.2)
    writer.write(b"GET / HTTP/1.1\r\n")
    for _ in range(2):  # a byte now and then is no sign of life
        await asyncio.sleep(0.12)
        writer.write(b"a")
    began = time.monotonic()
    assert (await until_closed(reader)).endswith(b"content-length: 0\r\n\r\n")
    assert time.monotonic() - began < 0.2
    for opening in (b"", b"\r\n"):  # opened for nothing
        reader, writer = await opened(server)
        writer.write(opening)
        assert await until_closed(reader) == b""
    await server.close()


async def test_headers_that_are_too_long_are_refused() -> None:
    server = HttpServer(named("x"), ANYWHERE, 60)
    server.start()
    reader, writer = await opened(server)
    writer.write(b"GET / HTTP/1.1\r\n")
    for _ in range(10):
        writer.write(b"x-y: " + b"z" * 8000 + b"\r\n")
        await asyncio.sleep(0.01)
    assert (await until_closed(reader)).startswith(b"HTTP/1.1 431 ")
    await server.close()
