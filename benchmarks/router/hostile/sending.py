"""Sends hostile requests: rows, their registry, and the connections that they use.

Everything is bounded in bytes, connections and seconds. This module knows no router: it sends bytes
over sockets.
"""

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from benchmarks.support.places import DEMO
from pdserve.text.tokenizer import Tokenizer

MODEL = DEMO.name
CONTEXT = 131_072  # tokens of the largest request, as for Llama-3.1
VOCAB = 1 << 16  # vocabulary of the engine on paper
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PIECE_BYTES = 250_000  # bytes that a server reads from a socket at once
MB = 1_000_000

# It is called with the port, and with the seconds after which all its connections are closed.
Attack = Callable[[int, float], Coroutine[Any, Any, list["Answer"]]]
Outcome = Literal["any", "answered", "open"]


@dataclass
class Answer:
    """The answer on one connection."""

    # 0: the connection ended without a status. None: it was still open at the end.
    status: int | None
    seconds: float  # from the last sent byte to the answer's first byte; 0.0 if that came before
    num_bytes: int = 0
    head: str = ""

    @property
    def refused(self) -> bool:
        return self.status is not None and self.status >= 400


@dataclass(frozen=True)
class Row:
    """One hostile request."""

    name: str
    what: str
    prepare: Callable[[], Attack]  # builds the request, before anything is measured
    # "answered": the request is fair, and must get 200. "open": the router need not answer.
    wanted: Outcome = "any"
    limit_s: float = 30.0  # its connections are closed after this time


ROWS: dict[str, Row] = {}


def row(name: str, what: str, wanted: Outcome = "any", limit_s: float = 30.0) -> Callable[..., Any]:
    def add(prepare: Callable[[], Attack]) -> Callable[[], Attack]:
        ROWS[name] = Row(name, what, prepare, wanted, limit_s)
        return prepare

    return add


# Sending.


@dataclass
class Exchange:
    """One connection, and what happened on it."""

    port: int
    sent_at: float | None = None
    answered_at: float | None = None
    received: bytearray = field(default_factory=bytearray)
    num_bytes: int = 0
    ended: bool = False

    def answer(self) -> Answer:
        head = bytes(self.received)
        status = int(head[9:12]) if head[:5] == b"HTTP/" and head[9:12].isdigit() else None
        seconds = 0.0
        if self.sent_at is not None and self.answered_at is not None:
            seconds = max(0.0, self.answered_at - self.sent_at)
        text = head.partition(b"\r\n\r\n")[2][:200].decode("utf-8", "replace")
        return Answer(0 if status is None and self.ended else status, seconds, self.num_bytes, text)


async def connect(port: int, receive_bytes: int | None = None) -> socket.socket:
    """Connects, and retries while nobody accepts: the kernel's queue may be full for a while."""
    connection = socket.socket()
    connection.setblocking(False)
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    try:
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    except BaseException:
        connection.close()
        raise
    return connection


async def read_answer(exchange: Exchange, connection: socket.socket) -> None:
    """Reads everything that arrives, and keeps the first kilobyte."""
    loop = asyncio.get_running_loop()
    buffer = bytearray(1 << 18)
    try:
        while count := await loop.sock_recv_into(connection, buffer):
            if exchange.answered_at is None:
                exchange.answered_at = time.monotonic()
            exchange.num_bytes += count
            exchange.received += buffer[: min(count, 1024 - len(exchange.received))]
    except OSError:
        pass
    exchange.ended = True


async def exchange_with(
    exchange: Exchange, pieces: Iterable[bytes], reads: bool = True, reads_after_s: float = 0.0
) -> None:
    """Sends, and reads at the same time until the other side ends the connection. With
    `reads_after_s`, it only reads that many seconds after everything was sent."""
    loop = asyncio.get_running_loop()
    reads_late = reads_after_s > 0
    try:
        connection = await connect(exchange.port, None if reads and not reads_late else 4096)
    except OSError:
        exchange.ended = True
        return
    reading = (
        asyncio.create_task(read_answer(exchange, connection)) if reads and not reads_late else None
    )
    try:
        try:
            for piece in pieces:
                await loop.sock_sendall(connection, piece)
        except OSError:
            pass  # the other side ended the connection, and its answer is still read
        exchange.sent_at = time.monotonic()
        if reads_late:
            await asyncio.sleep(reads_after_s)
            reading = asyncio.create_task(read_answer(exchange, connection))
        await (reading if reading is not None else asyncio.Event().wait())
    finally:
        if reading is not None:
            reading.cancel()
        connection.close()


async def together(limit_s: float, work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs all at once. Those that have not ended after `limit_s` are cancelled."""
    tasks = [asyncio.create_task(each) for each in work]
    _, pending = await asyncio.wait(tasks, timeout=limit_s)
    for task in pending:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def sending_all(
    pieces_of_each: Iterable[Iterable[bytes]], reads: bool = True, reads_after_s: float = 0.0
) -> Attack:
    """Makes an attack that opens all connections at once, until they end or until the row's
    limit."""
    all_pieces = list(pieces_of_each)

    async def attack(port: int, limit_s: float) -> list[Answer]:
        exchanges = [Exchange(port) for _ in all_pieces]
        sending = (
            exchange_with(each, pieces, reads, reads_after_s)
            for each, pieces in zip(exchanges, all_pieces, strict=True)
        )
        await together(limit_s, sending)
        return [exchange.answer() for exchange in exchanges]

    return attack


def leaving(copies: int, pieces: list[bytes], at_once: int) -> Attack:
    """Makes an attack that closes each connection after the answer's first bytes. `at_once` are
    open at a time."""

    async def leave(exchange: Exchange, places: asyncio.Semaphore) -> None:
        async with places:
            sending = asyncio.create_task(exchange_with(exchange, pieces))
            while exchange.answered_at is None and not sending.done():
                await asyncio.sleep(0.005)
            sending.cancel()
            await asyncio.wait([sending])

    async def attack(port: int, limit_s: float) -> list[Answer]:
        places = asyncio.Semaphore(at_once)
        exchanges = [Exchange(port) for _ in range(copies)]
        await together(limit_s, (leave(exchange, places) for exchange in exchanges))
        return [exchange.answer() for exchange in exchanges]

    return attack


COMMON = "Host: x\r\nContent-Type: application/json\r\n"  # headers of every request with a body


def head_of(path: str, num_bytes: int, *headers: str, method: str = "POST") -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        COMMON.rstrip(),
        "Connection: close",
        f"Content-Length: {num_bytes}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def post_of(path: str, body: bytes, *headers: str) -> list[bytes]:
    return [head_of(path, len(body), *headers), body]


def completion_body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **fields}).encode()


def completes(copies: int = 1, **fields: Any) -> Attack:
    return sending_all([post_of(COMPLETIONS, completion_body(**fields))] * copies)


def chats(copies: int = 1, **fields: Any) -> Attack:
    small = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    return sending_all([post_of(CHAT, completion_body(**small | fields))] * copies)


def raw_body(path: str, before: str, repeated: str, count: int, after: str) -> Attack:
    """Makes an attack whose JSON is cheaper to write than to build: `before`, `count` times
    `repeated` with commas between, and `after`."""
    body = before + ",".join([repeated] * count) + after
    return sending_all([post_of(path, body.replace("MODEL", json.dumps(MODEL)).encode())])


@cache
def text_of(num_chars: int) -> str:
    """Draws words that no tokenizer has seen, so that its cache does not help."""
    draw = random.Random(0)
    words = list[str]()
    length = 0
    while length < num_chars:
        word = "".join(draw.choices("etaoinshrdlucmfwypvbgkjqxz", k=draw.randint(2, 9)))
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:num_chars]


@cache
def prompt_of(num_tokens: int) -> str:
    """Draws a text of about `num_tokens` tokens, never more."""
    tokenizer = Tokenizer.load(DEMO)
    sample = text_of(100_000)
    each = len(sample) / len(tokenizer.encode(sample))
    return text_of(int(num_tokens * each * 0.98))


@cache
def ids_of(num_tokens: int) -> list[int]:
    """Draws ids that become an integer object each when they are decoded. Python shares integers up
    to 256."""
    return random.Random(0).choices(range(257, VOCAB), k=num_tokens)


@cache
def short_ids(num_tokens: int) -> str:
    """Returns JSON of ids with three digits, so that many fit into a body."""
    return ",".join(map(str, random.Random(0).choices(range(257, 1000), k=num_tokens)))


LONGEST = CONTEXT - 1024
