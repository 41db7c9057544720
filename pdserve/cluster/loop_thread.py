"""A thread with its own event loop, for callers that have none or another one.

Knows nothing of what runs there. Used by the Python client.
"""

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """A thread that runs an event loop until `close`.

    `said_when_closed` is the text of the RuntimeError that later calls raise.
    """

    def __init__(self, name: str, said_when_closed: str) -> None:
        self._said_when_closed = said_when_closed
        self._loop = asyncio.new_event_loop()
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancels what is still running there and ends the thread. Closing twice is allowed."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closed.set)
            self._thread.join()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts the coroutine there. Raises RuntimeError if the thread has ended."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise RuntimeError(self._said_when_closed) from error

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for the coroutine's result on this thread. Raises the first error of a group of
        errors."""
        try:
            return self.start(work).result()
        except concurrent.futures.CancelledError:
            raise RuntimeError(self._said_when_closed) from None
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def result_of(self, work: Any) -> Any:
        """Awaits the result from another event loop. Raises the first error of a group of
        errors."""

        async def wrapped() -> Any:
            return await work

        try:
            return await asyncio.wrap_future(self.start(wrapped()))
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    def items_of(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yields what the generator makes there, for a plain loop. Closing the iterator cancels
        it."""
        made: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async with aclosing(items):
                    async for item in items:
                        made.put((item,))
                made.put(None)
            except asyncio.CancelledError:
                made.put(RuntimeError(self._said_when_closed))
                raise
            except BaseException as error:
                made.put(error)
                raise

        task = self.start(pump())
        try:
            while (found := made.get()) is not None:
                if isinstance(found, BaseException):
                    raise found
                yield found[0]
        finally:
            task.cancel()

    async def items_for_loop(self, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yields what the generator makes there, for another event loop."""
        try:
            while True:
                try:
                    yield await self.result_of(anext(items))
                except StopAsyncIteration:
                    return
        finally:
            await self.result_of(items.aclose())

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await self._closed.wait()
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
