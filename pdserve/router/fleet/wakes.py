"""Wakes many requests that one cause concerns, a few in each turn of the event loop, so that all
other work comes between.

A worker that dies wakes every request that it computed, and one that joins wakes every request that
waits for a worker. Each of them then chooses workers anew. Does not know who is woken: a wake is a
function that wakes, and does nothing else. Used by `router.fleet.fleet`; each router has one.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from pdserve.background.tasks import keep

# wakes in one turn of the event loop; each woken request chooses workers and sends its prompt
WAKES_AT_ONCE = 16


class Wakes:
    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._task: asyncio.Task[None] | None = None

    def later(self, wake: Callable[[], None]) -> None:
        """Calls `wake` in one of the next turns, after all earlier ones."""
        self._waiting.append(wake)
        if self._task is None or self._task.done():
            self._task = keep("wakes", self._run)

    async def until_done(self) -> None:
        """Returns once everybody is awake who is to be woken now."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while self._waiting:
            for _ in range(min(WAKES_AT_ONCE, len(self._waiting))):
                self._waiting.popleft()()
            await asyncio.sleep(0)
