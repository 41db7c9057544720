"""Hostile connections that are many or slow, or that send what HTTP allows but nobody sends."""

import asyncio
import json
import time

from benchmarks.router.hostile.sending import (
    CHAT,
    COMMON,
    COMPLETIONS,
    MB,
    PIECE_BYTES,
    Answer,
    Attack,
    Exchange,
    completion_body,
    connect,
    head_of,
    leaving,
    post_of,
    read_answer,
    row,
    sending_all,
    text_of,
    together,
)


def _slowly(copies: int, head: bytes, body: bytes) -> Attack:
    """Sends `head` and `body` at once on each connection. What is missing of their length follows
    at one byte per second."""

    async def send(exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection = await connect(exchange.port)
        except OSError:
            exchange.ended = True
            return
        reading = asyncio.create_task(read_answer(exchange, connection))
        try:
            await loop.sock_sendall(connection, head)
            await loop.sock_sendall(connection, body)
            exchange.sent_at = time.monotonic()
            while not exchange.ended:
                await asyncio.sleep(1.0)
                await loop.sock_sendall(connection, b" ")
        except OSError:
            await asyncio.wait([reading], timeout=1.0)
        finally:
            reading.cancel()
            connection.close()

    async def attack(port: int, limit_s: float) -> list[Answer]:
        exchanges = [Exchange(port) for _ in range(copies)]
        await together(limit_s, map(send, exchanges))
        return [exchange.answer() for exchange in exchanges]

    return attack


@row(
    "slow-bodies",
    "64 bodies of 32 MB, of which 24 MB are sent at once and the rest never",
    "open",
    20.0,
)
def _slow_bodies() -> Attack:
    return _slowly(64, head_of(COMPLETIONS, 32 * MB), b'{"prompt":"' + b"a" * (24 * MB))


@row("slow-chunks", "the same without a Content-Length", "open", 20.0)
def _slow_chunks() -> Attack:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\n{COMMON}Transfer-Encoding: chunked\r\n\r\n".encode()
    return _slowly(64, head, b"%x\r\n" % (32 * MB) + b"a" * (24 * MB))


@row("slow-heads", "1,000 requests whose headers do not end, 60 KB each", "open", 10.0)
def _slow_heads() -> Attack:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\n{COMMON}".encode()
    return _slowly(1000, head, b"x-filler: " + b"a" * 60_000)


@row("bodies-64", "64 bodies of 1 MB at once, refused for their model")
def _bodies() -> Attack:
    body = json.dumps({"model": "none", "prompt": text_of(MB)}).encode()
    return sending_all([post_of(COMPLETIONS, body)] * 64)


@row("bodies-32mb-x32", "32 bodies of 31 MB at once, refused for their model", limit_s=60.0)
def _large_bodies() -> Attack:
    body = json.dumps({"model": "none", "prompt": text_of(31 * MB)}).encode()
    return sending_all([post_of(COMPLETIONS, body)] * 32)


@row("body-100mb", "a body of 100 MB")
def _body_100mb() -> Attack:
    return sending_all([[head_of(COMPLETIONS, 100 * MB), *[b"a" * MB] * 100]])


@row("chunks-of-1", "4 bodies of 2 MB in chunks of one byte", limit_s=60.0)
def _chunks() -> Attack:
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\n{COMMON}Connection: close\r\nTransfer-Encoding: "
        "chunked\r\n\r\n"
    )
    return sending_all([[head.encode(), b"1\r\n \r\n" * (2 * MB), b"0\r\n\r\n"]] * 4)


@row(
    "trailers",
    "30 MB of trailers after a body in chunks, 8 times, 4 of them of a request without a body",
    limit_s=60.0,
)
def _trailers() -> Attack:
    lines = [b"a:b\r\n" * 50_000] * 120
    heads = [
        f"{name} HTTP/1.1\r\n{COMMON}Transfer-Encoding: chunked\r\n\r\n"
        for name in (f"POST {COMPLETIONS}", "GET /health")
    ]
    return sending_all([[head.encode() + b"2\r\n{}\r\n0\r\n", *lines] for head in heads * 4])


@row("trailer-30mb", "a trailer of 30 MB")
def _trailer() -> Attack:
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\n{COMMON}Transfer-Encoding: "
        "chunked\r\n\r\n2\r\n{}\r\n0\r\na: "
    )
    return sending_all([[head.encode(), *[b"a" * PIECE_BYTES] * 120]])


@row("idle-5000", "5,000 connections opened for nothing", "open", 10.0)
def _idle() -> Attack:
    return sending_all([[]] * 5000)


@row("head-10mb", "a header of 10 MB")
def _huge_head() -> Attack:
    return sending_all(
        [[b"GET /health HTTP/1.1\r\nHost: x\r\nx-filler: ", b"a" * (10 * MB), b"\r\n\r\n"]]
    )


@row("headers-x20", "20 requests of 60,000 headers in one piece")
def _headers() -> Attack:
    head = (
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        + b"a:\r\n" * (PIECE_BYTES // 4)
        + b"\r\n"
    )
    return sending_all([[head]] * 20)


@row("pipelined-x20", "20 connections with 10,000 requests in one piece")
def _pipelined() -> Attack:
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    request = b"GET /health HTTP/1.1\r\n\r\n"
    return sending_all([[request * (PIECE_BYTES // len(request)) + last]] * 20)


@row("pipelined-x300", "300 connections with 1,000 requests in one piece", limit_s=60.0)
def _pipelined_together() -> Attack:
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    return sending_all([[b"GET /health HTTP/1.1\r\n\r\n" * 1000 + last]] * 300)


@row("pipelined-posts", "20 connections with 3,000 completions in one piece", limit_s=60.0)
def _pipelined_posts() -> Attack:
    request = f"POST {COMPLETIONS} HTTP/1.1\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    return sending_all(
        [[request * (PIECE_BYTES // len(request)), head_of(COMPLETIONS, 2), b"{}"]] * 20
    )


@row("url-200kb-x20", "20 requests for a path of 200 KB in one piece")
def _url() -> Attack:
    return sending_all([[head_of("/" + "%41" * 66_000, 0, method="GET")]] * 20)


@row("churn-2000", "2,000 chats that are left after their first byte", limit_s=60.0)
def _churn() -> Attack:
    body = completion_body(
        messages=[{"role": "user", "content": "Hi"}], max_tokens=1000, stream=True
    )

    return leaving(2000, post_of(CHAT, body), 64)
