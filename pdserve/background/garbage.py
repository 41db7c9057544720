"""Full garbage collections only while they are short: each stops the event loop, and with it every
stream.

A full one passes over every object that refers to others: 100,000 take 5 to 20 ms, and thousands of
prompts under way are several times as many. The interpreter begins one whenever a quarter more
objects have survived, again and again while load grows. Here it is left to look for young garbage
only, and the rest is collected

    soon   while few objects are there
    late   after LATEST_S: garbage that outlived its youth is rare, but must not be kept for ever

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
_NEVER = 1 << 30  # collections of the middle generation before a full one


class GarbageCollector:
    """One per process. now: seconds of a clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._collected_at = now()
        self._thresholds = gc.get_threshold()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """What is here by now stays, and is passed over never again. Needs a running event loop."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*self._thresholds[:2], _NEVER)
        self._task = keep("garbage collection", self._run)

    def stop(self) -> None:
        """Leave it to the interpreter again."""
        gc.set_threshold(*self._thresholds)
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Collect, if it is short or has been put off for long."""
        num_objects = len(gc.get_objects(generation=2))
        if num_objects <= FEW_OBJECTS or self._now() - self._collected_at >= LATEST_S:
            gc.collect()
            self._collected_at = self._now()
