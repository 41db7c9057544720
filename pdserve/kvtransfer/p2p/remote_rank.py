"""A rank's receiver in another process: rank 0 talks to `RemoteRank` as to a RankReceiver of its
own, and `RankService` does there what it is told.

Calls go one way, events the other; no call waits for an answer. Carried by a link between two ranks
(parallel.rank_link); knows what a call is, not what it does. Made by `build.py`.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from pdserve.kvtransfer.connector import (
    PullDone,
    PullFailed,
    PullSettled,
    ReceiverEvent,
    Wake,
)
from pdserve.kvtransfer.p2p.rank_receiver import RankReceiver
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import KVCacheMeta, RankMemory, Ticket

logger = logging.getLogger(__name__)


class Link(Protocol):
    """See parallel.rank_link."""

    def send(self, message: bytes) -> None: ...

    def read(self, on_message: Callable[[bytes], None], on_gone: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


class Connect(msgspec.Struct, frozen=True, tag=True):
    meta: KVCacheMeta


class Disconnect(msgspec.Struct, frozen=True, tag=True):
    engine_id: str
    incarnation: int


class Begin(msgspec.Struct, frozen=True, tag=True):
    pull_id: int
    engine_id: str
    incarnation: int
    local_blocks: tuple[int, ...]
    skip: int
    deadline_s: float


class Extend(msgspec.Struct, frozen=True, tag=True):
    pull_id: int
    ticket: Ticket


class Complete(msgspec.Struct, frozen=True, tag=True):
    pull_id: int
    ticket: Ticket
    deadline_s: float


class Cancel(msgspec.Struct, frozen=True, tag=True):
    pull_id: int


Call = Connect | Disconnect | Begin | Extend | Complete | Cancel
EVENTS: tuple[type[Any], ...] = (PullDone, PullFailed, PullSettled, PeerStatus, RankMemory)

_encoder = msgspec.msgpack.Encoder()
_call_decoder = msgspec.msgpack.Decoder(Call)
_event_decoders = [msgspec.msgpack.Decoder(kind) for kind in EVENTS]


def _encode_event(event: ReceiverEvent | RankMemory) -> bytes:
    return bytes([EVENTS.index(type(event))]) + _encoder.encode(event)


def _decode_event(data: bytes) -> ReceiverEvent | RankMemory:
    event: ReceiverEvent | RankMemory = _event_decoders[data[0]].decode(memoryview(data)[1:])
    return event


class RemoteRank:
    """The methods of RankReceiver that rank 0 uses. block_size: as rank 0's. wake: as given to a
    receiver. ConnectionError from any call when the rank is gone: then its engine is, too."""

    def __init__(self, link: Link, block_size: int, wake: Wake) -> None:
        self.block_size = block_size
        self._link = link
        self._wake = wake
        self._events: deque[ReceiverEvent] = deque()
        self._memory: RankMemory | None = None
        self._introduced = threading.Event()
        link.read(self._heard, self._introduced.set)

    def memory(self, deadline_s: float) -> RankMemory:
        """What the rank says of its KV cache, first of all. ConnectionError when it does not."""
        self._introduced.wait(deadline_s)
        if self._memory is None:
            raise ConnectionError("a rank of this engine did not register its KV cache")
        return self._memory

    def connect(self, meta: KVCacheMeta) -> None:
        self._call(Connect(meta))

    def disconnect(self, engine_id: str, incarnation: int) -> None:
        self._call(Disconnect(engine_id, incarnation))

    def begin(
        self,
        pull_id: int,
        engine_id: str,
        incarnation: int,
        local_blocks: tuple[int, ...],
        skip: int,
        deadline_s: float,
    ) -> None:
        self._call(Begin(pull_id, engine_id, incarnation, local_blocks, skip, deadline_s))

    def extend(self, pull_id: int, ticket: Ticket) -> None:
        self._call(Extend(pull_id, ticket))

    def complete(self, pull_id: int, ticket: Ticket, deadline_s: float) -> None:
        self._call(Complete(pull_id, ticket, deadline_s))

    def cancel(self, pull_id: int) -> None:
        self._call(Cancel(pull_id))

    def poll(self) -> list[ReceiverEvent]:
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """The other process closes its receiver by itself."""
        self._link.close()

    def _call(self, call: Call) -> None:
        self._link.send(_encoder.encode(call))

    def _heard(self, data: bytes) -> None:
        event = _decode_event(data)
        if isinstance(event, RankMemory):
            self._memory = event
            self._introduced.set()
        else:
            self._events.append(event)
            self._wake()


class RankService:
    """Serves the receiver of this process to rank 0, until rank 0's end of the link is closed.
    make: the rank's memory and receiver, given the wake that this one shall have."""

    def __init__(self, link: Link, make: Callable[[Wake], tuple[RankMemory, RankReceiver]]) -> None:
        self._link = link
        self._telling = threading.Lock()
        memory, self.receiver = make(self._tell)
        link.send(_encode_event(memory))
        link.read(self._do, lambda: None)

    def close(self) -> None:
        self._link.close()
        self.receiver.close()

    def _tell(self) -> None:
        """On any thread. Under a lock, so that events leave in their order."""
        with self._telling:
            try:
                for event in self.receiver.poll():
                    self._link.send(_encode_event(event))
            except ConnectionError as error:
                logger.info("rank 0 hears of no more transfers: %s", error)

    def _do(self, data: bytes) -> None:
        """In order, on the link's thread. What rank 0 refuses, it has refused before."""
        receiver = self.receiver
        match _call_decoder.decode(data):
            case Connect(meta):
                receiver.connect(meta)
            case Disconnect(engine_id, incarnation):
                receiver.disconnect(engine_id, incarnation)
            case Begin(pull_id, engine_id, incarnation, local_blocks, skip, deadline_s):
                receiver.begin(pull_id, engine_id, incarnation, local_blocks, skip, deadline_s)
            case Extend(pull_id, ticket):
                receiver.extend(pull_id, ticket)
            case Complete(pull_id, ticket, deadline_s):
                receiver.complete(pull_id, ticket, deadline_s)
            case Cancel(pull_id):
                receiver.cancel(pull_id)
