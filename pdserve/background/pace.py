"""Cuts long work on an event loop into slices, and spreads short work of which much may come at
once.

    with pacer.pace() as pace:          await pacer.turn()
        for item in many:               work_on(this)
            if pace.is_due:
                await pace.rest()
            work_on(item)

All work that begins in one turn of the loop shares one slice of its time. What is left queues in
order of arrival, and one piece gets a slice in each further turn. Between two rests nothing else
may be awaited that paces itself, because it would queue after its own caller. Knows nothing of the
work. Each router has one Pacer. It is used for whatever a request can make long, and at the steps
of a request's life that many requests may reach together.
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
        # End of the slice that work beginning in this turn shares; None: none has begun.
        self._until: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pacing: set[asyncio.Task[Any] | None] = set()  # tasks that rest by a Pace

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs the work in a task of its own, and keeps the task until it ends."""
        task = once("paced work", work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def turn(self) -> None:
        """Returns when there is time for something short: at once, unless this turn's slice is used
        up."""
        pace = self.pace()
        if pace.is_due:
            with pace:
                await pace.rest()

    def pace(self) -> "Pace":
        if self._until is None:
            self._until = time.perf_counter() + SLICE_S
            asyncio.get_running_loop().call_soon(self._next_turn)
        return Pace(self._turns, self._until, self._pacing)

    def _next_turn(self) -> None:
        self._until = None


class Pace:
    """One piece of work.

    It begins in the slice of its turn, if some of it is left. For each further slice it queues with
    all others. A task may rest by only one Pace: a second one would wait for the turn that the
    first one has.
    """

    __slots__ = ("_has_turn", "_pacing", "_task", "_turns", "_until")

    def __init__(
        self, turns: asyncio.Lock, until: float, pacing: set[asyncio.Task[Any] | None]
    ) -> None:
        """`until` is when its first slice ends, by perf_counter(). `pacing` are the tasks that rest
        by a Pace."""
        self._turns = turns
        self._pacing = pacing
        self._task: asyncio.Task[Any] | None = None  # set at the first rest, which is rare
        self._has_turn = False
        self._until = until

    def __enter__(self) -> "Pace":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._pacing.discard(self._task)
            self._give_turn()

    @property
    def is_due(self) -> bool:
        """True if its slice is over."""
        return time.perf_counter() >= self._until

    async def rest(self) -> None:
        """Lets everybody else run until this work gets another slice."""
        if self._task is None:
            task = asyncio.current_task()
            assert task not in self._pacing, (
                "work that paces itself must be given its caller's Pace"
            )
            self._pacing.add(task)
            self._task = task
        self._give_turn()
        await self._turns.acquire()
        self._has_turn = True
        # It sleeps while it has the turn, so that a whole turn of the loop lies between two slices.
        await asyncio.sleep(0)
        self._until = time.perf_counter() + SLICE_S

    def _give_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._turns.release()
