"""Compares the generations of what was read with those of its ticket. A block that was reused
meanwhile holds another prompt.

One read covers all pieces whose data is complete, and is posted after the last byte of each. Knows
no deadlines, and not how pulls end. `link_pulls.LinkPulls` adds the pieces, and decides what a
stale piece means.
"""

import time
from collections.abc import Callable

import numpy as np

from pdserve.kvtransfer.p2p.connection import Connection
from pdserve.kvtransfer.p2p.link.flights import Flights
from pdserve.kvtransfer.p2p.link.pull import Piece
from pdserve.kvtransfer.transport.agent import TransferAgent, TransferError


class Verification:
    """The generation reads of one link, one at a time.

    - compared: called with the pieces of a read, after their `state` was set.
    - lost: called if a read cannot be made.
    """

    def __init__(
        self,
        agent: TransferAgent,
        flights: Flights,
        compared: Callable[[list[Piece]], None],
        lost: Callable[[TransferError], None],
    ) -> None:
        self._agent = agent
        self._flights = flights
        self._compared = compared
        self._lost = lost
        self._waiting: list[Piece] = []
        self._is_reading = False

    def add(self, piece: Piece) -> int:
        """Add a piece. Returns the number of pieces that wait, including it."""
        self._waiting.append(piece)
        return len(self._waiting)

    def start(self, connection: Connection) -> None:
        """Read the generations of all pieces that wait. If a read is under way, its end starts the
        next one."""
        batch = [piece for piece in self._waiting if not piece.pull.reported]
        if self._is_reading or not batch:
            return
        self._waiting = []
        first = min(min(piece.remote_blocks) for piece in batch)
        last = max(max(piece.remote_blocks) for piece in batch)
        homes = sorted({piece.ticket.home for piece in batch})
        connection.generations[homes, first : last + 1] = -1
        try:
            here, there = connection.prepare_generations(first, last)
            handle = self._agent.make_read(here, homes, there, homes)
        except TransferError as error:
            self._lost(error)
            return
        self._is_reading = True
        self._flights.post(handle, lambda: self._compare(batch, connection), (here, there))

    def forget(self) -> None:
        """Drop everything. The connection is lost, so a running read will not report its end."""
        self._is_reading = False
        self._waiting.clear()

    def _compare(self, batch: list[Piece], connection: Connection) -> None:
        self._is_reading = False
        table = connection.generations.numpy()
        now = time.monotonic()
        for piece in batch:
            is_fresh = np.array_equal(
                table[piece.ticket.home, list(piece.remote_blocks)], np.asarray(piece.generations)
            )
            piece.state = "verified" if is_fresh else "stale"
            piece.pull.read_s += now - max(piece.posted, piece.pull.read_until)
            piece.pull.read_until = now
        self._compared(batch)
