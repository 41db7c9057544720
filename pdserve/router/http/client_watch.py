"""Whether the client is still there, for as long as something is made for it.

    listening --http.disconnect, or close--> gone: work that is under way is cancelled

Knows no requests and no answers. Made by `router.http.app` when a body has been read; the answer
that comes of it closes it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is there who would read an answer."""


class ClientWatch:
    """Knows when the client goes away. Listens from the moment the body is read; there must be only
    one listener."""

    def __init__(self, receive: Receive) -> None:
        self._gone = asyncio.create_task(_wait_disconnect(receive))

    async def unless_gone(
        self,
        work: Coroutine[Any, Any, T] | Awaitable[T],
        undo: Callable[[T], None] = lambda result: None,
    ) -> T:
        """The result of work, which is cancelled, with ClientGone raised, when the client leaves
        before. undo: gets the result when there is one, but the caller was cancelled before it
        could get it."""
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
            del task  # its error refers to this frame, and by that to all that was being made

    def close(self) -> None:
        """Listen no more; work that is under way is stopped as if the client had left."""
        self._gone.cancel()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _has_result(task: asyncio.Future[Any]) -> bool:
    return not task.cancelled() and task.exception() is None


async def _stop(task: asyncio.Future[Any]) -> None:
    """Cancel and let its `finally` blocks run."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
