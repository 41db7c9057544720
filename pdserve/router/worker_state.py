"""What the router knows of one worker, and one leg: a Submit that the worker has, with the inbox its events go to.

State, and the small parts that keep some of it (`prefix_index`, `prompt_queue`, `stall_budget`): `router.fleet` fills
it with what the worker says, `router.choose` with what is sent there; `predict`, `choose` and `peers` read it.
"""

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from pdserve.engine.protocol import (
    Arrived,
    Delta,
    Failed,
    Handoff,
    Hello,
    PackedScores,
    PeerStatus,
    PoolMeta,
    RequestKey,
    Snapshot,
)
from pdserve.router.held import LET_GO_AT_ONCE, PIECE_BYTES, Account, let_go, size_of
from pdserve.router.link import WorkerLink
from pdserve.router.prefix_index import CachedBlocks, PooledChunks
from pdserve.router.prompt_queue import PromptQueue
from pdserve.router.stall_budget import StallBudget


@dataclass(frozen=True, slots=True)
class Lost:
    """The leg's worker is gone, or (cause "drained") shall be soon."""

    reason: str
    cause: Literal["lost", "drained"] = "lost"


@dataclass(frozen=True, slots=True)
class Silent:
    """The worker lives, but for so long it neither sent an event of the leg nor said that the leg waits."""

    seconds: float


LegEvent = Delta | PackedScores | Handoff | Arrived | Failed | Lost | Silent


UNJOINED = 32  # events that wait, before more are joined and counted
JOINED_BYTES = 16_384  # of one event that others were joined to
COMPACT_EVERY = 16  # events that are joined, until they are made one


class Inbox:
    """Events of all legs of one request, in order of arrival; one reader. account: log-probabilities count there, and
    what else waits for a reader who is slow, until he says that he has done with what he took; None: nowhere."""

    def __init__(self, account: Account | None = None) -> None:
        self._items: deque[tuple[Leg, LegEvent | _Joined]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._account = account
        self.num_bytes = 0  # counted: of what was joined, or may be
        self.num_taken_bytes = 0  # counted: of what the reader has taken
        self._last: dict[tuple[int, int], _Joined] = {}  # by attempt and choice: what more can be joined to
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, leg: "Leg", event: LegEvent) -> None:
        if self._error is not None:
            return
        scores = event.logprobs if isinstance(event, Delta) else isinstance(event, PackedScores) and event.num_tokens
        if not scores and not self.num_bytes and len(self._items) < UNJOINED:
            self._items.append((leg, event))
        else:
            self._join(leg, event)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Drop everything; whoever waits, or will, gets the error."""
        self._error = error
        self.clear()
        self._wake()

    def close(self) -> None:
        """Nobody will read any more. The error of `fail` refers, by its traceback, to who read it."""
        self.clear()
        self._error = None

    def clear(self) -> None:
        self._last.clear()
        self._count(-self.num_bytes)
        self.done()
        if len(self._items) > LET_GO_AT_ONCE:
            items, self._items = self._items, deque()
            let_go(items)
        self._items.clear()

    async def wait(self) -> None:
        """Until there is at least one item. Raises the error of `fail`."""
        while not self._items:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def pop(self) -> tuple["Leg", LegEvent]:
        leg, event = self._items.popleft()
        if isinstance(event, _Joined):
            if event.place is not None and self._last.get(event.place) is event:
                del self._last[event.place]
            self.num_bytes -= event.num_bytes
            self.num_taken_bytes += event.num_bytes
            return leg, event.event
        return leg, event

    def done(self) -> None:
        """Stop counting what was taken."""
        num_bytes = self.pass_on()
        if self._account is not None:
            self._account.add(-num_bytes)

    def pass_on(self) -> int:
        """The bytes of what was taken. They count on, until the caller takes them off the
        account."""
        num_bytes = self.num_taken_bytes
        self.num_taken_bytes = 0
        return num_bytes

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self._account is not None:
            self._account.add(num_bytes)

    def _join(self, leg: "Leg", event: LegEvent) -> None:
        """Nobody reads: let it be part of what waits already, if it follows that."""
        place, size = None, PIECE_BYTES
        if isinstance(event, Delta):
            place, size = (leg.key.attempt, event.choice), size_of(len(event.token_ids), event.logprobs)
            before = self._last.get(place)
            if before is not None and before.takes(event):
                before.add(event, size - PIECE_BYTES)
                self._count(size - PIECE_BYTES)
                return
        else:
            self._last.clear()
            if isinstance(event, PackedScores):
                size += event.num_bytes
        joined = _Joined(place, event, size)
        if place is not None:
            self._last[place] = joined
        self._items.append((leg, joined))
        self._count(size)


class _Joined:
    """Events of one choice that follow each other, as one; or a lone event of another kind. place: the choice."""

    __slots__ = ("_parts", "num_bytes", "place")

    def __init__(self, place: tuple[int, int] | None, event: LegEvent, num_bytes: int) -> None:
        self.place = place
        self.num_bytes = num_bytes
        self._parts = [event]

    def takes(self, event: Delta) -> bool:
        last = self._parts[-1]
        assert isinstance(last, Delta)
        return (
            last.finish_reason is None
            and last.times is None
            and last.position + len(last.token_ids) == event.position
            and (last.logprobs is None) == (event.logprobs is None)
            and self.num_bytes < JOINED_BYTES
        )

    def add(self, event: Delta, num_bytes: int) -> None:
        self._parts.append(event)
        self.num_bytes += num_bytes
        if len(self._parts) > COMPACT_EVERY:
            self._parts = [self.event]

    @property
    def event(self) -> LegEvent:
        if len(self._parts) < 2:
            return self._parts[0]
        parts = [part for part in self._parts if isinstance(part, Delta)]
        first, last = parts[0], parts[-1]
        logprobs = None if first.logprobs is None else tuple(chain.from_iterable(p.logprobs or () for p in parts))
        return Delta(
            first.request_id,
            first.attempt,
            first.choice,
            first.position,
            tuple(chain.from_iterable(part.token_ids for part in parts)),
            last.finish_reason,
            last.stop_reason,
            logprobs,
            last.times,
        )


@dataclass(slots=True, eq=False)
class Leg:
    """One Submit at one worker. tokens: its weight in the worker's load. pending: choices the worker still works on.
    last_sign: monotonic seconds of its Submit, its last event, or the worker's last word that it waits. prepared: only
    announced yet.
    """

    key: RequestKey
    worker: "WorkerState"
    inbox: Inbox
    tokens: int
    pending: set[int]
    last_sign: float
    handed_off: bool = False
    prepared: bool = False


@dataclass(slots=True, eq=False)
class WorkerState:
    """A worker that has said Hello on its current stream. peers: by (engine id, incarnation). outstanding_tokens:
    weight of this router's legs there. last_seen: monotonic seconds of its last message, reported_at: of its last
    Snapshot. cached: what its prefix cache holds. pooled: what the KV pool that it uses holds. queue: prompt tokens
    that wait there. num_others: sequences of other routers there, as of the last Snapshot. stalls: what whole
    prompts took from its decodes. num_planned: requests of this router that a P computes and hands to it. left_at: when
    it left the running set (monotonic seconds); None: it is in it."""

    link: WorkerLink
    session: int
    hello: Hello
    incarnation: int
    last_seen: float
    snapshot: Snapshot | None = None
    reported_at: float = -math.inf
    peers: dict[tuple[str, int], PeerStatus] = field(default_factory=dict)
    legs: dict[tuple[str, int], Leg] = field(default_factory=dict)
    outstanding_tokens: int = 0
    num_planned: int = 0
    left_at: float | None = None
    cached: CachedBlocks = field(default_factory=CachedBlocks)
    pooled: PooledChunks | None = None
    queue: PromptQueue = field(default_factory=PromptQueue)
    num_others: int = 0
    stalls: StallBudget = field(default_factory=StallBudget)

    @property
    def worker_id(self) -> str:
        return self.link.worker_id

    @property
    def draining(self) -> bool:
        """It gets nothing new."""
        return self.left_at is not None

    @property
    def role(self) -> str:
        """Workers may change their role; the newest report counts."""
        return self.snapshot.role if self.snapshot is not None else self.hello.role

    @property
    def pool(self) -> PoolMeta | None:
        return self.hello.pool

    @property
    def can_prefill(self) -> bool:
        return self.role in ("prefill", "both") and self.pool is not None

    @property
    def can_decode(self) -> bool:
        return self.role in ("decode", "both")

    @property
    def num_decodes(self) -> int:
        """Sequences that it decodes, or soon will: about one a leg."""
        return len(self.legs) + self.num_others

    @property
    def token_limit(self) -> int:
        """Prompt and generated tokens of the largest request that can fit here."""
        return min(self.hello.max_model_len, self.hello.max_request_tokens)

    def link_to(self, prefill: "WorkerState") -> PeerStatus | None:
        """What it last said of its connection, if there is one."""
        if prefill.pool is None:
            return None
        status = self.peers.get((prefill.pool.engine_id, prefill.pool.incarnation))
        return status if status is not None and status.connected else None

    def is_connected_to(self, prefill: "WorkerState") -> bool:
        return self.link_to(prefill) is not None
