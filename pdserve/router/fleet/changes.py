"""Wakes those who wait for the fleet to change: a worker joined, left, changed its role, or got a
peer.

Knows no workers. Owned by `router.fleet.fleet`, which reports each change. Only a few waiters go on
in each turn of the event loop (`router.fleet.wakes`).
"""

import asyncio
from functools import partial

from pdserve.router.fleet.wakes import Wakes


class Changes:
    def __init__(self, wakes: Wakes) -> None:
        self._wakes = wakes
        # In the order of their arrival; the next change wakes all of them.
        self._awaiting: dict[asyncio.Future[None], None] = {}

    @property
    def num_awaiting(self) -> int:
        """Returns how many wait for the next change."""
        return len(self._awaiting)

    def next(self) -> asyncio.Future[None]:
        """Returns a future that is done soon after the next change."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaiting[waiter] = None
        waiter.add_done_callback(self._no_longer_awaiting)
        return waiter

    def notify(self) -> None:
        """Wakes everyone who waits, because there was a change."""
        for waiter in self._awaiting:
            self._wakes.later(partial(_wake, waiter))
        self._awaiting.clear()

    def _no_longer_awaiting(self, waiter: asyncio.Future[None]) -> None:
        self._awaiting.pop(waiter, None)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():  # it may have been cancelled meanwhile
        waiter.set_result(None)
