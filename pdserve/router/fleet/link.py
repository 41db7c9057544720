"""Reaches one worker from a router, whatever carries the bytes: Serve handles (`cluster`) or zmq
(tests, LocalLink).

Knows no Ray, no tokens and no policies. Used by `router.fleet.sends` and `router.fleet.streams`.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from pdserve.protocol.commands import Command


class WorkerLost(ConnectionError):
    """The worker died or cannot be reached; its work must be done elsewhere."""


class WorkerLink(Protocol):
    """One worker, seen from one router."""

    @property
    def worker_id(self) -> str:
        """An id that is unique among all workers, also after restarts."""
        ...

    async def send(self, command: Command) -> None:
        """Delivers a command to the worker's engine. Raises WorkerLost.

        Two sends may arrive in either order.
        """
        ...

    def events(self, router_id: str, session: int) -> AsyncIterator[bytes]:
        """The worker's one event stream to this router, as encoded EventBatches.

        There is one message per step, and the first one holds a Hello. The stream ends or raises
        WorkerLost when the worker is gone. Closing it makes the worker abort everything that
        (router_id, session) owns. `session` rises with every stream that the router opens to this
        worker.
        """
        ...
