"""Reads request bodies within a budget of bytes over all connections of a router.

Bytes count from their arrival until the request's prompts are made, or until it is refused. A body
may take a quarter of what the others leave, as in switches that share a buffer (Choudhury and Hahne
1998). So many long bodies leave room for short ones, and bytes that a client promises but does not
send cost others nothing. Knows no JSON. Called by `router.http.calls`.
"""

import asyncio
from types import TracebackType

from starlette.requests import ClientDisconnect, Request

from pdserve.router.admission import too_much
from pdserve.router.errors import ApiError

RETRY_AFTER_S = 1  # a long body is read and made into prompts in about a second
SHARE = 4  # one body may take one of this many parts of the free bytes


class Bodies:
    """Reads bodies. Use it from one event loop.

    `max_bytes` limits one body, `max_total_bytes` all of them together. A client has `timeout_s` to
    send a body.
    """

    def __init__(self, max_bytes: int, max_total_bytes: int, timeout_s: float) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._timeout_s = timeout_s

    async def read(self, request: Request) -> "Body":
        """Reads the body, which counts until it is closed.

        Raises ApiError: 408 if it comes too slowly, 413 if it is too large, 429 if all bodies are
        too much. A content-length is checked before anything is read.
        """
        body = Body(self)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._fill(body.data, request)
        except TimeoutError:
            body.close()
            message = (
                f"the body did not come within {self._timeout_s:g} s: send it faster, or raise "
                "router.client_timeout_s"
            )
            raise ApiError(message, status=408, code="body_timeout") from None
        except BaseException:
            body.close()
            raise
        return body

    async def _fill(self, body: bytearray, request: Request) -> None:
        told = request.headers.get("content-length", "")
        if told.isdecimal():
            self._check(int(told[:20]), 0)
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            more = message.get("more_body", False)
            self._check(len(body) + len(part), len(body))
            body += part
            self.num_bytes += len(part)

    def _check(self, size: int, counted: int) -> None:
        """Raises ApiError if the body may not be so large; `counted` bytes of it count already."""
        if size > self._max_bytes:
            message = (
                f"the body is larger than {self._max_bytes} bytes: send less, or raise "
                "router.max_body_bytes"
            )
            raise ApiError(message, status=413, code="body_too_large")
        others = self.num_bytes - counted
        if SHARE * size > self._max_total_bytes - others:
            message = (
                f"the bodies of other requests take {others} of {self._max_total_bytes} bytes: try "
                "again later, or raise router.max_total_body_bytes"
            )
            raise too_much(message, "too_many_body_bytes", RETRY_AFTER_S)


class Body:
    """The bytes of one body. As a context it returns them, and closes at its end."""

    __slots__ = ("_bodies", "data")

    def __init__(self, bodies: Bodies) -> None:
        self.data = bytearray()
        self._bodies = bodies

    def __enter__(self) -> bytearray:
        return self.data

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops counting the body."""
        self._bodies.num_bytes -= len(self.data)
