"""Long work on an event loop, cut into slices; one slice runs in each turn of the loop, whoever's it is.

    with pacer.pace() as pace:
        for item in many:
            if pace.is_due:
                await pace.rest()
            work_on(item)

Between two rests nothing else may be awaited. Knows nothing of the work. One Pacer a router; used by whatever a request
can make long.
"""

import asyncio
import time
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

from pdserve.background.tasks import once

SLICE_S = 0.003


class Pacer:
    def __init__(self) -> None:
        self._turns = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it in a task of its own, which is kept until it ends."""
        task = once("paced work", work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def pace(self) -> "Pace":
        return Pace(self._turns)


class Pace:
    """One piece of work. Its first slice runs at once; for each further one it queues with all others that are long,
    in order of arrival."""

    __slots__ = ("_has_turn", "_turns", "_until")

    def __init__(self, turns: asyncio.Lock) -> None:
        self._turns = turns
        self._has_turn = False
        self._until = time.perf_counter() + SLICE_S

    def __enter__(self) -> "Pace":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_turn()

    @property
    def is_due(self) -> bool:
        """Whether its slice is over."""
        return time.perf_counter() >= self._until

    async def rest(self) -> None:
        """Let everybody else run, until there is another slice for this work."""
        self._give_turn()
        await self._turns.acquire()
        self._has_turn = True
        await asyncio.sleep(0)  # with the turn: what comes between two slices is a whole turn of the loop
        self._until = time.perf_counter() + SLICE_S

    def _give_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._turns.release()
