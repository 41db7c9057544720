"""A deadline for others that does not run while this process stands still.

When a process was stopped, suspended or frozen and goes on, all its deadlines have passed, although
the answers may have come long ago. `patience` is `asyncio.timeout` without that time. Knows nothing
of what is waited for. Used by `cluster.links.serve_links`; `router.fleet.watch` does the same for
silence, once per tick for all workers.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# Looks per deadline. If a look comes later than after twice its period, the event loop stood still.
LOOKS = 4


@asynccontextmanager
async def patience(seconds: float) -> AsyncIterator[None]:
    """Raises TimeoutError if the body takes longer, without the time in which the event loop stood
    still.

    Only pauses of more than a quarter of `seconds` are left out.
    """
    async with asyncio.timeout(None) as timeout:
        looks = _Looks(timeout, seconds)
        try:
            yield
        finally:
            looks.stop()


class _Looks:
    def __init__(self, timeout: asyncio.Timeout, seconds: float) -> None:
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._period_s = seconds / LOOKS
        self._left = LOOKS
        self._arm()

    def stop(self) -> None:
        self._handle.cancel()

    def _arm(self) -> None:
        self._armed = self._loop.time()
        self._handle = self._loop.call_later(self._period_s, self._look)

    def _look(self) -> None:
        if self._loop.time() - self._armed < 2 * self._period_s:
            self._left -= 1
        if self._left:
            self._arm()
        else:
            self._timeout.reschedule(self._loop.time())
