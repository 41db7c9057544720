"""Tests a new connection by reads, and measures how fast it is, before any pull uses it.

Knows no pulls. `peer_link.PeerLink` runs it once per connection, and checks its deadline at every
turn.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.kvtransfer.p2p.connection import Connection
from pdserve.kvtransfer.p2p.link.flights import Flights
from pdserve.kvtransfer.transport.agent import TransferAgent, TransferError

PROBE_DEADLINE_S = 10.0
LONG_PROBE_FROM = 10e9  # bytes per second; below, reads of PROBE_BYTES measure well enough
LONG_PROBE_READS = 16
TRIES = 3  # the fastest counts: one stall of this process, or of a busy GPU, is not the link's rate


class SelfTest:
    """The self-test of one link. lost: called if a read cannot be made, or takes too long."""

    def __init__(
        self, agent: TransferAgent, flights: Flights, lost: Callable[[TransferError], None]
    ) -> None:
        self._agent = agent
        self._flights = flights
        self._lost = lost
        self._deadline = 0.0

    def run(self, connection: Connection, passed: Callable[[str, float], None]) -> None:
        """Begin the test. passed: called with the transport's name and bytes per second, maybe
        before this returns."""
        mark = self._agent.transport_mark()

        def done(rate: float) -> None:
            passed(self._agent.transport_since(mark, connection.memory), rate)

        self._probe(connection, connection.probes, done)

    def check_deadline(self) -> None:
        """Give up the connection if a read takes too long. Called only while the test runs."""
        if time.monotonic() > self._deadline:
            self._lost(
                TransferError(
                    "error", f"the self-test read did not end within {PROBE_DEADLINE_S:g} s"
                )
            )

    def _probe(
        self, connection: Connection, probes: Sequence[Any], done: Callable[[float], None]
    ) -> None:
        """Read once by each of `probes`, one after another, then measure.

        The first read from each rank of the peer sets up endpoints. The last reads, from a rank
        that was read before, are timed. On a fast link their time is mostly latency, so longer ones
        follow.
        """
        if probes:
            self._post(
                connection, probes[0], 1, lambda _: self._probe(connection, probes[1:], done)
            )
            return

        def timed(rate: float) -> None:
            if rate < LONG_PROBE_FROM:
                done(rate)
            else:
                self._fastest(connection, LONG_PROBE_READS, TRIES, 0.0, done)

        self._fastest(connection, 1, TRIES, 0.0, timed)

    def _fastest(
        self,
        connection: Connection,
        count: int,
        tries: int,
        best: float,
        done: Callable[[float], None],
    ) -> None:
        """Time `count` reads so many times, one after another, and call done(bytes per second) with
        the highest rate."""

        def timed(rate: float) -> None:
            fastest = max(best, rate)
            if tries > 1:
                self._fastest(connection, count, tries - 1, fastest, done)
            else:
                done(fastest)

        self._post(connection, connection.probes[0], count, timed)

    def _post(
        self, connection: Connection, remote: Any, count: int, done: Callable[[float], None]
    ) -> None:
        """Post `count` reads of the same bytes at once, then call done(bytes per second)."""
        self._deadline = time.monotonic() + PROBE_DEADLINE_S
        ids = [0] * count
        try:
            handle = self._agent.make_read(connection.probe_local, ids, remote, ids)
        except TransferError as error:
            self._lost(error)
            return
        began = time.monotonic()
        num_bytes = count * connection.probe_bytes
        self._flights.post(handle, lambda: done(num_bytes / max(time.monotonic() - began, 1e-9)))
