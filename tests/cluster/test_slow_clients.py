"""Clients that do not read or do not send, over real sockets, against the router's app and fake
workers."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from cluster.test_http_server import named, opened
from router.conftest import make, tokenizer
from router.harness import MODEL, Harness, until

from pdserve.cluster.deployments.http_server import Address, HttpServer

Make = Callable[..., Harness]
TIMEOUT_S = 1.0
NUM_TOKENS = 20_000

clients: list[socket.socket] = []

__all__ = ["make", "tokenizer"]


@pytest.fixture
async def served(
    make: Make, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[Harness, HttpServer]]:
    """Parametrised by how long clients have; TIMEOUT_S otherwise."""
    timeout_s = getattr(request, "param", TIMEOUT_S)
    harness = make(0, 1, client_timeout_s=timeout_s)
    harness.decodes[0].max_tokens = 2 * NUM_TOKENS
    await harness.start()
    server = HttpServer(harness.app, Address("127.0.0.1", 0), timeout_s)
    server.start()
    _, writer = await opened(server)
    writer.close()
    yield harness, server
    assert all(client.fileno() >= 0 for client in clients), "it must be the server who ends it"
    await asyncio.wait_for(server.close(), 60)  # or an answer that nobody reads keeps the server
    while clients:
        clients.pop().close()


HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n"
)


def deaf(port: int, body: dict[str, Any]) -> socket.socket:
    """Has sent its request, and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    clients.append(client)
    client.connect(("127.0.0.1", port))
    data = json.dumps(body).encode()
    client.sendall(HEAD % len(data) + data)
    return client


def body(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [5, 6], "seed": 1, "ignore_eos": True, **options}


@pytest.mark.parametrize("served", [3.0], indirect=True, ids=[""])
async def test_a_client_that_reads_nothing_stalls_nobody_and_is_given_up(
    served: tuple[Harness, HttpServer],
) -> None:
    harness, server = served
    long = body(max_tokens=NUM_TOKENS, stream=True, return_token_ids=True, logprobs=20)
    deaf(server.port, long)
    admission = harness.service.admission
    await until(lambda: admission.num_prompts == 1)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as http:
        beside = 0
        for _ in range(5):
            answer = await http.post("/v1/completions", json=body(max_tokens=8))
            assert answer.status_code == 200
            beside += admission.num_prompts == 1
    assert beside, "it is still there: its time is not over"
    await until(lambda: admission.num_prompts == 0)
    assert await harness.world.settled() == 0 and admission.queued_tokens == 0


@pytest.mark.lengthy
@pytest.mark.parametrize("served", [2.5], indirect=True, ids=[""])
async def test_a_slow_reader_is_not_given_up(served: tuple[Harness, HttpServer]) -> None:
    _, server = served
    client = deaf(server.port, body(max_tokens=3000, stream=True, logprobs=5))
    client.setblocking(False)
    received = bytearray()
    began = time.monotonic()
    while not received.endswith(b"0\r\n\r\n"):
        if time.monotonic() - began < 5.0:
            await asyncio.sleep(0.05)
        received += await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 20_000), 60)
    assert time.monotonic() - began > 5.0 and b"data: [DONE]" in received


async def test_a_body_that_does_not_come_is_refused(served: tuple[Harness, HttpServer]) -> None:
    _, server = served
    reader, writer = await opened(server)
    writer.write(HEAD % 100 + b"{")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    assert head.startswith(b"HTTP/1.1 408 ")
    error = json.loads(await reader.readuntil(b"}}"))["error"]
    assert error["code"] == "body_timeout" and "router.client_timeout_s" in error["message"]
    writer.close()


async def test_a_whole_answer_that_nobody_reads_does_not_keep_the_server() -> None:
    """The application was done with it long before: its bytes wait in buffers."""
    server = HttpServer(named("x" * (32 << 20)), Address("127.0.0.1", 0), TIMEOUT_S)
    server.start()
    _, writer = await opened(server)
    writer.close()
    with socket.socket() as client:
        client.connect(("127.0.0.1", server.port))
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(0.5)
        await asyncio.wait_for(server.close(), 60)
