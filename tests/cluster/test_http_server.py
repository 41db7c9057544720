"""The routers' own HTTP server, without Ray."""

import asyncio
import socket
from typing import Any

import httpx
import pytest
from router.turns import Turns
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from support.waiting import stays_async

from pdserve.cluster.deployments import http_server
from pdserve.cluster.deployments.http_server import Address, HttpServer

ANYWHERE = Address("127.0.0.1", 0)


def named(
    name: str, gate: asyncio.Event | None = None, asked: asyncio.Event | None = None
) -> Starlette:
    async def answer(request: Request) -> PlainTextResponse:
        if asked is not None:
            asked.set()
        if gate is not None:
            await gate.wait()
        return PlainTextResponse(name)

    return Starlette(routes=[Route("/", answer)])


async def ask(port: int) -> str:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://127.0.0.1:{port}/", timeout=60)).text


async def test_two_servers_share_a_port_and_one_goes_on_alone() -> None:
    first = HttpServer(named("first"), ANYWHERE, 60)
    second = HttpServer(named("second"), Address("127.0.0.1", first.port), 60)
    first.start()
    second.start()
    async with asyncio.timeout(60):
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
    asked = asyncio.Event()
    server = HttpServer(named("late", gate, asked), ANYWHERE, 60)
    server.start()
    _, writer = await opened(server)
    writer.close()
    answer = asyncio.create_task(ask(server.port))
    await asyncio.wait_for(asked.wait(), 60)
    closing = asyncio.create_task(server.close())
    await stays_async(lambda: not closing.done() and not answer.done(), 0.3)
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
    async with asyncio.timeout(60):
        while True:
            try:
                return await asyncio.open_connection("127.0.0.1", server.port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.01)


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(), 60)


async def test_headers_that_do_not_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_DEADLINE_S", 0.3)
    server = HttpServer(named("x"), Address("127.0.0.1", 0, keep_alive_s=60), 60)
    server.start()
    reader, writer = await opened(server)
    for _ in range(3):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")  # whole ones take no harm
        assert (await reader.readuntil(b"\r\n\r\nx")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.2)
    writer.write(b"GET / HTTP/1.1\r\n")
    closed = asyncio.create_task(until_closed(reader))
    while not closed.done():
        writer.write(b"a")  # a byte now and then is no sign of life
        await asyncio.sleep(0.05)
    assert (await closed).endswith(b"content-length: 0\r\n\r\n")
    await server.close()
    server = HttpServer(named("x"), Address("127.0.0.1", 0, keep_alive_s=1), 60)
    server.start()
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


REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def measuring() -> Starlette:
    """Answers with the length of the body."""

    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse(f"<{len(await request.body())}>")

    return Starlette(routes=[Route("/", answer, methods=["GET", "POST"])])


async def said_to(server: HttpServer, *pieces: bytes) -> bytes:
    """Empty also where the server closed the connection before it had read all: then what it said
    may be lost."""
    reader, writer = await opened(server)
    for piece in pieces:
        writer.write(piece)
    try:
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def pipelined(connection: Any) -> int:
    """Requests that wait behind the one that is answered."""
    return len(connection.pipeline)


async def test_requests_in_one_piece_are_parsed_as_answers_go_out() -> None:
    """Thousands of them in one piece are thousands of objects, made in one turn of the loop."""
    gate = asyncio.Event()
    server = HttpServer(named("x", gate), ANYWHERE, 60)
    server.start()
    reader, writer = await opened(server)
    writer.write(REQUEST * 3000 + LAST)
    async with asyncio.timeout(60):
        while not any(map(pipelined, server.connections)):
            await asyncio.sleep(0.01)
    (connection,) = server.connections
    assert pipelined(connection) <= http_server.SLICE_BYTES / len(REQUEST)
    gate.set()
    answers = await asyncio.wait_for(reader.read(), 60)
    assert answers.count(b"HTTP/1.1 200 OK") == 3001
    await server.close()


async def test_a_body_ends_where_it_says_and_the_next_request_begins_there() -> None:
    server = HttpServer(measuring(), ANYWHERE, 60)
    server.start()
    posts = [
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % n + b"a" * n
        for n in (1, 2000, 700_000, 0)
    ]
    chunked = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    chunked += b"64\r\n" + b"a" * 100 + b"\r\n" + b"1000\r\n" + b"a" * 4096 + b"\r\n0\r\n\r\n"
    for work in ([b"".join([*posts, chunked, LAST])], [*posts, chunked, LAST]):
        answers = await said_to(server, *work)
        sizes = [line.partition(b">")[0] for line in answers.split(b"<")[1:]]
        assert sizes == [b"1", b"2000", b"700000", b"0", b"4196", b"0"]
    await server.close()


async def test_too_many_headers_are_refused() -> None:
    server = HttpServer(named("x"), ANYWHERE, 60)
    server.start()
    head = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    assert (await said_to(server, head + b"a:\r\n" * 200 + b"\r\n")).startswith(b"HTTP/1.1 200 ")
    answer = await said_to(server, head + b"a:\r\n" * 60_000 + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ") or not answer
    await server.close()


async def test_a_body_of_tiny_pieces_is_refused() -> None:
    server = HttpServer(measuring(), ANYWHERE, 60)
    server.start()
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    count = http_server.MAX_PARTS + 1000
    answer = await said_to(server, head, b"1\r\n \r\n" * count, b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") or not answer
    answer = await said_to(server, head, (b"40\r\n" + b" " * 64 + b"\r\n") * count, b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ") and b"<%d>" % (64 * count) in answer
    await server.close()


async def test_an_upgrade_that_nobody_offers_is_answered_as_a_plain_request() -> None:
    """As curl sends one for HTTP/2; what follows it is dropped, and warned of once."""
    server = HttpServer(measuring(), Address("127.0.0.1", 0, keep_alive_s=1), 60)
    server.start()
    head = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    answer = await said_to(server, head + b"\0" * 100_000)
    assert b"<0>" in answer and answer.count(b"HTTP/1.1 ") == 1
    await server.close()


async def test_connections_that_get_bytes_together_are_parsed_one_in_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond what there is time for in the turn in which they come."""
    server = HttpServer(measuring(), ANYWHERE, 60)
    server.start()
    clients = [await opened(server) for _ in range(50)]
    monkeypatch.setattr(http_server, "TURN_S", 0.0)
    turns = Turns()
    parse = http_server._Guarded._parse

    def noting(connection: http_server._Guarded) -> None:
        turns.note()
        parse(connection)

    monkeypatch.setattr(http_server._Guarded, "_parse", noting)
    for _, writer in clients:
        writer.write(LAST)
    answers = [await asyncio.wait_for(reader.read(), 60) for reader, _ in clients]
    turns.close()
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
    assert sum(turns.counts) >= len(clients) and max(turns.counts) == 1
    await server.close()


async def test_what_was_parsed_is_kept_by_nobody() -> None:
    """A thousand headers that do not end were held twice."""
    server = HttpServer(measuring(), ANYWHERE, 60)
    server.start()
    _, writer = await opened(server)
    writer.write(b"GET / HTTP/1.1\r\nx-filler: " + b"a" * 60_000)
    async with asyncio.timeout(60):
        while not server.connections:
            await asyncio.sleep(0.01)
        (connection,) = server.connections
        while connection._num_head_bytes < 60_000:
            await asyncio.sleep(0.01)
    assert not connection._rest.obj
    writer.close()
    await server.close()


@pytest.mark.parametrize("method", ["POST", "GET"])
@pytest.mark.parametrize("filler", [b"a:b\r\n", b"a: " + b"b" * 10_000])
async def test_trailers_have_a_limit_and_are_kept_by_nobody(method: str, filler: bytes) -> None:
    server = HttpServer(measuring(), ANYWHERE, 60)
    server.start()
    head = (
        f"{method} / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        + b"2\r\n{}\r\n0\r\n"
    )
    reader, writer = await opened(server)
    writer.write(head + filler * (http_server.MAX_HEAD_BYTES // len(filler)))
    async with asyncio.timeout(30):
        while not (connections := server.connections) or not _nearly(*connections):
            await asyncio.sleep(0.001)
    (connection,) = connections
    assert len(connection.headers) == 2, "what it says of itself at its end is dropped"
    writer.write(filler * (2 * http_server.MAX_HEAD_BYTES // len(filler)))
    answer = await asyncio.wait_for(_read_all(reader), 30)
    assert b" 200 OK" not in answer or method == "GET"
    writer.close()
    await server.close()


def _nearly(connection: Any) -> bool:
    """Whether all that may be sent behind a body was parsed."""
    return bool(connection._num_idle_bytes > http_server.MAX_HEAD_BYTES - 11_000)


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def test_what_is_between_the_pieces_of_a_body_has_a_limit() -> None:
    """Extensions of a chunk; a body may be as long as it likes."""
    server = HttpServer(measuring(), ANYWHERE, 60)
    server.start()
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = (b"40;x=" + b"y" * 1000 + b"\r\n" + b" " * 64 + b"\r\n") * 300
    answer = await said_to(server, head, chunks, b"0\r\nx-checksum: 5\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ") and b"<19200>" in answer
    answer = await said_to(server, head, b"40;x=", *[b"y" * 10_000] * 20, b"\r\n")
    assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")) or not answer
    await server.close()
