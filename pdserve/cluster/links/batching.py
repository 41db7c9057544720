"""Joins messages to one receiver into fewer calls: what is sent while calls are under way goes with
the next one.

A Serve call costs its caller about 0.7 ms of CPU, whatever it carries; a lone message leaves at
once. Knows no Ray. Used by `cluster.links.serve_links`.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from pdserve.background.tasks import once

MAX_CALLS = 2  # at once: with one, a message would wait for the answer to a stranger's


class Batcher:
    """Use from one event loop. call: delivers messages in order or raises; max_bytes: of the
    messages of one call."""

    def __init__(self, call: Callable[[list[bytes]], Awaitable[None]], max_bytes: int) -> None:
        self._call = call
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[bytes, asyncio.Future[None]]] = deque()
        self._num_calls = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(self, message: bytes) -> None:
        """Returns when it is delivered; raises what its call raised. Being cancelled does not take
        the message back."""
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((message, sent))
        if self._num_calls < MAX_CALLS:
            # here and below without an await between: no message is left to nobody
            self._num_calls += 1
            task = once("batcher", self._deliver_waiting())
            self._tasks.add(task)  # the loop keeps weak references only
            task.add_done_callback(self._tasks.discard)
        await sent

    async def _deliver_waiting(self) -> None:
        try:
            while self._waiting:
                await self._deliver(self._take())
        finally:
            self._num_calls -= 1

    async def _deliver(self, batch: list[tuple[bytes, asyncio.Future[None]]]) -> None:
        """An error of the call is every sender's in it; only what is no Exception (a cancelled
        task) ends this task too.
        """
        try:
            await self._call([message for message, _ in batch])
        except BaseException as error:
            for _, sent in batch:
                if not sent.done():
                    sent.set_exception(
                        error
                        if isinstance(error, Exception)
                        else ConnectionError("the call was cancelled")
                    )
            if not isinstance(error, Exception):
                raise
        else:
            for _, sent in batch:
                if not sent.done():
                    sent.set_result(None)

    def _take(self) -> list[tuple[bytes, asyncio.Future[None]]]:
        batch = [self._waiting.popleft()]
        size = len(batch[0][0])
        while self._waiting and size + len(self._waiting[0][0]) <= self._max_bytes:
            batch.append(self._waiting.popleft())
            size += len(batch[-1][0])
        return batch
