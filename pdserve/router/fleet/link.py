"""How the router reaches one worker, whatever carries the bytes: Serve handles (cluster/), zmq
(tests, LocalLink).

Knows no Ray, no tokens, no policies. `router.fleet.sends` and `router.fleet.streams` use the links.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from pdserve.protocol.commands import Command


class WorkerLost(ConnectionError):
    """The worker died or cannot be reached; what it was doing must be done elsewhere."""


class WorkerLink(Protocol):
    """One worker, seen from one router."""

    @property
    def worker_id(self) -> str:
        """Unique among all workers, also over restarts."""
        ...

    async def send(self, command: Command) -> None:
        """Deliver a command to the worker's engine. Raises WorkerLost. Two sends may arrive in
        either order."""
        ...

    def events(self, router_id: str, session: int) -> AsyncIterator[bytes]:
        """The worker's one event stream to this router: encoded EventBatches, a message a step, the
        first holding a Hello. Ends or raises WorkerLost when the worker is gone. Closing it makes
        the worker abort everything (router_id, session) owns. session: higher for every stream the
        router opens to this worker."""
        ...
