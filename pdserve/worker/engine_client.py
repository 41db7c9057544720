"""The replica shell's end of the wire to its engine process: commands go down, one event stream per
router comes up.

The wire is a zmq PAIR over ipc. Down goes `[encoded Command]`. Up comes `[target, encoded
EventBatch]`, where target is `router_id/session`, or `*` for every subscribed router. Batches pass
through as bytes: nothing is decoded here. Knows no Ray and no torch. All methods belong to the
event loop that made the client. Called by `cluster.deployments.worker_replica`, and by tests that
need no Ray.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from pdserve.protocol.codec import encode
from pdserve.protocol.commands import Command, RouterLost, Stop, Subscribe

logger = logging.getLogger(__name__)

EVERYONE = b"*"
SEND_LIMIT = 100_000  # commands that may wait for an engine that reads none
STREAM_LIMIT = 10_000  # batches that may wait for a router that reads none: minutes of steps


class EngineGone(ConnectionError):
    """The engine process closed its socket, died, or stopped reading."""


def target_of(router_id: str, session: int) -> bytes:
    """Returns the frame that addresses one router's stream."""
    return f"{router_id}/{session}".encode()


class _Stream:
    """Batches on their way to one router. The stream ends when it is closed and read empty."""

    def __init__(self, router_id: str, session: int) -> None:
        self.router_id = router_id
        self.session = session
        self.greeted = False
        self.closed = False
        self._batches: deque[bytes] = deque()
        self._wake = asyncio.Event()

    def put(self, batch: bytes) -> bool:
        """Adds a batch. Returns False if the router has fallen too far behind."""
        self._batches.append(batch)
        self._wake.set()
        return len(self._batches) <= STREAM_LIMIT

    def close(self) -> None:
        self.closed = True
        self._wake.set()

    async def get(self) -> bytes | None:
        """Returns the next batch, in order; None at the end."""
        while not self._batches:
            if self.closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._batches.popleft()


class EngineClient:
    """Connects to an engine at a zmq address (`ipc://…`); the engine may bind it later.

    `connected` is set once the engine answers. Then nobody else can connect, and the socket's file
    may be removed. `closed` is set once the engine is gone, whatever the reason. From then on every
    call raises EngineGone and every stream ends. `overhear` gets each batch that goes to every
    router, still encoded. Make the client inside a running event loop.
    """

    def __init__(self, address: str, overhear: Callable[[bytes], None] | None = None) -> None:
        self._overhear = overhear
        self._loop = asyncio.get_running_loop()
        self.connected = asyncio.Event()
        self.closed = asyncio.Event()
        self._streams: dict[bytes, _Stream] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, SEND_LIMIT)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.RECONNECT_IVL, 20)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._loop.add_reader(_descriptor(self._monitor), self._watch)
        self._loop.add_reader(_descriptor(self._socket), self._receive)
        self._socket.connect(address)
        # zmq's descriptors are edge-triggered. Each must be read once, or it never fires.
        self._watch()
        self._receive()

    def send(self, command: Command) -> None:
        """Queues a command for the engine, in order. Raises EngineGone."""
        self.send_encoded(encode(command))

    def send_encoded(self, data: bytes) -> None:
        """Queues a command that is already encoded; the engine checks its form."""
        if self.closed.is_set():
            raise EngineGone("the engine process is gone")
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            raise EngineGone(f"the engine has left {SEND_LIMIT} commands unread") from None
        # The socket's file descriptor is edge-triggered, and sending may consume the edge of a
        # message that came meanwhile.
        self._loop.call_soon(self._receive)

    async def subscribe(self, router_id: str, session: int) -> AsyncGenerator[bytes, None]:
        """Yields the encoded batches for this router; its Hello is in the first one.

        A newer subscription of the same router ends this one. Closing the iterator tells the engine
        that the router is lost. Raises EngineGone if the engine is gone at the start; ends if it
        goes later.
        """
        stream = self._open(router_id, session)
        try:
            while (batch := await stream.get()) is not None:
                yield batch
        finally:
            self._lose(stream)

    def close(self, stop: bool = True) -> None:
        """Ends all streams and closes the socket. Calling it twice is allowed.

        If `stop` is True the engine is told to stop; pass False if another client takes over.
        """
        if not self.closed.is_set():
            # LINGER is 0 because the peer may be dead. A living one must still get the last
            # messages.
            self._socket.set(zmq.LINGER, 1000)
            for stream in list(self._streams.values()):
                self._lose(stream)
            if stop:
                self.send(Stop())
            self._shut()

    def _open(self, router_id: str, session: int) -> _Stream:
        if self.closed.is_set():
            raise EngineGone("the engine process is gone")
        for stream in [s for s in self._streams.values() if s.router_id == router_id]:
            if stream.session >= session:
                raise EngineGone(
                    f"router {router_id} has a newer stream ({stream.session}) than {session}"
                )
            self._lose(stream)
        stream = self._streams[target_of(router_id, session)] = _Stream(router_id, session)
        self.send(Subscribe(router_id=router_id, session=session))
        return stream

    def _lose(self, stream: _Stream) -> None:
        if stream.closed:
            return
        stream.close()
        del self._streams[target_of(stream.router_id, stream.session)]
        if not self.closed.is_set():
            self.send(RouterLost(router_id=stream.router_id, session=stream.session))

    def _receive(self) -> None:
        """Delivers everything that has arrived."""
        while not self.closed.is_set():
            try:
                target, batch = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._deliver(target, batch)

    def _deliver(self, target: bytes, batch: bytes) -> None:
        if target != EVERYONE:
            stream = self._streams.get(target)
            if stream is not None:
                stream.greeted = True
                self._put(stream, batch)
            return
        if self._overhear is not None:
            self._overhear(batch)
        for stream in list(self._streams.values()):
            if stream.greeted:  # the Hello comes first
                self._put(stream, batch)

    def _put(self, stream: _Stream, batch: bytes) -> None:
        if not stream.put(batch):
            logger.warning("router %s reads nothing: closing its stream", stream.router_id)
            self._lose(stream)

    def _watch(self) -> None:
        """Handles the monitor's reports: the engine has answered, or its end was closed."""
        while not self.closed.is_set() and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected.set()
                continue
            self._receive()
            if not self.closed.is_set():
                self._shut()

    def _shut(self) -> None:
        self.closed.set()
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._loop.remove_reader(_descriptor(self._socket))
        self._loop.remove_reader(_descriptor(self._monitor))
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        # This waits for LINGER, so it must not run on the loop.
        self._loop.run_in_executor(None, self._context.term)


def _descriptor(zmq_socket: "zmq.Socket[bytes]") -> int:
    fd = zmq_socket.get(zmq.FD)
    assert isinstance(fd, int)
    return fd
