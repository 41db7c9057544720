"""Keeps garbage collections short: each one stops the event loop, and with it every stream.

A full collection passes over every object that refers to others: 5 to 20 ms for 100,000 objects.
Thousands of prompts under way have several times as many. The interpreter begins a full
collection whenever a quarter more objects have survived, again and again while load grows. Here the
interpreter collects only young garbage, and the rest is collected

    soon   while there are few objects
    late   after LATEST_S: little garbage survives its youth, but it must not be kept for ever

Knows nothing of what the objects are. Used by processes with one event loop and many streams:
routers.
"""

import asyncio
import gc
import time
from collections.abc import Callable

from pdserve.background.tasks import keep

LOOK_S = 5.0
LATEST_S = 60.0
FEW_OBJECTS = 50_000
_NEVER = 1 << 30  # number of collections of the middle generation before a full one


class GarbageCollector:
    """Collects the garbage of one process; there is one per process. `now` returns seconds of a
    clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._collected_at = now()
        self._thresholds = gc.get_threshold()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Takes over from the interpreter. Objects that exist by now are never passed over again.

        Needs a running event loop.
        """
        gc.collect()
        gc.freeze()
        gc.set_threshold(*self._thresholds[:2], _NEVER)
        self._task = keep("garbage collection", self._run)

    def stop(self) -> None:
        """Gives collection back to the interpreter."""
        gc.set_threshold(*self._thresholds)
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Collects if that takes a short time, or has been put off for long."""
        num_objects = len(gc.get_objects(generation=2))
        if num_objects <= FEW_OBJECTS or self._now() - self._collected_at >= LATEST_S:
            gc.collect()
            self._collected_at = self._now()
