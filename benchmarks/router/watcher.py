"""Watches a router while something is sent to it: streams, /health, and the gaps in both.

It runs in a process of its own. It knows no rows and judges nothing. router_stall.py uses it.
"""

import asyncio
import gc
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import cast

import uvloop

from benchmarks.router.hostile.sending import CONTEXT, MODEL

MAX_GAP_MS = 100.0  # largest gap of a healthy router
NUM_STREAMS = 8
HEALTH_PERIOD_S = 0.05
WITNESS_PERIOD_S = 0.005


# The process that measures.


@dataclass
class Window:
    """The observations between two looks. Times are in milliseconds. `num_lost` is the number of
    streams that ended."""

    gap_ms: float = 0.0
    health_ms: float = 0.0
    witness_ms: float = 0.0
    num_tokens: int = 0
    num_lost: int = 0
    num_sick: int = 0


class _Stream(asyncio.Protocol):
    """Reads one endless answer as it arrives."""

    def __init__(self, watcher: "_Watcher") -> None:
        self._watcher = watcher
        self.last_at = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        writing = cast(asyncio.Transport, transport)  # uvloop's transports have no asyncio base
        body = (
            f'{{"model":"{MODEL}","prompt":[5,6,7],"max_tokens":{CONTEXT - 8},'
            '"stream":true,"ignore_eos":true}'
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writing.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        window = self._watcher.window
        window.gap_ms = max(window.gap_ms, 1000 * (now - self.last_at))
        window.num_tokens += data.count(b"data: ")
        self.last_at = now

    def connection_lost(self, exc: Exception | None) -> None:
        self._watcher.window.num_lost += 1


class _Watcher:
    """Answers "look" with what was seen since the last look, and "calm" with the time for which all
    streams have flowed."""

    def __init__(self, port: int, pipe: Connection) -> None:
        self.window = Window()
        self._port = port
        self._pipe = pipe
        self._streams: list[_Stream] = []
        self._flowing_since = time.monotonic()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        loop.add_reader(self._pipe.fileno(), lambda: self._asked(ended))
        for _ in range(NUM_STREAMS):
            await loop.create_connection(lambda: self._streams_new(), "127.0.0.1", self._port)
        tasks = [asyncio.create_task(self._ask_health()), asyncio.create_task(self._witness())]
        await ended
        for task in tasks:
            task.cancel()

    def _streams_new(self) -> _Stream:
        self._streams.append(_Stream(self))
        return self._streams[-1]

    def _asked(self, ended: "asyncio.Future[None]") -> None:
        try:
            question = self._pipe.recv()
        except EOFError:
            question = "end"
        if question == "end":
            if not ended.done():
                ended.set_result(None)
            return
        now = time.monotonic()
        self._unfinished(now)
        if question == "calm":
            self._pipe.send(now - self._flowing_since)
        else:
            window = self.window
            self.window = Window()
            self._pipe.send(window)

    def _unfinished(self, now: float) -> None:
        """Counts the gaps that have not ended yet."""
        for stream in self._streams:
            self.window.gap_ms = max(self.window.gap_ms, 1000 * (now - stream.last_at))

    async def _ask_health(self) -> None:
        due = time.monotonic()
        while True:
            began = time.monotonic()
            healthy = await self._healthy()
            now = time.monotonic()
            self.window.health_ms = max(self.window.health_ms, 1000 * (now - began))
            self.window.num_sick += not healthy
            due = max(due + HEALTH_PERIOD_S, now)
            await asyncio.sleep(due - now)

    async def _healthy(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = await reader.read(-1)
            writer.close()
        except OSError:
            return False
        return answer.startswith(b"HTTP/1.1 200")

    async def _witness(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(WITNESS_PERIOD_S)
            now = time.monotonic()
            late = now - before - WITNESS_PERIOD_S
            self.window.witness_ms = max(self.window.witness_ms, 1000 * late)
            if any(now - stream.last_at > MAX_GAP_MS / 1000 for stream in self._streams):
                self._flowing_since = now
            before = now


def run_watcher(port: int, pipe: Connection) -> None:
    gc.disable()  # pauses of this process must not look like the router's
    uvloop.run(_Watcher(port, pipe).run())
