"""The HTTP server in a router's own process; `pdserve up` uses it instead of Serve's Python proxy.

The proxy adds 6 to 8 ms to the time to the first token, and needs more CPU per streamed token than
the router itself. It hands each request over by gRPC, is called back for the body, and gets each
piece of the answer by gRPC again. All routers of a node listen on one port, and the kernel spreads
connections among them. Knows no routes. Used by `cluster.deployments.router_replica`.

Clients may be slow on purpose, or send data that takes long to parse. The size of headers, their
number and the time they take have no limit in uvicorn, so `_Guarded` sets limits. It drops
trailers, which uvicorn would add to the headers. It also limits the bytes between and after the
pieces of a body that are no part of it. `router.http` limits bodies and streams, and the kernel
ends connections whose peer takes no bytes.

A socket gives up to 256 KiB at once. That may be 14,000 requests, 60,000 headers or 40,000 pieces
of a body, each with Python code to run. So a connection's bytes are parsed a kilobyte at a time:

    data --> rest --SLICE_BYTES--> parser, until a slice took SLICE_S or an answer must be written.
              ^ Then the socket is not read any more.
                In each turn of the loop, `_Turns` lets one such connection go on.

When many connections receive bytes in one turn, those that come after TURN_S wait in the same way.
"""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdserve.background.tasks import once

KEEP_ALIVE_S = 90  # Serve's default; uvicorn's 5 breaks load generators and connection pools
BACKLOG = 2048  # uvicorn's default
HEAD_DEADLINE_S = 20.0  # from a request's first byte to the last byte of its headers
MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 256
MAX_PARTS = 16_384  # limit for bodies whose pieces are on average smaller than SMALL_PART_BYTES
SMALL_PART_BYTES = 32
SLICE_BYTES = 1 << 10
SLICE_S = 0.0005
TURN_S = 0.003
_NOTHING = memoryview(b"")


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    keep_alive_s: int = KEEP_ALIVE_S


class _Turns:
    """Lets connections with unparsed bytes go on: one per turn of the loop, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: deque[_Guarded] = deque()
        # Time when this turn has parsed enough; None: nothing was parsed in it yet.
        self._until: float | None = None

    def has_room(self, loop: asyncio.AbstractEventLoop) -> bool:
        """True if a connection that did not wait may parse in this turn."""
        now = time.perf_counter()
        if self._until is None:
            self._until = now + TURN_S
            loop.call_soon(self._end)
        return now < self._until

    def _end(self) -> None:
        self._until = None

    def wait(self, connection: "_Guarded") -> None:
        """Calls the connection's `feed` in a later turn. The connection must not be waiting
        already."""
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            connection.loop.call_soon(self._next)

    def _next(self) -> None:
        connection = self._waiting.popleft()
        if self._waiting:
            connection.loop.call_soon(self._next)
        connection.feed()


class _Flow(FlowControl):
    """Extends uvicorn's flow control by one more reason to pause reading.

    uvicorn pauses and resumes reading for its own purposes. Here reading also pauses while the
    connection holds bytes that were read but not parsed.
    """

    def __init__(self, connection: "_Guarded") -> None:
        super().__init__(connection.transport)
        self._connection = connection
        self._holds = False

    def hold(self, holds: bool) -> None:
        if holds != self._holds:
            self._holds = holds
            self._apply(self.read_paused)

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._apply(self._holds)

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._apply(self._holds)
            self._connection.go_on()

    def _apply(self, was_paused: bool) -> None:
        """Pauses or resumes the transport. If `was_paused` for the other reason, nothing
        changes."""
        if was_paused or self._transport.is_closing():
            return
        if self.read_paused or self._holds:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


class _Guarded(HttpToolsProtocol):
    """Ends a connection whose headers are too long or take too long, and one that sends no
    request."""

    flow: _Flow
    _timer: asyncio.TimerHandle | None = None
    _in_head = False
    _num_head_bytes = 0
    # Bytes since the headers or the last piece of a body: trailers, chunk extensions, empty lines.
    _num_idle_bytes = 0
    _body_left = 0  # bytes still to come of a body whose length is known
    _num_parts = _num_part_bytes = 0
    _rest = _NOTHING
    _waits = _upgraded = False

    def __init__(self, turns: _Turns, **options: Any) -> None:
        """Takes `turns`, which all connections of a server share, and uvicorn's options."""
        super().__init__(**options)
        self._turns = turns

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(self)
        self._end_in(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._rest = _NOTHING
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses what is cheap or short at once; the rest waits for a turn."""
        self._rest = memoryview(bytes(self._rest) + data if self._rest else data)
        if self._waits:
            return
        if self._turns.has_room(self.loop):
            self._parse()
        else:
            self.flow.hold(True)
            self.go_on()

    def go_on(self) -> None:
        """Parses the bytes that are left when it is this connection's turn.

        Called after an answer was written, or a body was taken.
        """
        if self._rest and not self._waits:
            self._waits = True
            self._turns.wait(self)

    def feed(self) -> None:
        self._waits = False
        self._parse()

    def _parse(self) -> None:
        until = time.perf_counter() + SLICE_S
        while self._rest and self._may_parse and time.perf_counter() < until:
            size = self._body_left or SLICE_BYTES
            piece = self._rest[:size]
            # An empty slice of a memoryview would keep the whole buffer alive.
            self._rest = self._rest[size:] if size < len(self._rest) else _NOTHING
            self._num_idle_bytes += len(piece)
            super().data_received(piece)  # type: ignore[arg-type]  # the parser takes any buffer
            self._check(len(piece))
        if self._upgraded or self.transport.is_closing():
            self._rest = _NOTHING
        self.flow.hold(bool(self._rest))
        if self._may_parse:
            self.go_on()
        if self._timer is None and not self._in_head and not self._answering and not self._rest:
            # Only empty lines came; uvicorn stops its own timer for them.
            self._end_in(self.timeout_keep_alive)

    @property
    def _may_parse(self) -> bool:
        """False while uvicorn has paused.

        uvicorn pauses while a request waits for the answer before it, and while a body is not
        taken.
        """
        return not (
            self.flow.read_paused or self.pipeline or self._upgraded or self.transport.is_closing()
        )

    def _check(self, num_bytes: int) -> None:
        if self._in_head:
            self._num_head_bytes += num_bytes
            if self._num_head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
                self._end(b"431 Request Header Fields Too Large")
        elif self._num_idle_bytes > MAX_HEAD_BYTES:
            self._end(b"431 Request Header Fields Too Large", in_body=True)
        elif (
            self._num_parts > MAX_PARTS
            and self._num_part_bytes < SMALL_PART_BYTES * self._num_parts
        ):
            self._end(b"400 Bad Request", in_body=True)

    def on_message_begin(self) -> None:
        self._in_head = True
        self._num_head_bytes = 0
        self._num_parts = self._num_part_bytes = 0
        self._end_in(HEAD_DEADLINE_S)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._num_idle_bytes = 0
        self._body_left = next(
            (int(value) for name, value in self.headers if name == b"content-length"), 0
        )
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_parts += 1
        self._num_idle_bytes = 0
        self._num_part_bytes += len(body)
        self._body_left = max(0, self._body_left - len(body))
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.go_on()

    def _unsupported_upgrade_warning(self) -> None:
        """Warns once. The bytes that follow are in a protocol that is not known here, and are
        dropped."""
        self._upgraded = True
        super()._unsupported_upgrade_warning()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end_in(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._too_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        if self._answering:  # the next request began to arrive during an answer
            self._end_in(HEAD_DEADLINE_S)
        else:
            self._end(b"408 Request Timeout" if self._in_head else b"")

    def _end(self, status: bytes, in_body: bool = False) -> None:
        if self.transport.is_closing():
            return
        begun = (
            self.cycle is not None and self.cycle.response_started if in_body else self._answering
        )
        if status and not begun:  # otherwise it would land in the middle of an answer
            self.transport.write(
                b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            )
        self.transport.close()


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the process.

    uvicorn would take SIGINT and SIGTERM from whoever handles them. If two servers do not end in
    the reverse order of their starts, one of them would keep the signals for ever.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves from `start` to `close`. Use it from one event loop."""

    def __init__(self, app: ASGIApp, address: Address, client_timeout_s: float) -> None:
        """Binds the socket. A client that takes no bytes for client_timeout_s is cut off.

        Raises OSError when another program listens there; other routers of this user may.
        """
        self._socket = _reusable_socket(address)
        # Accepted connections inherit this. Without it, an answer to a client that does not read
        # would wait for ever, and so would `close`. The application cannot help: it is done with an
        # answer when the last bytes are in a buffer.
        self._socket.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(client_timeout_s * 1000)
        )
        self._server = _Server(
            uvicorn.Config(
                app,
                http=cast(type[asyncio.Protocol], partial(_Guarded, _Turns())),
                timeout_keep_alive=address.keep_alive_s,
                lifespan="off",
                ws="none",
                proxy_headers=False,
                access_log=False,
                log_config=None,
                log_level="warning",
            )
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def connections(self) -> list[_Guarded]:
        """The open connections."""
        return cast(list[_Guarded], list(self._server.server_state.connections))

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Takes connections from now on.

        If the server ends by an error, `running` is False and the process must be replaced.
        """
        self._socket.listen(BACKLOG)
        self._task = once("http server", self._server.serve(sockets=[self._socket]))

    async def close(self) -> None:
        """Takes no new connections, waits for the answers that are being written, then ends."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait([self._task])
        self._socket.close()


def _reusable_socket(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    reusable = socket.socket(family, socket.SOCK_STREAM)
    try:
        reusable.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reusable.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reusable.bind((address.host, address.port))
    except OSError:
        reusable.close()
        raise
    return reusable
