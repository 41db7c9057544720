"""Holds the unread events of one prompt's legs, and what the router itself tells a leg.

    put --> waits, or is joined to what waits of its choice --pop--> taken --done--> not counted

A slow reader finds few long events instead of many. Knows no workers: anything with a key is a leg.
Filled by `router.fleet`, read by `router.request.request_run`; each prompt has one inbox.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import Generic, Literal, Protocol, TypeVar

from pdserve.protocol.events import Arrived, Delta, Embedded, Failed, Handoff, PackedScores
from pdserve.protocol.request_key import RequestKey
from pdserve.router.held_bytes import EVENT_BYTES, LET_GO_AT_ONCE, Account, let_go, size_of


@dataclass(frozen=True, slots=True)
class Lost:
    """The leg's worker is gone, or, with cause "drained", will be soon."""

    reason: str
    cause: Literal["lost", "drained"] = "lost"


@dataclass(frozen=True, slots=True)
class Silent:
    """The worker lives, but for `seconds` it neither sent an event of the leg nor reported that the
    leg waits."""

    seconds: float


LegEvent = Delta | Embedded | PackedScores | Handoff | Arrived | Failed | Lost | Silent

UNJOINED = 32  # number of waiting events from which on further ones are joined and counted
JOINED_BYTES = 16_384  # size of an event to which no further ones are joined
COMPACT_EVERY = 16  # number of joined events after which they become one


class Keyed(Protocol):
    """A leg, as far as an inbox knows it."""

    @property
    def key(self) -> RequestKey: ...


L = TypeVar("L", bound=Keyed)


class Inbox(Generic[L]):
    """Events of all legs of one request, in the order of arrival, for one reader.

    Log-probabilities count in `account`, and so do other events that wait for a slow reader, until
    the reader calls `done`. If `account` is None, nothing counts.
    """

    def __init__(self, account: Account | None = None) -> None:
        self._items: deque[tuple[L, LegEvent | _Joined]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._account = account
        self.num_bytes = 0  # counted bytes of events that were joined, or may be
        self.num_taken_bytes = 0  # counted bytes of events that the reader has taken
        # events to which more can be joined, by attempt and choice
        self._last: dict[tuple[int, int], _Joined] = {}
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, leg: L, event: LegEvent) -> None:
        if self._error is not None:
            return
        scores = (
            event.logprobs
            if isinstance(event, Delta)
            else isinstance(event, PackedScores) and event.num_tokens
        )
        if not scores and not self.num_bytes and len(self._items) < UNJOINED:
            self._items.append((leg, event))
        else:
            self._join(leg, event)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Drops everything. The reader gets the error, now or when it next waits."""
        self._error = error
        self.clear()
        self._wake()

    def close(self) -> None:
        """Drops everything for good, as nobody will read any more.

        The error of `fail` goes too: its traceback refers to the reader.
        """
        self.clear()
        self._error = None

    def clear(self) -> None:
        self._last.clear()
        self._count(-self.num_bytes)
        self.done()
        if len(self._items) > LET_GO_AT_ONCE:
            items = self._items
            self._items = deque()
            let_go(items)
        self._items.clear()

    async def wait(self) -> None:
        """Waits until there is at least one item. Raises the error of `fail`."""
        while not self._items:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def pop(self) -> tuple[L, LegEvent]:
        leg, event = self._items.popleft()
        if isinstance(event, _Joined):
            if event.place is not None and self._last.get(event.place) is event:
                del self._last[event.place]
            self.num_bytes -= event.num_bytes
            self.num_taken_bytes += event.num_bytes
            return leg, event.event
        return leg, event

    def done(self) -> None:
        """Stops counting the events that were taken."""
        num_bytes = self.pass_on()
        if self._account is not None:
            self._account.add(-num_bytes)

    def pass_on(self) -> int:
        """Returns the bytes of the events that were taken.

        They stay on the account until the caller removes them.
        """
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

    def _join(self, leg: L, event: LegEvent) -> None:
        """Joins the event to the waiting one that it follows, or else appends it."""
        place = None
        size = EVENT_BYTES
        if isinstance(event, Delta):
            place = (leg.key.attempt, event.choice)
            size = size_of(len(event.token_ids), event.logprobs)
            before = self._last.get(place)
            if before is not None and before.takes(event):
                before.add(event, size - EVENT_BYTES)
                self._count(size - EVENT_BYTES)
                return
        else:
            self._last.clear()
            if isinstance(event, PackedScores):
                size += event.num_bytes
            elif isinstance(event, Embedded):
                size += len(event.values)
        joined = _Joined(place, event, size)
        if place is not None:
            self._last[place] = joined
        self._items.append((leg, joined))
        self._count(size)


class _Joined:
    """Consecutive events of one choice as a single event, or a lone event of another kind.

    `place` is the attempt and the choice.
    """

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
        first = parts[0]
        last = parts[-1]
        logprobs = (
            None
            if first.logprobs is None
            else tuple(chain.from_iterable(p.logprobs or () for p in parts))
        )
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
