"""Counts what happens in each turn of an event loop, for tests of work that must not all be done in
one turn."""

import asyncio
from typing import Any


class Turns:
    """Counts turns of the event loop, and what happens in each."""

    def __init__(self) -> None:
        self.counts = [0]
        self._task = asyncio.create_task(self._count())

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.counts.append(0)

    def note(self, *_: Any) -> None:
        self.counts[-1] += 1

    def close(self) -> None:
        self._task.cancel()
