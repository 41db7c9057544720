"""Watches whether the client is still there, while something is made for it.

    listening --http.disconnect, or close--> gone: work that is under way is cancelled

Knows no requests and no answers. Made by `router.http.calls` when a body has been read, and closed
by the answer that results.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client left, so nobody would read an answer."""


class ClientWatch:
    """Knows when the client goes away, from the moment its body is read. There must be only one
    listener."""

    def __init__(self, receive: Receive) -> None:
        self._gone = asyncio.create_task(_wait_disconnect(receive))

    async def unless_gone(
        self,
        work: Coroutine[Any, Any, T] | Awaitable[T],
        undo: Callable[[T], None] = lambda result: None,
    ) -> T:
        """Returns the result of `work`.

        If the client leaves first, the work is cancelled and ClientGone is raised. `undo` gets a
        result that was made, but that the caller never got because it was cancelled.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return task.result()
        except BaseException:
            task.add_done_callback(
                lambda ended: undo(ended.result()) if _has_result(ended) else None
            )
            await _stop(task)
            raise
        finally:
            del task  # its error refers to this frame, and so to everything that was being made

    def close(self) -> None:
        """Stops listening. Work that is under way is stopped as if the client had left."""
        self._gone.cancel()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _has_result(task: asyncio.Future[Any]) -> bool:
    return not task.cancelled() and task.exception() is None


async def _stop(task: asyncio.Future[Any]) -> None:
    """Cancels the task and lets its `finally` blocks run."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
