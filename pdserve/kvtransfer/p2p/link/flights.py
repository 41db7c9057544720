"""Reads and repacks that are under way on one link, and what to do when each ends.

Knows neither pulls nor generations, and does not wait: `peer_link.PeerLink`, whose thread makes
every call, sleeps between two checks. A flight stays here until it has ended, even if nobody waits
for it any more. `peer_link.py` says when bytes are quiet.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pdserve.kvtransfer.p2p.connection import release_all
from pdserve.kvtransfer.transport.agent import Handle, TransferAgent, TransferError


@dataclass(eq=False)
class Flight:
    """A posted read, or a repack.

    - has_ended: True when it has ended; may raise TransferError.
    - done: called when it has ended well, unless the link drains.
    - release: called when it has ended, in any case.
    """

    has_ended: Callable[[], bool]
    done: Callable[[], None]
    release: list[Callable[[], None]] = field(default_factory=list)
    posted: float = field(default_factory=time.monotonic)


class Flights:
    """The flights of one link, in the order in which they began.

    - is_draining: while it returns True, the `done` of flights is not called.
    - lost: called when a read raised an error; then its connection is lost.
    """

    def __init__(
        self,
        agent: TransferAgent,
        is_draining: Callable[[], bool],
        lost: Callable[[TransferError], None],
    ) -> None:
        self._agent = agent
        self._is_draining = is_draining
        self._lost = lost
        self._flights: list[Flight] = []

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def last_began(self) -> float:
        """Monotonic time at which the youngest flight began; there must be one."""
        return self._flights[-1].posted

    def post(
        self, handle: Handle, done: Callable[[], None], prepared: tuple[Any, ...] = ()
    ) -> None:
        """Start a read; `done` may be called before this returns. prepared: released when the read
        has ended."""
        release: list[Callable[[], None]] = [partial(self._agent.release, handle)]
        release += [partial(self._agent.release_prepared, each) for each in prepared]
        flight = Flight(partial(self._agent.check, handle), done, release)
        self._flights.append(flight)
        try:
            ended = self._agent.post(handle)
        except TransferError as error:
            # a part of it may be under way: the flight stays until `check` ends it, too
            self._lost(error)
            return
        if ended:
            self._end(flight)
            done()

    def watch(self, has_ended: Callable[[], bool], done: Callable[[], None]) -> None:
        """Follow what was started elsewhere (a repack); `done` may be called before this
        returns."""
        flight = Flight(has_ended, done)
        self._flights.append(flight)
        if has_ended():
            self._end(flight)
            flight.done()

    def check(self) -> None:
        """End every flight that has ended, well or with an error."""
        for flight in list(self._flights):
            try:
                ended = flight.has_ended()
            except TransferError as error:
                self._end(flight)
                self._lost(error)
                continue
            if ended:
                self._end(flight)
                if not self._is_draining():
                    flight.done()

    def _end(self, flight: Flight) -> None:
        self._flights.remove(flight)
        release_all(flight.release)
