"""Reads the event streams of all workers: one reader per worker, from its Hello to the stream's
end.

    opened --first batch, with a Hello--> entered --the stream ends, breaks, or is closed--> ended
       '---------------no Hello, another protocol, or the stream ends------------------------^

Decodes batches and passes their events on, at most EVENTS_AT_ONCE in a turn of the event loop.
Knows no legs, and does not decide who is lost. Owned by `router.fleet.fleet`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from pdserve.background.tasks import once
from pdserve.protocol.codec import PROTOCOL_VERSION, decode_routed
from pdserve.protocol.events import Hello, RoutedBatch, RoutedEvent
from pdserve.router.fleet.link import WorkerLink, WorkerLost
from pdserve.router.fleet.worker_state import WorkerState

logger = logging.getLogger(__name__)

EVENTS_AT_ONCE = 64  # events of a worker in one turn of the event loop
# Nearly all events are smaller; each further 4,096 bytes of a large one take as long as an event
EVENT_BYTES = 4096


class _ProtocolError(Exception):
    """The worker's messages cannot be understood."""


class WorkerStreams:
    """The readers of all workers. `closing` holds those that must end and have not ended yet."""

    def __init__(
        self,
        router_id: str,
        enter: Callable[[WorkerLink, int, int, Hello], WorkerState],
        take: Callable[[WorkerState, Sequence[RoutedEvent]], None],
        end: Callable[[WorkerState, str], None],
    ) -> None:
        """Sets the callbacks.

        - `enter` is called when a worker has said Hello, with its link, the stream's session and
          the worker's incarnation.
        - `take` gets events of a worker that has entered.
        - `end` is called when its stream has ended, with the reason.
        """
        self.closing: set[asyncio.Task[None]] = set()
        self._router_id = router_id
        self._enter = enter
        self._take = take
        self._end = end
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._session = 0
        self._unready: set[str] = set()

    def __contains__(self, worker_id: str) -> bool:
        """True if the worker has an open stream."""
        return worker_id in self._readers

    @property
    def worker_ids(self) -> set[str]:
        """Workers whose streams are open, including those that have not said Hello yet."""
        return set(self._readers)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """All readers, including those of streams that are being closed."""
        return [*self._readers.values(), *self.closing]

    def open(self, link: WorkerLink) -> None:
        """Reads the worker's events from now on. It must have no open stream."""
        self._readers[link.worker_id] = once("worker stream", self._read(link))

    def close(self, worker_id: str) -> None:
        """Stops reading from the worker. Does nothing if there is no stream."""
        reader = self._readers.pop(worker_id, None)
        if reader is not None:
            reader.cancel()
            self.closing.add(reader)
            reader.add_done_callback(self.closing.discard)

    def forgive(self, worker_id: str) -> None:
        """Forgets a worker that left for good.

        If it comes back and ends without a Hello, a warning is logged again.
        """
        self._unready.discard(worker_id)

    async def _read(self, link: WorkerLink) -> None:
        """Reads one stream to its end. However it ends, the worker's legs are told."""
        self._session = max(self._session + 1, time.time_ns())
        session = self._session
        worker = None
        reason = "its event stream ended"
        taken = 0  # events in this turn of the loop; a stream may have many messages ready at once
        stream = link.events(self._router_id, session)
        try:
            async for data in stream:
                batch = decode_routed(data)
                taken += len(data) // EVENT_BYTES
                if worker is None:
                    hello = _hello(batch)
                    self._unready.discard(link.worker_id)
                    worker = self._enter(link, session, batch.incarnation, hello)
                if batch.incarnation != worker.incarnation:
                    raise _ProtocolError("its engine was restarted within the stream")
                for start in range(0, len(batch.events), EVENTS_AT_ONCE):
                    part = batch.events[start : start + EVENTS_AT_ONCE]
                    taken += len(part)
                    if taken > EVENTS_AT_ONCE:
                        await asyncio.sleep(0)  # each event wakes a request
                        taken = len(part)
                    self._take(worker, part)
        except WorkerLost as error:
            reason = f"lost: {error}"
        except (msgspec.DecodeError, _ProtocolError) as error:
            reason = f"sent what this router does not understand: {error}"
        except Exception as error:
            logger.exception("reading from worker %s failed", link.worker_id)
            reason = f"reading from it failed: {error!r}"
        finally:
            if self._readers.get(link.worker_id) is asyncio.current_task():
                del self._readers[link.worker_id]
                self._report(link.worker_id, worker is not None, reason)
            try:
                if worker is not None:
                    self._end(worker, reason)
            finally:
                aclose = getattr(stream, "aclose", None)
                if aclose is not None:
                    await aclose()

    def _report(self, worker_id: str, was_ready: bool, reason: str) -> None:
        """Warns only once of a worker that joins again and again without ever saying Hello."""
        level = logging.DEBUG if worker_id in self._unready and not was_ready else logging.WARNING
        logger.log(level, "worker %s left: %s", worker_id, reason)
        self._unready.add(worker_id)


def _hello(batch: RoutedBatch) -> Hello:
    hello = next((event for event in batch.events if isinstance(event, Hello)), None)
    if hello is None:
        raise _ProtocolError("the first batch holds no Hello")
    if hello.protocol != PROTOCOL_VERSION:
        raise _ProtocolError(f"it speaks protocol {hello.protocol}, this router {PROTOCOL_VERSION}")
    return hello
