"""Lets rank 0 drive an object in another rank's process. Calls go one way, events the other, and no
call waits for an answer.

A link between two ranks carries them (parallel.rank_link). Knows neither the calls nor what they
do. Used by `p2p.remote_rank` and `pool.remote_pool`.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from pdserve.kvtransfer.connector import Wake

logger = logging.getLogger(__name__)

Event = TypeVar("Event")


class Link(Protocol):
    """See parallel.rank_link."""

    def send(self, message: bytes) -> None: ...

    def read(self, on_message: Callable[[bytes], None], on_gone: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


class Served(Protocol):
    """An object that a rank serves to rank 0."""

    def poll(self) -> Sequence[Any]:
        """Its events since the last call."""
        ...

    def close(self) -> None: ...


class Events:
    """Encodes and decodes events. kinds: all event types, the same at both ends."""

    def __init__(self, *kinds: type[Any]) -> None:
        self._kinds = kinds
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders = [msgspec.msgpack.Decoder(kind) for kind in kinds]

    def encode(self, event: Any) -> bytes:
        return bytes([self._kinds.index(type(event))]) + self._encoder.encode(event)

    def decode(self, data: bytes) -> Any:
        return self._decoders[data[0]].decode(memoryview(data)[1:])


class Remote(Generic[Event]):
    """Rank 0's end. wake: called from the link's thread when there is an event. `call` raises
    ConnectionError if the rank is gone; then its engine is gone, too."""

    def __init__(self, link: Link, events: Events, wake: Wake) -> None:
        self._link = link
        self._kinds = events
        self._wake = wake
        self._encoder = msgspec.msgpack.Encoder()
        self._events: deque[Event] = deque()
        self._heard_once = threading.Event()
        link.read(self._heard, self._heard_once.set)

    def first(self, deadline_s: float) -> Event | None:
        """The first message of the other end; None if none comes."""
        self._heard_once.wait(deadline_s)
        return self._events.popleft() if self._events else None

    def call(self, call: msgspec.Struct) -> None:
        self._link.send(self._encoder.encode(call))

    def poll(self) -> list[Event]:
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Close the link. The other process then closes the object that it serves."""
        self._link.close()

    def _heard(self, data: bytes) -> None:
        self._events.append(self._kinds.decode(data))
        self._heard_once.set()
        self._wake()


Made = TypeVar("Made", bound=Served)


class Service(Generic[Made]):
    """Serves an object of this process to rank 0, until rank 0 closes its end of the link.

    - calls: decodes the calls.
    - make: makes the object and the first messages; it gets the object's wake.
    - do: carries a call out on the object, in order, on the link's thread.
    """

    def __init__(
        self,
        link: Link,
        calls: "msgspec.msgpack.Decoder[Any]",
        events: Events,
        make: Callable[[Wake], tuple[Made, Sequence[Any]]],
        do: Callable[[Made, Any], None],
    ) -> None:
        self._link = link
        self._kinds = events
        self._telling = threading.Lock()
        self.served, first = make(self._tell)
        for event in first:
            link.send(events.encode(event))
        link.read(lambda data: do(self.served, calls.decode(data)), lambda: None)

    def close(self) -> None:
        self._link.close()
        self.served.close()

    def _tell(self) -> None:
        """Send the object's events. Runs on any thread, under a lock, so that events keep their
        order."""
        with self._telling:
            try:
                for event in self.served.poll():
                    self._link.send(self._kinds.encode(event))
            except ConnectionError as error:
                logger.info(
                    "no more events of %s reach rank 0: %s", type(self.served).__name__, error
                )
