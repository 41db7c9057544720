"""Joins messages to one receiver into fewer calls: messages that are sent during a call go with the
next one.

A Serve call costs its caller about 0.7 ms of CPU, whatever it carries. A lone message leaves at
once. Knows no Ray. Used by `cluster.links.serve_links`.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from pdserve.background.tasks import once

MAX_CALLS = 2  # at once; with one, a message would wait for the answer to an unrelated call


class Batcher:
    """Delivers messages by `call`, in order, with at most max_bytes of messages per call.

    `call` raises if it fails. Use a Batcher from one event loop.
    """

    def __init__(self, call: Callable[[list[bytes]], Awaitable[None]], max_bytes: int) -> None:
        self._call = call
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[bytes, asyncio.Future[None]]] = deque()
        self._num_calls = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(self, message: bytes) -> None:
        """Returns when the message is delivered. Raises what its call raised.

        Cancelling this does not take the message back.
        """
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((message, sent))
        if self._num_calls < MAX_CALLS:
            # There is no await between the test and this line, nor between the end of the loop in
            # _deliver_waiting and its decrement. So no message is left without a task.
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
        """Delivers a batch; an error of the call is raised in every sender of the batch.

        Only what is no Exception (a cancelled task) also ends this task.
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
