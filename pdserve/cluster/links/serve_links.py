"""Connects a router process to workers through Serve: one `ServeLink` per worker, and the watcher
that tells the fleet which workers there are.

Knows no tokens. `ServeLink` is `router.fleet.link.WorkerLink` over a deployment handle whose calls
`cluster.links.addressing` delivers to the named replica. Any error of Ray becomes a WorkerLost.
Used by `cluster.deployments.router_replica`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any, Protocol

import grpc
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from pdserve.background.patience import patience
from pdserve.background.tasks import keep
from pdserve.cluster.links.addressing import board_key
from pdserve.cluster.links.batching import Batcher
from pdserve.cluster.links.framing import Joiner
from pdserve.cluster.links.membership import Listener, Members, listen
from pdserve.protocol.codec import encode
from pdserve.protocol.commands import Command
from pdserve.router.fleet.link import WorkerLink, WorkerLost

SEND_DEADLINE_S = 10.0
# Deadlines for the first event of a stream. A call may be lost on its way, and a new one is
# answered at once, so the first deadline is short. The engine may also be within a long step, so
# each further deadline is twice as long, up to the last. The Fleet watches later events.
FIRST_HELLO_S = 2.0
LAST_HELLO_S = 30.0
# Time between attempts to reach a worker whose stream broke although it counts as running.
REJOIN_S = 0.5
MAX_COMMAND_BYTES = 3 << 20  # Serve's gRPC servers take 4 MiB

# These are RayActorError (ActorDied, or ActorUnavailable over gRPC), errors of the replica itself,
# and calls that never reached it.
LOSSES = (
    RayError,
    RayServeException,
    RequestCancelledError,
    grpc.RpcError,
    ConnectionError,
    TimeoutError,
)


class ServeLink:
    """One worker as this process sees it. All links to a deployment's workers share one
    `handle`."""

    def __init__(self, handle: DeploymentHandle, worker_id: str) -> None:
        self._worker_id = worker_id
        # By reference, a streamed item would cost several times as much and pass through Ray's
        # object store.
        self._submit = handle.options(method_name="submit", _by_reference=False)
        self._batcher = Batcher(self._deliver, MAX_COMMAND_BYTES)
        self._events = handle.options(method_name="events", stream=True, _by_reference=False)
        self._hello_s = FIRST_HELLO_S  # deadline for the first event of the next stream

    @property
    def worker_id(self) -> str:
        return self._worker_id

    async def send(self, command: Command) -> None:
        """Sends a command. Raises WorkerLost, and ValueError if the command is too large for
        Serve."""
        data = encode(command)
        if len(data) > MAX_COMMAND_BYTES:
            raise ValueError(
                f"prompt: the request takes {len(data)} bytes, but at most {MAX_COMMAND_BYTES} can "
                "be sent to a worker"
            )
        await self._batcher.send(data)

    async def _deliver(self, commands: list[bytes]) -> None:
        try:
            async with patience(SEND_DEADLINE_S):
                await _call(self._submit, commands, worker_id=self._worker_id)
        except LOSSES as error:
            raise self._lost(error) from error

    async def events(self, router_id: str, session: int) -> AsyncGenerator[bytes, None]:
        """Yields the worker's messages. Raises WorkerLost.

        After a stream that did not begin in time, the next one has twice as long for it.
        """
        response = _call(self._events, router_id, session, worker_id=self._worker_id)
        pieces = aiter(response)
        joiner = Joiner()
        hello_s = self._hello_s
        try:
            async with patience(hello_s):
                message = joiner.feed(await anext(pieces, b""))
            self._hello_s = FIRST_HELLO_S
            if message:
                yield message
            async for piece in pieces:
                message = joiner.feed(piece)
                if message is not None:
                    yield message
        except TimeoutError:
            response.cancel()
            self._hello_s = min(2 * hello_s, LAST_HELLO_S)
            raise WorkerLost(f"it has not answered for {hello_s:g} s") from None
        except LOSSES as error:
            raise self._lost(error) from error
        except (asyncio.CancelledError, GeneratorExit):
            with suppress(*LOSSES):  # the stream may have failed meanwhile
                response.cancel()
            raise

    def _lost(self, error: Exception) -> WorkerLost:
        return (
            error
            if isinstance(error, WorkerLost)
            else WorkerLost(f"{type(error).__name__}: {error}".splitlines()[0])
        )


def _call(handle: DeploymentHandle, *args: Any, **kwargs: Any) -> Any:
    """Calls the handle outside the context of the HTTP request that may be running.

    When an HTTP request is cancelled, Serve cancels the calls that it made. The cancels to its
    workers are sent at just that time.
    """
    return Context().run(handle.remote, *args, **kwargs)


def _on_loop(loop: asyncio.AbstractEventLoop, listener: Listener, members: Members) -> None:
    loop.call_soon_threadsafe(listener, members)


class Membership(Protocol):
    """The two calls of `router.fleet.fleet.Fleet` that the watcher makes."""

    @property
    def worker_ids(self) -> set[str]: ...

    def join(self, link: WorkerLink) -> None: ...

    def leave(self, worker_id: str) -> None: ...


class MembershipWatcher:
    """Keeps a fleet equal to the running replicas of some worker deployments.

    Make and use it inside the event loop.
    """

    def __init__(self, fleet: Membership, handles: list[DeploymentHandle]) -> None:
        self._fleet = fleet
        self._handles = {board_key(handle.deployment_id): handle for handle in handles}
        self._running: dict[str, Members] = {}
        self._links: dict[str, ServeLink] = {}
        self._changed = asyncio.Event()
        self._stops: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        for key, handle in self._handles.items():
            handle.options(_by_reference=False)  # makes Serve build this process's PinRouter
            self._stops.append(listen(key, partial(_on_loop, loop, partial(self._set, key))))
        self._task = keep("membership watcher", self._watch)

    def stop(self) -> None:
        """Stops watching. Calling it twice is allowed."""
        while self._stops:
            self._stops.pop()()
        if self._task is not None:
            self._task.cancel()

    def _set(self, key: str, members: Members) -> None:
        self._running[key] = members
        self._changed.set()

    async def _watch(self) -> None:
        while True:
            self._changed.clear()
            self._update()
            try:
                async with asyncio.timeout(REJOIN_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _update(self) -> None:
        present = set()
        for key, members in self._running.items():
            for worker_id in members:
                present.add(worker_id)
                if worker_id not in self._links:
                    self._links[worker_id] = ServeLink(self._handles[key], worker_id)
                self._fleet.join(self._links[worker_id])
        for worker_id in self._links.keys() - present:
            self._fleet.leave(worker_id)
            # The link is deleted only now. If `leave` raises, the worker leaves at the next look.
            del self._links[worker_id]
