"""What somebody may send to a router who wishes it ill, or does not know better: the rows of router_stall.py.

Each row is a name, what it is in a few words, and a coroutine that sends it to a port of 127.0.0.1 and says what came
back. Everything is bounded: in bytes, in connections, in seconds. Runs in a process of its own, so that building and
sending megabytes holds up nobody who measures. Knows no router: bytes over sockets.
"""

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import uvloop

from pdserve.text.tokenizer import Tokenizer

DEMO = Path(__file__).parent.parent / "demo" / "pdserve-demo"
MODEL = DEMO.name
CONTEXT = 131_072  # tokens of the largest request, as for Llama-3.1
VOCAB = 1 << 16  # of the engine on paper
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PIECE_BYTES = 250_000  # what a server reads from a socket at once
MB = 1_000_000

# Given the port and the seconds after which all its connections are closed.
Attack = Callable[[int, float], Coroutine[Any, Any, list["Answer"]]]
Outcome = Literal["any", "answered", "open"]


@dataclass
class Answer:
    """status: 0 when the connection ended without one, None when it was still open at the end. seconds: from the last
    byte sent to the first of the answer (0.0 when that came before). num_bytes: of the answer."""

    status: int | None
    seconds: float
    num_bytes: int = 0
    head: str = ""

    @property
    def refused(self) -> bool:
        return self.status is not None and self.status >= 400


@dataclass(frozen=True)
class Row:
    """prepare: builds what is sent, before anything is measured. wanted: "answered": it is a fair
    request, and gets 200; "open": nobody has to answer. limit_s: after so long its connections are
    closed."""

    name: str
    what: str
    prepare: Callable[[], Attack]
    wanted: Outcome = "any"
    limit_s: float = 30.0


ROWS: dict[str, Row] = {}


def row(name: str, what: str, wanted: Outcome = "any", limit_s: float = 30.0) -> Callable[..., Any]:
    def add(prepare: Callable[[], Attack]) -> Callable[[], Attack]:
        ROWS[name] = Row(name, what, prepare, wanted, limit_s)
        return prepare

    return add


# How things are sent.


@dataclass
class _Exchange:
    """One connection and what happened on it."""

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


async def _connect(port: int, receive_bytes: int | None = None) -> socket.socket:
    """Also while nobody accepts: the kernel's queue may be full for a while."""
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


async def _read(exchange: _Exchange, connection: socket.socket) -> None:
    """All that comes, the first kilobyte of it kept."""
    loop, buffer = asyncio.get_running_loop(), bytearray(1 << 18)
    try:
        while count := await loop.sock_recv_into(connection, buffer):
            if exchange.answered_at is None:
                exchange.answered_at = time.monotonic()
            exchange.num_bytes += count
            exchange.received += buffer[: min(count, 1024 - len(exchange.received))]
    except OSError:
        pass
    exchange.ended = True


async def _exchange(
    exchange: _Exchange, pieces: Iterable[bytes], reads: bool = True, reads_after_s: float = 0.0
) -> None:
    """Send, and read at the same time until the other side ends the connection. reads_after_s: only so long after all
    is sent."""
    loop = asyncio.get_running_loop()
    reads_late = reads_after_s > 0
    try:
        connection = await _connect(exchange.port, None if reads and not reads_late else 4096)
    except OSError:
        exchange.ended = True
        return
    reading = asyncio.create_task(_read(exchange, connection)) if reads and not reads_late else None
    try:
        try:
            for piece in pieces:
                await loop.sock_sendall(connection, piece)
        except OSError:
            pass  # it ended the connection: what it said is still read
        exchange.sent_at = time.monotonic()
        if reads_late:
            await asyncio.sleep(reads_after_s)
            reading = asyncio.create_task(_read(exchange, connection))
        await (reading if reading is not None else asyncio.Event().wait())
    finally:
        if reading is not None:
            reading.cancel()
        connection.close()


async def _together(limit_s: float, work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All at once; what has not ended after limit_s is cancelled."""
    tasks = [asyncio.create_task(each) for each in work]
    _, pending = await asyncio.wait(tasks, timeout=limit_s)
    for task in pending:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _sending(pieces_of_each: Iterable[Iterable[bytes]], reads: bool = True, reads_after_s: float = 0.0) -> Attack:
    """A connection each, all at once, until they have ended or the row's limit."""
    all_pieces = list(pieces_of_each)

    async def attack(port: int, limit_s: float) -> list[Answer]:
        exchanges = [_Exchange(port) for _ in all_pieces]
        sending = (
            _exchange(each, pieces, reads, reads_after_s) for each, pieces in zip(exchanges, all_pieces, strict=True)
        )
        await _together(limit_s, sending)
        return [exchange.answer() for exchange in exchanges]

    return attack


def _leaving(copies: int, pieces: list[bytes], at_once: int) -> Attack:
    """Each connection is closed when the answer's first bytes have come; so many are open at a time."""

    async def leave(exchange: _Exchange, places: asyncio.Semaphore) -> None:
        async with places:
            sending = asyncio.create_task(_exchange(exchange, pieces))
            while exchange.answered_at is None and not sending.done():
                await asyncio.sleep(0.005)
            sending.cancel()
            await asyncio.wait([sending])

    async def attack(port: int, limit_s: float) -> list[Answer]:
        places = asyncio.Semaphore(at_once)
        exchanges = [_Exchange(port) for _ in range(copies)]
        await _together(limit_s, (leave(exchange, places) for exchange in exchanges))
        return [exchange.answer() for exchange in exchanges]

    return attack


def _head(path: str, num_bytes: int, *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {num_bytes}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def _post(path: str, body: bytes, *headers: str) -> list[bytes]:
    return [_head(path, len(body), *headers), body]


def _completion(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **fields}).encode()


def _completes(copies: int = 1, **fields: Any) -> Attack:
    return _sending([_post(COMPLETIONS, _completion(**fields))] * copies)


def _chats(copies: int = 1, **fields: Any) -> Attack:
    small = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    return _sending([_post(CHAT, _completion(**small | fields))] * copies)


def _raw(path: str, before: str, repeated: str, count: int, after: str) -> Attack:
    """JSON that is cheaper to write than to build: `before`, `repeated` so often with commas between, `after`."""
    body = before + ",".join([repeated] * count) + after
    return _sending([_post(path, body.replace("MODEL", json.dumps(MODEL)).encode())])


@cache
def _text(num_chars: int) -> str:
    """Words that no tokenizer has seen, so that its cache does not help it."""
    draw, words, length = random.Random(0), list[str](), 0
    while length < num_chars:
        word = "".join(draw.choices("etaoinshrdlucmfwypvbgkjqxz", k=draw.randint(2, 9)))
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:num_chars]


@cache
def _prompt(num_tokens: int) -> str:
    """A text of about so many tokens, never more."""
    tokenizer, sample = Tokenizer.load(DEMO), _text(100_000)
    each = len(sample) / len(tokenizer.encode(sample))
    return _text(int(num_tokens * each * 0.98))


@cache
def _ids(num_tokens: int) -> list[int]:
    """Each an integer of its own where it is decoded: Python shares those up to 256."""
    return random.Random(0).choices(range(257, VOCAB), k=num_tokens)


@cache
def _short_ids(num_tokens: int) -> str:
    """JSON of ids of three digits, so that many fit into a body."""
    return ",".join(map(str, random.Random(0).choices(range(257, 1000), k=num_tokens)))


LONGEST = CONTEXT - 1024


# Texts that are long.


@row("chat-10mb", "one chat of 10 MB")
def _chat_10mb() -> Attack:
    return _chats(messages=[{"role": "user", "content": _text(10 * MB)}])


@row("chat-31mb", "one chat of 31 MB", limit_s=60.0)
def _chat_31mb() -> Attack:
    return _chats(messages=[{"role": "user", "content": _text(31 * MB)}])


@row("chat-31mb-x8", "8 chats of 31 MB at once", limit_s=60.0)
def _chat_31mb_x8() -> Attack:
    return _chats(copies=8, messages=[{"role": "user", "content": _text(31 * MB)}])


@row("text-31mb", "one completion of 31 MB")
def _text_31mb() -> Attack:
    return _completes(prompt=_text(31 * MB), max_tokens=4)


@row("text-16mb", "one completion of 16 MB: characters that could just be within the context", limit_s=60.0)
def _text_16mb() -> Attack:
    return _completes(prompt=_text(16 * MB), max_tokens=4)


@row("texts-2000", "2,000 texts of 4,000 characters", limit_s=60.0)
def _texts_2000() -> Attack:
    return _completes(prompt=[_text(8 * MB)[i * 4000 : (i + 1) * 4000] for i in range(2000)], max_tokens=2)


@row("texts-x30", "30 times 200 texts of 4,000 characters at once", limit_s=60.0)
def _texts_x30() -> Attack:
    text = _text(8 * MB)
    return _completes(copies=30, prompt=[text[i * 4000 : (i + 1) * 4000] for i in range(200)], max_tokens=2)


@row("posts-500", "500 completions of 4,000 characters at once", wanted="answered")
def _posts_500() -> Attack:
    text = _text(8 * MB)
    bodies = [_completion(prompt=text[i * 4000 : (i + 1) * 4000], max_tokens=2) for i in range(500)]
    return _sending([_post(COMPLETIONS, body) for body in bodies])


@row("long-prompt", "a prompt of 128k tokens that fits", wanted="answered", limit_s=60.0)
def _long_prompt() -> Attack:
    return _completes(prompt=_prompt(LONGEST), max_tokens=4)


@row("long-prompts-x16", "16 prompts of 128k tokens that fit, at once", wanted="answered", limit_s=60.0)
def _long_prompts() -> Attack:
    return _completes(copies=16, prompt=_prompt(LONGEST), max_tokens=4)


@row("long-chat", "a chat of 128k tokens that fits", wanted="answered", limit_s=60.0)
def _long_chat() -> Attack:
    return _chats(messages=[{"role": "user", "content": _prompt(LONGEST)}], max_tokens=4)


@row("one-word-16mb", "one word of 16 MB", limit_s=60.0)
def _one_word() -> Attack:
    return _completes(prompt="a" * (16 * MB), max_tokens=4)


@row("emoji-30mb", "30 MB of characters that are four bytes each", limit_s=60.0)
def _emoji() -> Attack:
    body = _completion(messages=[{"role": "user", "content": "@"}])
    return _sending([_post(CHAT, body.replace(b"@", "\U0001f642".encode() * 7_500_000))])


# Many small things in one body.


@row("messages-100k", "a chat of 100,000 messages")
def _messages() -> Attack:
    return _chats(messages=[{"role": "user", "content": "Hi"}] * 100_000)


@row("parts-100k", "a message of 100,000 parts")
def _parts() -> Attack:
    return _chats(messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}] * 100_000}])


@row("parts-1m", "a message of 1,000,000 parts, 27 MB", limit_s=60.0)
def _many_parts() -> Attack:
    before = '{"model":MODEL,"max_tokens":4,"messages":[{"role":"user","content":['
    return _raw(CHAT, before, '{"type":"text","text":"H"}', MB, "]}]}")


@row("tool-calls-20mb", "a tool call whose arguments are 20 MB of JSON in a string", limit_s=60.0)
def _tool_calls() -> Attack:
    call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": "[" + "[]," * 7 * MB + "[]]"}}
    return _chats(messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}])


@row("tool-call-12mb", "a tool call whose arguments are one word of 12 MB", limit_s=60.0)
def _tool_call() -> Attack:
    call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": '"' + "a" * (12 * MB) + '"'}}
    return _chats(messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}])


@row("tools-8mb", "tools of 8 MB, shown to a template that ignores them")
def _tools() -> Attack:
    return _chats(tools=[{"type": "function", "function": {"name": "f" * 80}}] * 65_000, tool_choice="none")


@row("template-8mb", "chat_template_kwargs of 8 MB")
def _template() -> Attack:
    return _chats(chat_template_kwargs={f"key{i}": "x" * 80 for i in range(80_000)})


@row("prompts-8000", "8,000 prompts of two ids", limit_s=60.0)
def _prompts_8000() -> Attack:
    return _completes(prompt=[[5, 6]] * 8000, max_tokens=2)


@row("prompts-8000-left", "8,000 prompts of two ids, whose client leaves at once", limit_s=60.0)
def _prompts_left() -> Attack:
    pieces = _post(COMPLETIONS, _completion(prompt=[[5, 6]] * 8000, max_tokens=1000, stream=True))

    return _leaving(1, pieces, 1)


@row("prompts-1m", "1,000,000 prompts of no ids")
def _prompts_1m() -> Attack:
    return _raw(COMPLETIONS, '{"model":MODEL,"prompt":[', "[]", MB, "]}")


@row("choices-8192", "64 choices of 128 prompts, 1 token each", limit_s=60.0)
def _choices() -> Attack:
    return _completes(prompt=[[5, 6]] * 128, n=64, max_tokens=1)


@row("timelines-3000", "the timelines of 3,000 prompts", limit_s=60.0)
def _timelines() -> Attack:
    body = _completion(prompt=[[300, 301, 302]] * 3000, max_tokens=1)
    return _sending([_post(COMPLETIONS, body, "x-pdserve-timeline: 1")])


# Parameters that are large.


@row("stops", "64 stops of 1,024 characters, 64 choices of 8 prompts", limit_s=60.0)
def _stops() -> Attack:
    stops = ["a" * 1000 + f"{i:024}" for i in range(64)]
    return _completes(prompt=[[5, 6]] * 8, n=64, max_tokens=100, stop=stops)


@row("stops-most", "as many stop strings as are taken, 64 choices of 128 prompts", limit_s=60.0)
def _stops_most() -> Attack:
    stops = ["a" * 100 + f"{i:028}" for i in range(64)]
    return _completes(prompt=[[5, 6]] * 128, n=64, max_tokens=3, stop=stops)


@row("stops-1", "64 stops of 1,024 characters, 1 choice that runs on", limit_s=15.0)
def _stops_running() -> Attack:
    return _completes(prompt=[5, 6], max_tokens=500, stop=["e" * 1000 + f"{i:024}" for i in range(64)])


@row("stops-x500", "500 completions of 64 stops of 100 characters at once", limit_s=60.0)
def _stops_together() -> Attack:
    return _completes(copies=500, prompt=[300, 301], max_tokens=2, stop=["a" * 90 + f"{i:010}" for i in range(64)])


@row("stop-31mb", "a stop string of 31 MB")
def _stop_31mb() -> Attack:
    return _completes(prompt=[5, 6], stop="a" * (31 * MB))


@row("stop-surrogates", "a stop of 8 MB of lone surrogates")
def _stop_surrogates() -> Attack:
    return _sending([_post(COMPLETIONS, _completion(prompt=[5, 6], stop=["@"]).replace(b"@", b"\\ud800" * 1_300_000))])


@row("stop-numbers", "stop as a list of 5,000,000 numbers")
def _stop_numbers() -> Attack:
    return _raw(COMPLETIONS, '{"model":MODEL,"prompt":[5],"stop":[', "1", 5 * MB, "]}")


@row("logit-bias", "logit_bias of 1.3 MB, 64 choices", limit_s=15.0)
def _logit_bias() -> Attack:
    bias = {str(token): -1.2345678 - token / 1e6 for token in range(VOCAB)}
    return _completes(prompt=[5, 6], n=64, max_tokens=300, logit_bias=bias)


@row("logit-bias-most", "as many biases as are taken, 64 choices of 16 prompts", limit_s=60.0)
def _logit_bias_most() -> Attack:
    bias = {str(token): -1.2345678 - token / 1e6 for token in range(5, 1029)}
    return _completes(prompt=[[5, 6]] * 16, n=64, max_tokens=30, logit_bias=bias)


@row("logit-bias-x16", "16 times logit_bias of 1.3 MB, 8 choices each", limit_s=20.0)
def _logit_bias_x16() -> Attack:
    bias = {str(token): -1.2345678 - token / 1e6 for token in range(VOCAB)}
    return _completes(copies=16, prompt=[5, 6], n=8, max_tokens=300, logit_bias=bias)


@row("stop-ids-5m", "5,000,000 equal stop_token_ids")
def _stop_ids() -> Attack:
    return _raw(COMPLETIONS, '{"model":MODEL,"prompt":[5],"max_tokens":4,"stop_token_ids":[', "7", 5 * MB, "]}")


@row("stop-ids-wrong", "5,000,000 stop_token_ids, the last outside the vocabulary")
def _stop_ids_wrong() -> Attack:
    return _raw(COMPLETIONS, '{"model":MODEL,"prompt":[5],"stop_token_ids":[', "7", 5 * MB, ",99999999]}")


@row("key-8mb", "an unknown key of 8 MB")
def _key() -> Attack:
    return _completes(prompt=[5, 6], **{"max_tokenz" * (8 * MB // 10): 1})


@row("key-10kb-x2000", "2,000 unknown keys of 10 KB")
def _keys_10kb() -> Attack:
    return _completes(prompt=[5, 6], **{f"{i:010}" * 1000: 1 for i in range(2000)})


@row("keys-1m", "an object of 1,000,000 unknown keys")
def _keys() -> Attack:
    return _completes(prompt=[5, 6], **{f"k{i}": 1 for i in range(MB)})


@row("model-31mb", "a model's name of 31 MB")
def _model() -> Attack:
    body = _completion(prompt=[5, 6]).replace(json.dumps(MODEL).encode(), b'"' + b"\\u0001" * 5_100_000 + b'"')
    return _sending([_post(COMPLETIONS, body)])


@row("salt-31mb", "a cache_salt of 31 MB")
def _salt() -> Attack:
    return _completes(prompt=[5, 6], cache_salt="a" * (31 * MB))


# Prompts as lists.


@row("ids-7m", "a prompt of 7,000,000 ids", limit_s=60.0)
def _one_of_ids() -> Attack:
    return _raw(COMPLETIONS, '{"model":MODEL,"max_tokens":4,"prompt":[', _short_ids(1000), 7000, "]}")


@row("ids-8000x1000", "8,000 prompts of 1,000 ids", limit_s=60.0)
def _prompts_of_ids() -> Attack:
    before = '{"model":MODEL,"max_tokens":1,"prompt":['
    return _raw(COMPLETIONS, before, f"[{_short_ids(1000)}]", 8000, "]}")


@row("ids-64x125000", "64 prompts of 125,000 ids", limit_s=60.0)
def _long_prompts_of_ids() -> Attack:
    return _raw(COMPLETIONS, '{"model":MODEL,"max_tokens":1,"prompt":[', f"[{_short_ids(125_000)}]", 64, "]}")


@row("ids-128k-x16", "16 prompts of 128k ids that fit, at once", wanted="answered")
def _ids_128k() -> Attack:
    return _completes(copies=16, prompt=_ids(LONGEST), max_tokens=4)


@row("floats-1m", "a prompt of 1,000,000 floats")
def _floats() -> Attack:
    return _raw(COMPLETIONS, '{"model":MODEL,"prompt":[', "1.5", MB, "]}")


@row("lists-10m", "a prompt of 10,000,000 empty lists", limit_s=60.0)
def _lists() -> Attack:
    return _raw(COMPLETIONS, '{"model":MODEL,"prompt":[', "[]", 10 * MB, "]}")


@row("objects-10m", "metadata of 10,000,000 empty objects, which nobody reads", limit_s=60.0)
def _objects() -> Attack:
    return _raw(COMPLETIONS, '{"model":MODEL,"prompt":[5,6],"max_tokens":4,"metadata":[', "{}", 10 * MB, "]}")


@row("nested-lists", "a prompt of lists in lists in lists")
def _nested_prompt() -> Attack:
    return _raw(COMPLETIONS, '{"model":MODEL,"prompt":[', "[[[1],[2]],[[3]]]", 500_000, "]}")


@row("nested-1m", "1,000,000 brackets that open")
def _nested() -> Attack:
    return _sending([_post(COMPLETIONS, b"[" * MB)])


# What is no JSON, or hardly.


@row("bad-utf8", "31 MB that are no UTF-8 at their end")
def _bad_utf8() -> Attack:
    text = _text(31 * MB).encode()
    return _sending([_post(COMPLETIONS, b'{"model":"x","prompt":"' + text[:-10] + b'\xff"}')])


@row("digits-8mb", "a seed of 8,000,000 digits")
def _digits() -> Attack:
    return _sending([_post(COMPLETIONS, _completion(prompt=[5, 6], seed=4242).replace(b"4242", b"7" * (8 * MB)))])


@row("digits-5000", "a priority of 5,000 digits")
def _priority() -> Attack:
    return _sending([_post(COMPLETIONS, _completion(prompt=[5, 6], priority=4242).replace(b"4242", b"7" * 5000))])


@row("infinity", "temperature 1e400")
def _infinity() -> Attack:
    return _sending([_post(COMPLETIONS, _completion(prompt=[5, 6], temperature=4242).replace(b"4242", b"1e400"))])


@row("spaces-31mb", "31 MB of spaces before the JSON")
def _spaces() -> Attack:
    return _sending([_post(COMPLETIONS, b" " * (31 * MB) + _completion(prompt=[5, 6], max_tokens=4))])


@row("schema-8mb", "a response_format of 8 MB")
def _schema() -> Attack:
    schema = {"type": "json_schema", "json_schema": {f"p{i}": {"type": "string"} for i in range(250_000)}}
    return _chats(response_format=schema)


# Answers that are large.


@row("echo-n64", "64 choices that echo a prompt of 128k tokens, streamed", limit_s=60.0)
def _echo() -> Attack:
    return _completes(prompt=_ids(LONGEST), n=64, echo=True, stream=True, max_tokens=4)


@row("token-ids-n64", "64 choices that return the 128k ids of their prompt, streamed", limit_s=60.0)
def _token_ids() -> Attack:
    return _completes(prompt=_ids(LONGEST), n=64, return_token_ids=True, stream=True, max_tokens=4)


@row("token-ids-unread", "the same, read by nobody", "open", 20.0)
def _token_ids_unread() -> Attack:
    body = _completion(prompt=_ids(LONGEST), n=64, return_token_ids=True, stream=True, max_tokens=4)
    return _sending([_post(COMPLETIONS, body)], reads=False)


@row("echo-2000", "2,000 prompts of 1,000 ids, echoed", limit_s=60.0)
def _echoes() -> Attack:
    return _completes(prompt=[_ids(1000)] * 2000, echo=True, max_tokens=1)


@row("whole-unread", "6 times the scores of 64 prompts of 390 ids, not streamed, read by nobody", "open", 20.0)
def _whole_unread() -> Attack:
    body = _completion(prompt=[_ids(390)] * 64, prompt_logprobs=20, max_tokens=1)
    return _sending([_post(COMPLETIONS, body)] * 6, reads=False)


@row("whole-echo-unread", "12 times 64 choices that echo 390 scored ids, not streamed, read by nobody", "open", 20.0)
def _whole_echo_unread() -> Attack:
    body = _completion(prompt=_ids(390), n=64, echo=True, logprobs=20, max_tokens=1)
    return _sending([_post(COMPLETIONS, body)] * 12, reads=False)


@row("logprobs-n64", "echo with logprobs 20 of 4,000 tokens, 64 choices", limit_s=60.0)
def _logprobs() -> Attack:
    return _completes(prompt=_ids(4000), n=64, echo=True, logprobs=20, max_tokens=16)


@row("prompt-logprobs", "prompt_logprobs 20 of the longest prompt", limit_s=60.0)
def _prompt_logprobs() -> Attack:
    return _completes(prompt=_ids(LONGEST), prompt_logprobs=20, max_tokens=1)


@row("prompt-logprobs-most", "prompt_logprobs 20 of 24,900 tokens, as many as are answered", "answered", 60.0)
def _prompt_logprobs_most() -> Attack:
    return _completes(prompt=_ids(24_900), prompt_logprobs=20, max_tokens=1)


@row("prompt-logprobs-n64", "prompt_logprobs 20 of 16,000 tokens, 64 choices", limit_s=60.0)
def _prompt_logprobs_n64() -> Attack:
    return _completes(prompt=_ids(16_000), n=64, prompt_logprobs=20, max_tokens=1)


@row("logprobs-long", "logprobs 20 of 64 choices x 300 tokens, not streamed", limit_s=60.0)
def _logprobs_long() -> Attack:
    return _completes(prompt=[5, 6], n=64, logprobs=20, max_tokens=300)


@row("unread-plain", "8 streams of 64 choices, read by nobody: 25,600 tokens/s for 30 s", wanted="open")
def _unread() -> Attack:
    body = _completion(prompt=[5, 6], n=64, max_tokens=100_000, stream=True, ignore_eos=True)
    return _sending([_post(COMPLETIONS, body)] * 8, reads=False)


@row("unread-logprobs", "4 streams of 64 choices with logprobs 20, read by nobody for 15 s", "open", 15.0)
def _unread_logprobs() -> Attack:
    body = _completion(prompt=[5, 6], n=64, max_tokens=100_000, stream=True, ignore_eos=True, logprobs=20)
    return _sending([_post(COMPLETIONS, body)] * 4, reads=False)


@row("read-late", "8 streams of 64 choices, read after 10 s, all at once", "open", 30.0)
def _read_late() -> Attack:
    body = _completion(prompt=[5, 6], n=64, max_tokens=2000, stream=True, ignore_eos=True)
    return _sending([_post(COMPLETIONS, body)] * 8, reads_after_s=10.0)


@row("scrapes-300", "300 scrapes of /metrics at once", wanted="answered")
def _scrapes() -> Attack:
    return _sending([[_head("/metrics", 0, method="GET")]] * 300)


@row("openapi-300", "300 times /openapi.json at once", wanted="answered")
def _openapi() -> Attack:
    return _sending([[_head("/openapi.json", 0, method="GET")]] * 300)


# Connections.


def _slowly(copies: int, head: bytes, body: bytes) -> Attack:
    """head and body at once on each connection; what is missing of their length comes a byte a second."""

    async def send(exchange: _Exchange) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection = await _connect(exchange.port)
        except OSError:
            exchange.ended = True
            return
        reading = asyncio.create_task(_read(exchange, connection))
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
        exchanges = [_Exchange(port) for _ in range(copies)]
        await _together(limit_s, map(send, exchanges))
        return [exchange.answer() for exchange in exchanges]

    return attack


@row("slow-bodies", "64 bodies of 32 MB, of which 24 MB come at once and the rest never", "open", 20.0)
def _slow_bodies() -> Attack:
    return _slowly(64, _head(COMPLETIONS, 32 * MB), b'{"prompt":"' + b"a" * (24 * MB))


@row("slow-chunks", "the same without a Content-Length", "open", 20.0)
def _slow_chunks() -> Attack:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return _slowly(64, head, b"%x\r\n" % (32 * MB) + b"a" * (24 * MB))


@row("slow-heads", "1,000 requests whose headers do not end, 60 KB each", "open", 10.0)
def _slow_heads() -> Attack:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n".encode()
    return _slowly(1000, head, b"x-filler: " + b"a" * 60_000)


@row("bodies-64", "64 bodies of 1 MB at once, refused for their model")
def _bodies() -> Attack:
    body = json.dumps({"model": "none", "prompt": _text(MB)}).encode()
    return _sending([_post(COMPLETIONS, body)] * 64)


@row("bodies-32mb-x32", "32 bodies of 31 MB at once, refused for their model", limit_s=60.0)
def _large_bodies() -> Attack:
    body = json.dumps({"model": "none", "prompt": _text(31 * MB)}).encode()
    return _sending([_post(COMPLETIONS, body)] * 32)


@row("body-100mb", "a body of 100 MB")
def _body_100mb() -> Attack:
    return _sending([[_head(COMPLETIONS, 100 * MB), *[b"a" * MB] * 100]])


@row("chunks-of-1", "4 bodies of 2 MB in chunks of one byte", limit_s=60.0)
def _chunks() -> Attack:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    return _sending([[head.encode(), b"1\r\n \r\n" * (2 * MB), b"0\r\n\r\n"]] * 4)


@row(
    "trailers", "30 MB of trailers after a body in chunks, 8 times, 4 of them of a request without a body", limit_s=60.0
)
def _trailers() -> Attack:
    lines = [b"a:b\r\n" * 50_000] * 120
    heads = [
        f"{name} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        for name in (f"POST {COMPLETIONS}", "GET /health")
    ]
    return _sending([[head.encode() + b"2\r\n{}\r\n0\r\n", *lines] for head in heads * 4])


@row("trailer-30mb", "a trailer of 30 MB")
def _trailer() -> Attack:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\na: "
    return _sending([[head.encode(), *[b"a" * PIECE_BYTES] * 120]])


@row("idle-5000", "5,000 connections opened for nothing", "open", 10.0)
def _idle() -> Attack:
    return _sending([[]] * 5000)


@row("head-10mb", "a header of 10 MB")
def _huge_head() -> Attack:
    return _sending([[b"GET /health HTTP/1.1\r\nHost: x\r\nx-filler: ", b"a" * (10 * MB), b"\r\n\r\n"]])


@row("headers-x20", "20 requests of 60,000 headers in one piece")
def _headers() -> Attack:
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + b"a:\r\n" * (PIECE_BYTES // 4) + b"\r\n"
    return _sending([[head]] * 20)


@row("pipelined-x20", "20 connections with 10,000 requests in one piece")
def _pipelined() -> Attack:
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    request = b"GET /health HTTP/1.1\r\n\r\n"
    return _sending([[request * (PIECE_BYTES // len(request)) + last]] * 20)


@row("pipelined-x300", "300 connections with 1,000 requests in one piece", limit_s=60.0)
def _pipelined_together() -> Attack:
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    return _sending([[b"GET /health HTTP/1.1\r\n\r\n" * 1000 + last]] * 300)


@row("pipelined-posts", "20 connections with 3,000 completions in one piece", limit_s=60.0)
def _pipelined_posts() -> Attack:
    request = f"POST {COMPLETIONS} HTTP/1.1\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    return _sending([[request * (PIECE_BYTES // len(request)), _head(COMPLETIONS, 2), b"{}"]] * 20)


@row("url-200kb-x20", "20 requests for a path of 200 KB in one piece")
def _url() -> Attack:
    return _sending([[_head("/" + "%41" * 66_000, 0, method="GET")]] * 20)


@row("churn-2000", "2,000 chats that are left after their first byte", limit_s=60.0)
def _churn() -> Attack:
    body = _completion(messages=[{"role": "user", "content": "Hi"}], max_tokens=1000, stream=True)

    return _leaving(2000, _post(CHAT, body), 64)


def warm_up(port: int) -> None:
    """What a router loads and makes once, it has loaded and made before it is measured."""
    attacks = [_completes(prompt="Hi", max_tokens=4, stop=["x"]), _chats(max_tokens=4, stream=True)]
    for attack in attacks:
        answers = uvloop.run(attack(port, 10.0))
        assert answers[0].status == 200, answers


def run_sender(pipe: Connection) -> None:
    """The process that sends: a row's name in, "ready" out; then a port in, the answers out; None ends it."""
    while (name := pipe.recv()) is not None:
        row_, attack = ROWS[name], ROWS[name].prepare()
        pipe.send("ready")
        pipe.send(uvloop.run(attack(pipe.recv(), row_.limit_s)))
