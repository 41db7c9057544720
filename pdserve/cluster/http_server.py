"""The HTTP server in a router's own process: what `pdserve up` uses instead of Serve's Python proxy.

The proxy costs 6 to 8 ms of the time to the first token and more CPU a streamed token than the router itself: it hands
each request over by gRPC, is called back for the body, and gets each piece of the answer by gRPC again. All routers of
a node listen on one port, and the kernel spreads connections among them. Knows no routes. Used by
`cluster.router_replica`.

Clients that are slow on purpose: uvicorn limits neither the size of headers nor the time they take, so `_Guarded` does;
bodies and streams are `router.app`'s business; and the kernel ends connections whose peer takes no bytes.
"""

import asyncio
import socket
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdserve.background.tasks import once

KEEP_ALIVE_S = 90  # Serve's default too; load generators and connection pools dislike uvicorn's 5
HEAD_DEADLINE_S = 20.0  # from a request's first byte to its headers' last
MAX_HEAD_BYTES = 64 << 10  # as far as they come in more than one piece; a piece is at most 256 KiB


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    keep_alive_s: int = KEEP_ALIVE_S


class _Guarded(HttpToolsProtocol):
    """Ends a connection whose request's headers are too long or take too long, and one that is opened for nothing."""

    _timer: asyncio.TimerHandle | None = None
    _in_head = False
    _num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end_in(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._end(b"431 Request Header Fields Too Large")
        elif self._timer is None and not self._answering:  # empty lines: uvicorn stops its own timer for them
            self._end_in(self.timeout_keep_alive)

    def on_message_begin(self) -> None:
        self._in_head, self._num_head_bytes = True, 0
        self._end_in(HEAD_DEADLINE_S)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

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
        if self._answering:  # the next request began to come meanwhile
            self._end_in(HEAD_DEADLINE_S)
        else:
            self._end(b"408 Request Timeout" if self._in_head else b"")

    def _end(self, status: bytes) -> None:
        if self.transport.is_closing():
            return
        if status and not self._answering:  # or it would stand in the middle of an answer
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()


class HttpServer:
    """Serves from `start` to `close`. Use from one event loop."""

    def __init__(self, app: ASGIApp, address: Address, client_timeout_s: float) -> None:
        """client_timeout_s: a client that takes no bytes for so long is cut off. Raises OSError when somebody else,
        not another router of this user, listens there."""
        self._socket = _reusable_socket(address)
        # Inherited by what is accepted. Without it an answer to a client that does not read waits for ever, and with
        # it `close`: the application is done with an answer when its last bytes are in a buffer.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(client_timeout_s * 1000))
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_Guarded,
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
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """An error ends the server, and `running` says so: its process must be replaced."""
        self._task = once("http server", self._server.serve(sockets=[self._socket]))

    async def close(self) -> None:
        """Take no new connections, wait for the answers that are being written, then end."""
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
