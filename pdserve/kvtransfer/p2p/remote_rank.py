"""Gives rank 0 access to a rank's receiver in another process. Rank 0 calls `RemoteRank` like a
RankReceiver of its own, and `serve_rank` carries out the calls in the other process.

Made by `worker.hosts`.
"""

from collections.abc import Callable, Sequence

import msgspec

from pdserve.kvtransfer.connector import (
    PullDone,
    PullFailed,
    PullSettled,
    ReceiverEvent,
    Wake,
)
from pdserve.kvtransfer.p2p.rank_receiver import RankReceiver
from pdserve.kvtransfer.remote import Events, Link, Remote, Service
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import KVCacheMeta, RankMemory, Ticket


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
CALLS = msgspec.msgpack.Decoder(Call)
EVENTS = Events(PullDone, PullFailed, PullSettled, PeerStatus, RankMemory)


class RemoteRank:
    """The methods of RankReceiver that rank 0 uses. wake: as given to a receiver. home: the home
    whose blocks the rank fills. Any call raises ConnectionError if the rank is gone."""

    def __init__(self, link: Link, wake: Wake, home: int = 0) -> None:
        self.home = home
        self._remote: Remote[ReceiverEvent] = Remote(link, EVENTS, wake)

    def memory(self, deadline_s: float) -> RankMemory:
        """The rank's first message, which describes its KV cache. ConnectionError if none comes."""
        first: object = self._remote.first(deadline_s)
        if not isinstance(first, RankMemory):
            raise ConnectionError("a rank of this engine did not register its KV cache")
        return first

    def connect(self, meta: KVCacheMeta) -> None:
        self._remote.call(Connect(meta))

    def disconnect(self, engine_id: str, incarnation: int) -> None:
        self._remote.call(Disconnect(engine_id, incarnation))

    def begin(
        self,
        pull_id: int,
        engine_id: str,
        incarnation: int,
        local_blocks: tuple[int, ...],
        skip: int,
        deadline_s: float,
    ) -> None:
        self._remote.call(Begin(pull_id, engine_id, incarnation, local_blocks, skip, deadline_s))

    def extend(self, pull_id: int, ticket: Ticket) -> None:
        self._remote.call(Extend(pull_id, ticket))

    def complete(self, pull_id: int, ticket: Ticket, deadline_s: float) -> None:
        self._remote.call(Complete(pull_id, ticket, deadline_s))

    def cancel(self, pull_id: int) -> None:
        self._remote.call(Cancel(pull_id))

    def poll(self) -> list[ReceiverEvent]:
        return self._remote.poll()

    def close(self) -> None:
        self._remote.close()


def serve_rank(
    link: Link, make: Callable[[Wake], tuple[RankMemory, RankReceiver]]
) -> Service[RankReceiver]:
    """Serve a rank's receiver. make: makes the rank's memory and receiver; it gets the receiver's
    wake."""

    def made(wake: Wake) -> tuple[RankReceiver, Sequence[RankMemory]]:
        memory, receiver = make(wake)
        return receiver, [memory]

    return Service(link, CALLS, EVENTS, made, _do)


def _do(receiver: RankReceiver, call: Call) -> None:
    """Carry out a call. Nothing is checked here, because rank 0 refuses bad calls before."""
    match call:
        case Connect(meta):
            receiver.connect(meta)
        case Disconnect(engine_id, incarnation):
            receiver.disconnect(engine_id, incarnation)
        case Begin() as begin:
            receiver.begin(*msgspec.structs.astuple(begin))
        case Extend(pull_id, ticket):
            receiver.extend(pull_id, ticket)
        case Complete(pull_id, ticket, deadline_s):
            receiver.complete(pull_id, ticket, deadline_s)
        case Cancel(pull_id):
            receiver.cancel(pull_id)
