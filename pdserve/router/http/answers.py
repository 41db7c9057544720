"""Sends answers to a client: JSON in pieces, or a stream of server-sent events.

    begun --all sent--> served        begun --the client left, reads nothing, or is cut off--> ended

However an answer ends, what was held for it is given back, and a stream closes its generation too.
Knows no routes; a Responder makes the bytes (`router.http.openai`). Made by `router.http.calls`.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.router.errors import ApiError, internal_error
from pdserve.router.held_bytes import Account
from pdserve.router.http.client_watch import ClientGone, ClientWatch
from pdserve.router.http.json_pieces import JsonPieces
from pdserve.router.request.chunks import OutputChunk
from pdserve.router.request.generation import ChoiceResult, Generation
from pdserve.router.request.request_log import log_of

logger = logging.getLogger(__name__)

# Chunks that are encoded before their size is checked; each may repeat a long prompt.
CHUNKS_AT_ONCE = 4
# A stream's events of more bytes count while they are being sent; fewer fit into any buffer.
COUNTED_BYTES = 1 << 12
SEND_BYTES = 1 << 17  # The server gets this many bytes before it may say that nobody reads.


class WholeResponder(Protocol):
    """Writes the answers of one endpoint."""

    async def whole(self, results: Sequence[ChoiceResult]) -> JsonPieces:
        """Makes the JSON of the whole answer."""
        ...


@runtime_checkable
class Responder(WholeResponder, Protocol):
    """Writes the answers of an endpoint that can stream, too."""

    def stream(self, chunk: OutputChunk) -> bytes:
        """Makes the server-sent events of one chunk; empty if it shows nothing yet."""
        ...

    async def prepare(self, chunk: OutputChunk) -> None:
        """Makes the long part of the chunk's events, for `stream` to use.

        It is needed only if `prepares` is True.
        """
        ...

    @property
    def prepares(self) -> bool: ...

    async def ending(self) -> bytes:
        """Makes the events after the last chunk, which end the stream."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """Makes the events that end a stream which cannot go on."""
        ...


@contextmanager
def closing_on_error(generation: Generation, watch: ClientWatch) -> Iterator[None]:
    """Closes the generation and the watch if no response comes to own them.

    Then nothing of it stays at workers, and its places in admission are free.
    """
    try:
        yield
    except BaseException:
        watch.close()
        generation.close()
        raise


class _Answer(Response, ABC):
    """An answer on its way.

    It ends when the client leaves or takes nothing for `timeout_s`, or when too much is held for
    clients and most of it for this one. `account` counts what is held for it.
    """

    def __init__(
        self,
        request_id: str,
        account: Account,
        watch: ClientWatch,
        timeout_s: float,
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers=headers)
        self._request_id = request_id
        self._account = account
        self._watch = watch
        self._timeout_s = timeout_s
        self._num_sends = 0
        self._sending = False
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._look, 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._watch.unless_gone(self._send_all(send))
            self._sent()
        except (ClientGone, OSError):
            log_of(logger, logging.DEBUG, self._request_id, "client left %s", self._request_id)
        finally:
            self._timer.cancel()
            self._account.close()
            self._watch.close()
            await self._end()

    @abstractmethod
    async def _send_all(self, send: Send) -> None:
        """Gives the server the whole answer."""

    def _sent(self) -> None:
        """Called when the last byte is out."""

    async def _end(self) -> None:
        """Called at the end, whether everything was sent or not."""

    def _look(self, num_sends: int) -> None:
        """Ends the answer if the send of the last look still waits; else looks again later."""
        if self._sending and self._num_sends == num_sends:
            name = self._request_id
            limit = self._timeout_s
            log_of(
                logger, logging.WARNING, name, "the client of %s read nothing for %g s", name, limit
            )
            self._watch.close()
            return
        self._timer = asyncio.get_running_loop().call_later(
            self._timeout_s, self._look, self._num_sends
        )

    def _cut(self) -> None:
        """Ends the answer, as too much is held for slow readers and most of it for this one."""
        name = self._request_id
        log_of(
            logger,
            logging.WARNING,
            name,
            "the client of %s reads too slowly: cut off (max_held_bytes)",
            name,
        )
        self._watch.close()

    async def _begin(self, send: Send) -> None:
        self._sending = True
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        self._sending = False

    async def _send(self, send: Send, body: bytes, more: bool) -> None:
        self._num_sends += 1
        self._sending = True
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending = False


class EventStream(_Answer):
    """The server-sent events of one generation, which it closes however the stream ends.

    While the client does not read, `send` waits once the connection's buffers are full. What the
    generation makes meanwhile is kept, counts against max_held_bytes, and is sent later in few
    large events.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        batches: AsyncGenerator[list[OutputChunk], None],
        first: list[OutputChunk],
        responder: Responder,
        watch: ClientWatch,
        timeout_s: float,
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(generation.request_id, generation.account, watch, timeout_s, headers)
        del self.headers["content-length"]
        self._generation = generation
        self._batches = batches
        self._left = first  # chunks of a batch that are not sent yet
        self._responder = responder
        generation.on_cut = self._cut

    def _sent(self) -> None:
        self._generation.served()

    async def _end(self) -> None:
        self._generation.close()
        await self._batches.aclose()

    async def _send_all(self, send: Send) -> None:
        await self._begin(send)
        more = True
        while more:
            body, more = await self._next()
            if len(body) > COUNTED_BYTES:
                await self._send_long(send, body, more)
            elif body:
                await self._send(send, body, more)

    async def _send_long(self, send: Send, body: bytes, more: bool) -> None:
        self._account.add(len(body))
        for part, more_parts in _of_size([body]):
            await self._send(send, part, more or more_parts)
            self._account.add(-len(part))

    async def _next(self) -> tuple[bytes, bool]:
        """Returns the next bytes, and whether more follow. Never raises: the answer has begun."""
        try:
            if self._left:
                await self._generation.pacer.turn()
            else:
                self._left = await anext(self._batches)
            return await self._encode(), True
        except StopAsyncIteration:
            return await self._responder.ending(), False
        except ApiError as error:
            return self._responder.failed(error), False
        except Exception:
            name = self._request_id
            log_of(logger, logging.ERROR, name, "stream %s failed", name, exc_info=True)
            return self._responder.failed(internal_error()), False

    async def _encode(self) -> bytes:
        """Makes the events of a batch. Of a long batch it makes a part, and keeps the rest."""
        batch = self._left
        self._left = []
        if len(batch) == 1 and not self._responder.prepares:  # nearly all batches are like this
            return self._responder.stream(batch[0])
        events = b""
        start = 0
        while start < len(batch) and len(events) < SEND_BYTES:
            chunks = batch[start : start + CHUNKS_AT_ONCE]
            if self._responder.prepares:
                for chunk in chunks:
                    await self._responder.prepare(chunk)
            events += b"".join([self._responder.stream(chunk) for chunk in chunks])
            start += CHUNKS_AT_ONCE
        self._left = batch[start:]
        return events


class WholeAnswer(_Answer):
    """Sends JSON in pieces, because joining them could take a multiple of their memory."""

    media_type = "application/json"

    def __init__(
        self,
        request_id: str,
        pieces: JsonPieces,
        account: Account,
        watch: ClientWatch,
        timeout_s: float,
    ) -> None:
        super().__init__(
            request_id, account, watch, timeout_s, {"content-length": str(pieces.num_bytes)}
        )
        self._pieces = pieces
        account.on_cut = self._cut
        account.add(pieces.num_held)

    async def _send_all(self, send: Send) -> None:
        await self._begin(send)
        for body, more in _of_size(self._taken()):
            await self._send(send, body, more)

    def _taken(self) -> Iterator[bytes]:
        for piece, num_bytes in self._pieces.take():
            yield piece
            self._account.add(-num_bytes)


def _of_size(pieces: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yields the same bytes in parts of about SEND_BYTES, and whether more follow."""
    waiting = bytearray()
    for piece in pieces:
        for start in range(0, len(piece), SEND_BYTES):
            if len(waiting) >= SEND_BYTES:
                yield bytes(waiting), True
                waiting.clear()
            waiting += piece[start : start + SEND_BYTES]
    yield bytes(waiting), False
