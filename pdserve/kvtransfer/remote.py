"""An object of another rank's process, driven from rank 0: calls go one way, its events the other,
and no call waits for an answer.

Carried by a link between two ranks (parallel.rank_link); knows neither the calls nor what they do.
Used by `p2p.remote_rank` and `pool.remote_pool`.
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
    """What a rank serves to rank 0."""

    def poll(self) -> Sequence[Any]:
        """Its events since the last time."""
        ...

    def close(self) -> None: ...


class Events:
    """Bytes of events and back. kinds: the types that there are, the same at both ends."""

    def __init__(self, *kinds: type[Any]) -> None:
        self._kinds = kinds
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders = [msgspec.msgpack.Decoder(kind) for kind in kinds]

    def encode(self, event: Any) -> bytes:
        return bytes([self._kinds.index(type(event))]) + self._encoder.encode(event)

    def decode(self, data: bytes) -> Any:
        return self._decoders[data[0]].decode(memoryview(data)[1:])


class Remote(Generic[Event]):
    """Rank 0's end. wake: is called from the link's thread when there is an event. ConnectionError
    from `call` when the rank is gone: then its engine is, too."""

    def __init__(self, link: Link, events: Events, wake: Wake) -> None:
        self._link = link
        self._kinds = events
        self._wake = wake
        self._encoder = msgspec.msgpack.Encoder()
        self._events: deque[Event] = deque()
        self._heard_once = threading.Event()
        link.read(self._heard, self._heard_once.set)

    def first(self, deadline_s: float) -> Event | None:
        """What the other end says first of all; None when it does not."""
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
        """The other process closes what it serves by itself."""
        self._link.close()

    def _heard(self, data: bytes) -> None:
        self._events.append(self._kinds.decode(data))
        self._heard_once.set()
        self._wake()


Made = TypeVar("Made", bound=Served)


class Service(Generic[Made]):
    """Serves an object of this process to rank 0, until that closes its end of the link.

    calls: decodes them. make: the object, and what is to be said first, given the wake that the
    object shall have. do: carries a call out on it, in order, on the link's thread.
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
        """On any thread. Under a lock, so that events leave in their order."""
        with self._telling:
            try:
                for event in self.served.poll():
                    self._link.send(self._kinds.encode(event))
            except ConnectionError as error:
                logger.info(
                    "rank 0 hears nothing more of %s: %s", type(self.served).__name__, error
                )
