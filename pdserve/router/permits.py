"""Permits of long bodies: only a few long bodies are worked on at once.

A request gives its permit back while it waits for something else than its own work, for example for
a grammar. Otherwise a few hostile grammars would keep all other long bodies waiting. Knows no
bodies. `router.http.calls` takes permits, and `router.grammars` gives them back meanwhile.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Self

_mine: ContextVar["Permit | None"] = ContextVar("permit", default=None)


class Permit:
    """One of a few permits, which `async with` holds for the task that it runs in."""

    def __init__(self, permits: asyncio.Semaphore) -> None:
        self._permits = permits
        self._is_held = False

    async def __aenter__(self) -> Self:
        await self.take()
        self._before = _mine.set(self)
        return self

    async def __aexit__(self, *error: object) -> None:
        _mine.reset(self._before)
        self.give_back()

    async def take(self) -> None:
        await self._permits.acquire()
        self._is_held = True

    def give_back(self) -> None:
        """Does nothing if it is not held."""
        if self._is_held:
            self._is_held = False
            self._permits.release()


@asynccontextmanager
async def without_permit() -> AsyncIterator[None]:
    """Gives the task's permit back, if it holds one, and takes one again at the end, unless an
    error ends the work."""
    permit = _mine.get()
    if permit is not None:
        permit.give_back()
    yield
    if permit is not None:
        await permit.take()
