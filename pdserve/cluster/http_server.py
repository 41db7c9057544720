"""The HTTP server in a router's own process: what `pdserve up` uses instead of Serve's Python proxy.

The proxy costs 6 to 8 ms of the time to the first token and more CPU a streamed token than the router itself: it hands
each request over by gRPC, is called back for the body, and gets each piece of the answer by gRPC again. All routers of
a node listen on one port, and the kernel spreads connections among them. Knows no routes. Used by
`cluster.router_replica`.
"""

import asyncio
import socket
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_S = 90  # Serve's default too; load generators and connection pools dislike uvicorn's 5


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    keep_alive_s: int = KEEP_ALIVE_S


class HttpServer:
    """Serves from `start` to `close`. Use from one event loop."""

    def __init__(self, app: ASGIApp, address: Address) -> None:
        """Raises OSError when somebody else, not another router of this user, listens there."""
        self._socket = _reusable_socket(address)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
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
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))

    async def close(self) -> None:
        """Take no new connections, wait for the answers that are being written, then end."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
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
