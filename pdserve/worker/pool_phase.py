"""Asks the KV pool before a prompt is computed here, and stores what was computed.

Knows the engine and a KVPool; no other phases, no sockets and no routers. Driven by worker.loop on
its one thread.

    compute --worth asking, blocks free--> ASKING --any end--> the engine computes what is missing
    a sequence has ended --> its blocks stay owned until the pool has read them --> free

Rows from the pool become cached blocks, which the engine finds like its own. So any failure is just
a miss. A request waits for the pool at most until the pool's request deadline.
"""

import itertools
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.engine.engine import Engine
from pdserve.engine.reservations import Reservation
from pdserve.engine.scheduling.sequence import Request
from pdserve.engine.step_result import FinishedRows, StepResult
from pdserve.kvtransfer.connector import (
    KVPool,
    PoolDone,
    PoolFailed,
    PoolSettled,
    PoolStored,
    unchanged,
)
from pdserve.protocol.commands import Start
from pdserve.protocol.events import Arrived, Event
from pdserve.protocol.prompt_work import prompt_work
from pdserve.protocol.request_key import RequestKey
from pdserve.worker.pool_report import PoolReport

KNOWN_PREFIXES = 16_384  # stored prefixes to remember, so that they are not offered again

Events = list[tuple[RequestKey, Event]]


@dataclass(eq=False)
class _Retrieval:
    """A request whose prompt is being looked up. `started` is in monotonic seconds.

    `dropped` means that nobody waits for it any more.
    """

    request: Request
    starts: tuple[Start, ...]
    reservation: Reservation
    started: float
    dropped: bool = False


@dataclass(frozen=True)
class _Store:
    """A prefix on its way to the pool.

    `chunk_ends` are the digests of the blocks that end its chunks; the last one names the whole
    prefix. Its blocks belong to `home`.
    """

    chunk_ends: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    home: int


class PoolPhase:
    """Asks and fills the pool. A request may wait deadline_s for rows of the pool."""

    def __init__(self, engine: Engine, pool: KVPool, deadline_s: float) -> None:
        self._engine = engine
        self._pool = pool
        self._deadline_s = deadline_s
        self._retrievals: dict[int, _Retrieval] = {}
        self.report = PoolReport()
        self._stores: dict[int, _Store] = {}
        self._quarantined: dict[int, tuple[int, list[int]]] = {}  # home and blocks by op_id
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._op_ids = itertools.count()
        engine.keep_finished_rows()

    def compute(self, request: Request, starts: tuple[Start, ...]) -> None:
        """Gives the request to the engine, after getting what the pool has of its prompt."""
        # The pool names rows by their tokens alone, so prompts with other parts are left out.
        reservation = self._reserve(request, starts) if not request.parts else None
        if reservation is None:
            self._engine.add(request, starts)
            return
        op_id = next(self._op_ids)
        self._retrievals[op_id] = _Retrieval(request, starts, reservation, time.monotonic())
        size = self._engine.config.block_size
        tokens = request.prompt_token_ids[: len(reservation.block_table) * size]
        skip = reservation.num_cached * size
        self._pool.retrieve(
            op_id,
            tokens,
            request.tenant.name,
            skip,
            reservation.destination,
            self._deadline_s,
            reservation.home,
        )

    def on_step(self, result: StepResult) -> None:
        """Offers the pool what this step has finished."""
        for rows in result.finished:
            if not self._store(rows):
                self._engine.homes[rows.home].blocks.release(rows.block_ids)

    def poll(self) -> Events:
        events: Events = []
        for event in self._pool.poll():
            if event.op_id in self._retrievals and isinstance(event, PoolDone | PoolFailed):
                events += self._answered(self._retrievals.pop(event.op_id), event)
            elif isinstance(event, PoolSettled) and event.op_id in self._quarantined:
                home, blocks = self._quarantined.pop(event.op_id)
                self._engine.homes[home].blocks.settle(blocks)
            elif (
                isinstance(event, PoolStored | PoolFailed | PoolSettled)
                and event.op_id in self._stores
            ):
                self._stored(event)
        return events

    def cancel(self, key: RequestKey, choices: tuple[int, ...] | None) -> bool:
        """Stops a request that waits for the pool, or leaves out some of its choices.

        Returns True if the request was here.
        """
        for op_id, retrieval in self._retrievals.items():
            if retrieval.request.key == key and not retrieval.dropped:
                retrieval.starts = (
                    ()
                    if choices is None
                    else tuple(s for s in retrieval.starts if s.choice not in choices)
                )
                if not retrieval.starts:
                    retrieval.dropped = True
                    self._pool.cancel(op_id)
                return True
        return False

    def keys(self) -> set[RequestKey]:
        """Returns the requests that wait for the pool."""
        return {
            retrieval.request.key
            for retrieval in self._retrievals.values()
            if not retrieval.dropped
        }

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for the pool."""
        return sum(not retrieval.dropped for retrieval in self._retrievals.values())

    def queued_work(self, pair_tokens: float) -> float:
        """Work (protocol.prompt_work) that is left to compute here if the pool has all that it was
        asked for."""
        size = self._engine.config.block_size
        waits = [
            (r.request.num_prompt_tokens, len(r.reservation.block_table) * size)
            for r in self._retrievals.values()
            if not r.dropped
        ]
        return sum(prompt_work(total - known, known, pair_tokens) for total, known in waits)

    @property
    def owned(self) -> list[tuple[int, list[int]]]:
        """The home and the blocks of everything that is under way."""
        asked = [retrieval.reservation for retrieval in self._retrievals.values()]
        owned = [(reservation.home, reservation.block_table) for reservation in asked]
        return owned + [(store.home, list(store.block_ids)) for store in self._stores.values()]

    @property
    def chunk_tokens(self) -> int:
        return self._pool.chunk_tokens

    def _chunk_ends(self, digests: Sequence[bytes], num_tokens: int) -> tuple[bytes, ...]:
        """Returns the digests that end the whole chunks of the first num_tokens."""
        per_chunk = self._pool.chunk_tokens // self._engine.config.block_size
        return tuple(
            digests[per_chunk - 1 : num_tokens // self._engine.config.block_size : per_chunk]
        )

    def _reserve(self, request: Request, starts: tuple[Start, ...]) -> Reservation | None:
        """Reserves blocks for the whole chunks that the pool may have and the engine has not.

        Returns None if it is not worth asking. The last token is always computed, because its
        logits are needed.
        """
        chunk = self._pool.chunk_tokens
        num_tokens = (request.num_prompt_tokens - 1) // chunk * chunk
        if not num_tokens or request.wants_prompt_logprobs or not self._pool.available:
            return None
        num_blocks = num_tokens // self._engine.config.block_size
        reservation = self._engine.reserve(request, starts, num_blocks, keeps_room=True)
        if (
            reservation is not None
            and len(reservation.destination) * self._engine.config.block_size < chunk
        ):
            self._engine.cancel_reservation(reservation, settled=True)
            return None
        return reservation

    def _answered(self, retrieval: _Retrieval, event: PoolDone | PoolFailed) -> Events:
        num_filled = 0
        settled = True
        if isinstance(event, PoolDone):
            num_filled = (
                event.num_tokens // self._engine.config.block_size
                - retrieval.reservation.num_cached
            )
        else:
            settled = event.settled
        blocks = self._engine.cancel_reservation(retrieval.reservation, settled, num_filled)
        if not settled:
            self._quarantined[event.op_id] = retrieval.reservation.home, blocks
        self._note_answer(retrieval, event)
        if retrieval.dropped:
            return []
        self._engine.add(retrieval.request, retrieval.starts)
        if not isinstance(event, PoolDone):
            return []
        key = retrieval.request.key
        arrived = Arrived(
            request_id=key.request_id,
            attempt=key.attempt,
            source="pool",
            num_bytes=event.num_bytes,
            seconds=time.monotonic() - retrieval.started,
            cached_tokens=event.num_tokens,
        )
        return [(key, arrived)]

    def _note_answer(self, retrieval: _Retrieval, event: PoolDone | PoolFailed) -> None:
        """Notes what the answer says of the pool: it has chunks up to some token, and lacks the
        next one."""
        if isinstance(event, PoolFailed) and event.reason != "miss":
            return
        size = self._engine.config.block_size
        digests = retrieval.request.prompt_hashes(self._engine.hasher)
        ends = self._chunk_ends(digests, len(retrieval.reservation.block_table) * size)
        # Earlier chunks were not looked up.
        first = retrieval.reservation.num_cached * size // self.chunk_tokens
        num_found = event.num_tokens // self.chunk_tokens if isinstance(event, PoolDone) else first
        self.report.found(ends[first:num_found])
        self.report.missed(ends[num_found : num_found + 1])

    def _store(self, rows: FinishedRows) -> bool:
        """Returns True if the pool took the rows; it then owns the blocks."""
        size = self._engine.config.block_size
        count = (
            len(rows.block_ids) * size // self._pool.chunk_tokens * self._pool.chunk_tokens // size
        )
        chunk_ends = self._chunk_ends(rows.hashes, count * size)
        if not count or chunk_ends[-1] in self._known:
            return False
        op_id = next(self._op_ids)
        block_ids = rows.block_ids[:count]
        blocks = self._engine.homes[rows.home].blocks
        valid = unchanged(blocks.generations, block_ids)
        tokens = rows.token_ids[: count * size]
        if not self._pool.store(op_id, tokens, rows.tenant.name, block_ids, valid, rows.home):
            return False
        blocks.release(rows.block_ids[count:])
        self._stores[op_id] = _Store(chunk_ends, block_ids, rows.home)
        self._known[chunk_ends[-1]] = None
        if len(self._known) > KNOWN_PREFIXES:
            self._known.popitem(last=False)
        return True

    def _stored(self, event: PoolStored | PoolFailed | PoolSettled) -> None:
        store = self._stores[event.op_id]
        if isinstance(event, PoolFailed):
            self._known.pop(store.chunk_ends[-1], None)
            if not event.settled:
                return
        elif isinstance(event, PoolStored) and event.num_bytes:
            self.report.found(store.chunk_ends)
        del self._stores[event.op_id]
        self._engine.homes[store.home].blocks.release(store.block_ids)
