"""The KV pool of an engine with several ranks; each rank keeps its own part of every chunk.

Rank 0 asks all ranks of an operation's home for the same. `RanksPool` is a KVPool over rank 0's own
pool and one `RemotePool` per other rank; `serve_pool` carries out its calls there. A hit is what
every rank of the home has found. An operation has settled when no rank touches its blocks any more.
Made by `worker.hosts`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from pdserve.kvtransfer.connector import (
    KVPool,
    PoolDone,
    PoolEvent,
    PoolFailed,
    PoolSettled,
    PoolStored,
    StillValid,
    Wake,
)
from pdserve.kvtransfer.remote import Events, Link, Remote, Service


class Retrieve(msgspec.Struct, frozen=True, tag=True):
    op_id: int
    token_ids: tuple[int, ...]
    salt: str
    skip_tokens: int
    local_blocks: tuple[int, ...]
    deadline_s: float


class Store(msgspec.Struct, frozen=True, tag=True):
    op_id: int
    token_ids: tuple[int, ...]
    salt: str
    block_ids: tuple[int, ...]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    op_id: int


Call = Retrieve | Store | Cancel
CALLS = msgspec.msgpack.Decoder(Call)
EVENTS = Events(PoolDone, PoolStored, PoolFailed, PoolSettled)


class RemotePool:
    """The methods of another rank's pool that RanksPool uses. wake: as given to a pool. home: the
    home whose blocks the rank has. Any call raises ConnectionError if the rank is gone."""

    def __init__(self, link: Link, wake: Wake, home: int = 0) -> None:
        self.home = home
        self._remote: Remote[PoolEvent] = Remote(link, EVENTS, wake)

    def retrieve(
        self,
        op_id: int,
        token_ids: Sequence[int],
        salt: str,
        skip_tokens: int,
        local_blocks: Sequence[int],
        deadline_s: float,
    ) -> None:
        blocks = tuple(int(block) for block in local_blocks)
        call = Retrieve(op_id, tuple(token_ids), salt, skip_tokens, blocks, deadline_s)
        self._remote.call(call)

    def store(
        self, op_id: int, token_ids: Sequence[int], salt: str, block_ids: Sequence[int]
    ) -> None:
        """Store rows. A refusal comes as a PoolFailed."""
        blocks = tuple(int(block) for block in block_ids)
        self._remote.call(Store(op_id, tuple(token_ids), salt, blocks))

    def cancel(self, op_id: int) -> None:
        self._remote.call(Cancel(op_id))

    def poll(self) -> list[PoolEvent]:
        return self._remote.poll()

    def close(self) -> None:
        self._remote.close()


class _Serving:
    """A pool that reports its refusals as events, even of arguments that do not fit together."""

    def __init__(self, pool: KVPool, wake: Wake) -> None:
        self._pool = pool
        self._wake = wake
        self._refusals: list[PoolEvent] = []

    def do(self, call: Call) -> None:
        try:
            match call:
                case Retrieve() as retrieve:
                    self._pool.retrieve(*msgspec.structs.astuple(retrieve))
                case Store(op_id, token_ids, salt, block_ids):
                    # the blocks stay owned until every rank has answered, so nobody reuses them
                    if not self._pool.store(op_id, token_ids, salt, block_ids, lambda: True):
                        self._refuse(op_id, "refused", "")
                case Cancel(op_id):
                    self._pool.cancel(op_id)
        except ValueError as error:
            self._refuse(call.op_id, "error", str(error))

    def _refuse(self, op_id: int, reason: str, detail: str) -> None:
        self._refusals.append(PoolFailed(op_id, reason, detail, settled=True))
        self._wake()

    def poll(self) -> list[PoolEvent]:
        refusals, self._refusals = self._refusals, []
        return [*refusals, *self._pool.poll()]

    def close(self) -> None:
        self._pool.close()


def serve_pool(link: Link, make: Callable[[Wake], KVPool]) -> Service[_Serving]:
    """Serve a rank's pool. make: makes the pool; it gets the pool's wake."""
    return Service(link, CALLS, EVENTS, lambda wake: (_Serving(make(wake), wake), ()), _Serving.do)


@dataclass
class _Operation:
    """An operation over several ranks."""

    ranks: tuple[int, ...]  # ranks that were asked
    unanswered: set[int]  # of these
    unsettled: set[int] = field(default_factory=set)  # of these
    answers: list[PoolDone | PoolStored] = field(default_factory=list)
    failed: PoolFailed | None = None  # the first failure; it names its rank


class RanksPool:
    """Implements `connector.KVPool`. own: rank 0's pool, which has a part only in home 0. others:
    pools of ranks from 1 on. `available` is rank 0's view; another rank that cannot be asked is a
    miss."""

    def __init__(self, own: KVPool, others: Sequence[RemotePool]) -> None:
        self.chunk_tokens = own.chunk_tokens
        self._own = own
        self._others = others
        self._all: tuple[KVPool | RemotePool, ...] = (own, *others)
        self._homes = (0, *(pool.home for pool in others))
        self._operations: dict[int, _Operation] = {}

    @property
    def available(self) -> bool:
        return self._own.available

    def retrieve(
        self,
        op_id: int,
        token_ids: Sequence[int],
        salt: str,
        skip_tokens: int,
        local_blocks: Sequence[int],
        deadline_s: float,
        home: int = 0,
    ) -> None:
        ranks = self._ranks_of(home)
        for rank in ranks:
            self._all[rank].retrieve(op_id, token_ids, salt, skip_tokens, local_blocks, deadline_s)
        self._operations[op_id] = _Operation(ranks, set(ranks))

    def store(
        self,
        op_id: int,
        token_ids: Sequence[int],
        salt: str,
        block_ids: Sequence[int],
        still_valid: StillValid,
        home: int = 0,
    ) -> bool:
        ranks = self._ranks_of(home)
        if home:
            if not self.available:
                return False
        elif not self._own.store(op_id, token_ids, salt, block_ids, still_valid):
            return False
        for pool in self._others:
            if pool.home == home:
                pool.store(op_id, token_ids, salt, block_ids)
        self._operations[op_id] = _Operation(ranks, set(ranks))
        return True

    def cancel(self, op_id: int) -> None:
        operation = self._operations.get(op_id)
        if operation is not None:
            for rank in operation.ranks:
                self._all[rank].cancel(op_id)

    def poll(self) -> list[PoolEvent]:
        return [
            told
            for rank, pool in enumerate(self._all)
            for event in pool.poll()
            for told in self._take(rank, event)
        ]

    def close(self) -> None:
        for pool in self._all:
            pool.close()

    def _ranks_of(self, home: int) -> tuple[int, ...]:
        """ValueError if the engine has no such home."""
        ranks = tuple(rank for rank, of in enumerate(self._homes) if of == home)
        if not ranks:
            raise ValueError(f"home must be one of the engine's, not {home}")
        return ranks

    def _take(self, rank: int, event: PoolEvent) -> list[PoolEvent]:
        operation = self._operations[event.op_id]
        if isinstance(event, PoolSettled):
            operation.unsettled.discard(rank)
            if operation.unanswered or operation.unsettled:
                return []
            del self._operations[event.op_id]
            return [event]
        operation.unanswered.discard(rank)
        if not isinstance(event, PoolFailed):
            operation.answers.append(event)
        else:
            if not event.settled:
                operation.unsettled.add(rank)
            if operation.failed is None:
                detail = f"rank {rank}: {event.detail}"
                operation.failed = PoolFailed(event.op_id, event.reason, detail, settled=True)
                self.cancel(event.op_id)  # what the other ranks have is of no use
        return [] if operation.unanswered else [self._answer(event.op_id, operation)]

    def _answer(self, op_id: int, operation: _Operation) -> PoolEvent:
        """Combine the answers of all ranks."""
        if not operation.unsettled:
            del self._operations[op_id]
        if operation.failed is not None:
            reason, detail = operation.failed.reason, operation.failed.detail
            return PoolFailed(op_id, reason, detail, settled=not operation.unsettled)
        num_tokens = min(answer.num_tokens for answer in operation.answers)
        num_bytes = sum(answer.num_bytes for answer in operation.answers)
        done = [answer for answer in operation.answers if isinstance(answer, PoolDone)]
        if done:
            return PoolDone(op_id, num_tokens, num_bytes, max(each.seconds for each in done))
        return PoolStored(op_id, num_tokens, num_bytes)
