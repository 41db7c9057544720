"""The pulls of one link: moves their pieces, verifies them, and reports how each pull ended.

Knows tickets, generations and the staging ring. It does not know how a link is opened, lost or
drained, nor when to sleep. `peer_link.PeerLink` knows that; its thread calls every method.

    pull:  begun -> its pieces: reading -> verifying -> all verified: done
           | failed (settled or not) ... -> settled

A pull may begin before its prompt is computed. Then it reads what each newer ticket names, one
piece per ticket, and is done only after the complete ticket. A piece that was reused meanwhile is
read again after a newer ticket has come. That happens only when no read of its pull is in flight,
because two reads into the same memory could end in the wrong order.

An unpinned ticket is read in pieces, a few at once, and each is verified by itself. Its blocks may
be reused at any time. A failed pull reports how many blocks were verified before the first that was
reused.

Rows from blocks of another size are read into the staging ring, one piece per run of the ring.
After each read a repack moves them to our blocks. So bytes in flight land in ring blocks, and only
a repack keeps our blocks from being quiet. Ring blocks are held until nothing can land in them,
even if their pull was given up.
"""

import time
from functools import partial
from typing import Protocol

import numpy as np

from pdserve.kvtransfer.connector import PullDone, PullFailed, PullSettled
from pdserve.kvtransfer.p2p.connection import Connection, release_all
from pdserve.kvtransfer.p2p.link.flights import Flights
from pdserve.kvtransfer.p2p.link.pull import Piece, Pull
from pdserve.kvtransfer.p2p.link.verification import Verification
from pdserve.kvtransfer.p2p.ranges import count_descriptors, order_pairs
from pdserve.kvtransfer.transport.agent import Handle, TransferAgent, TransferError
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import Ticket

# Blocks per piece of an unpinned ticket. What was verified before a reused piece is kept.
PIECE_BLOCKS = 64
PIECES_AT_ONCE = 4  # pieces of an unpinned ticket that are read before the first is verified
# Pieces from the staging ring per verification, while more come: reading generations costs as much
# as moving a piece.
VERIFIED_TOGETHER = 4


class Link(Protocol):
    """The link, as its pulls see it. status: the last one that was reported."""

    status: PeerStatus | None

    @property
    def is_connected(self) -> bool:
        """True if reads may be posted. A post may change it, so ask again after each."""
        ...

    @property
    def connection(self) -> Connection:
        """The open connection; there must be one."""
        ...

    def emit(self, event: PullDone | PullFailed | PullSettled) -> None: ...

    def lose(self, error: TransferError) -> None:
        """Handle a failed connection. Calls `fail_all`."""
        ...


class LinkPulls:
    """The pulls of one link, each until it has ended and nothing can land in its blocks."""

    def __init__(self, agent: TransferAgent, flights: Flights, link: Link) -> None:
        self._agent = agent
        self._flights = flights
        self._link = link
        self._verification = Verification(agent, flights, self._compared, link.lose)
        self._pulls: dict[int, Pull] = {}
        self._staged: set[Piece] = set()  # pieces that hold ring blocks

    @property
    def under_way(self) -> list[Pull]:
        """Pulls that have not ended, and those that failed while bytes may land in their blocks."""
        return list(self._pulls.values())

    @property
    def next_deadline(self) -> float | None:
        """The next deadline, monotonic; None if no pull has one."""
        deadlines = [pull.deadline for pull in self._pulls.values() if pull.deadline is not None]
        return min(deadlines) if deadlines else None

    @property
    def is_quiet(self) -> bool:
        """True if nothing lands in blocks of a pull or of the staging ring."""
        return not self._staged and not any(pull.is_written for pull in self._pulls.values())

    @property
    def are_given_up(self) -> bool:
        """True if reads may be under way that nobody waits for."""
        return any(p.reported for p in self._pulls.values()) or any(
            p.pull.reported for p in self._staged
        )

    def begin(self, pull: Pull) -> None:
        self._pulls[pull.pull_id] = pull
        if self._link.is_connected:
            self._advance(pull)

    def extend(self, pull_id: int, ticket: Ticket) -> None:
        pull = self._pulls.get(pull_id)
        if pull is not None and not pull.reported and not pull.is_complete:
            pull.ticket = ticket
            self._advance(pull)

    def complete(self, pull_id: int, ticket: Ticket, deadline: float, now: float) -> None:
        pull = self._pulls.get(pull_id)
        if pull is not None and not pull.reported:
            pull.ticket = ticket
            pull.is_complete = True
            pull.deadline = deadline
            pull.end = len(ticket.block_ids)
            pull.started = now
            pull.early = pull.verified
            self._advance(pull)

    def end(self, pull_id: int, reason: str, detail: str) -> None:
        """Fail a pull whose end was not reported yet."""
        pull = self._pulls.get(pull_id)
        if pull is not None and not pull.reported:
            self._fail(pull, reason, detail)

    def go_on(self) -> None:
        """Continue all pulls, because the link is connected now, or ring blocks were given back."""
        for pull in list(self._pulls.values()):
            self._advance(pull)

    def check_deadlines(self) -> None:
        now = time.monotonic()
        for pull in list(self._pulls.values()):
            if not pull.reported and pull.is_late(now):
                self._fail(pull, "deadline", f"no end after {now - pull.started:.3f} s")

    def fail_all(self, reason: str, detail: str) -> None:
        """Fail all pulls: nothing more is read over this connection."""
        self._verification.forget()
        for pull in list(self._pulls.values()):
            if not pull.reported:
                self._fail(pull, reason, detail)

    def settle_all(self, connection: Connection) -> None:
        """Settle all pulls. Every read has ended, and the connection is closed, so nothing lands
        any more."""
        unsettled = [pull for pull in self._pulls.values() if pull.is_written]
        for piece in list(self._staged):
            self._give_back(piece, connection)
        for pull in unsettled:
            self._settle(pull)

    def _advance(self, pull: Pull) -> None:
        """Read what the newest ticket names and was not read yet, as far as there are ring blocks
        for it; or finish."""
        if pull.is_advancing:  # a read that ends within its post comes back here
            return
        pull.is_advancing = True
        while (piece := self._next_piece(pull)) is not None:
            self._read(piece)
        pull.is_advancing = False
        is_open = self._link.is_connected and not pull.reported
        if is_open and pull.is_complete and pull.verified >= pull.end:
            self._finish(pull)

    def _next_piece(self, pull: Pull) -> Piece | None:
        ticket = pull.ticket
        if (
            not self._link.is_connected
            or pull.reported
            or ticket is None
            or not self._reread(pull, ticket)
        ):
            return None
        staging = self._link.connection.staging
        first = pull.posted
        last = pull.readable
        ring_blocks = None
        if first >= last:
            return None
        if not ticket.is_pinned:
            if sum(piece.state == "reading" for piece in pull.pieces) >= PIECES_AT_ONCE:
                return None  # `_compared` continues later
            last = min(last, first + whole_steps(PIECE_BLOCKS, pull.sizes.step))
        if staging is not None:
            ring_blocks = staging.take(ticket.block_ids[first:last])
            if ring_blocks is None:
                return None  # other pulls hold them; `go_on` is called when some are free
            last = first + len(ring_blocks)
        pull.posted = last
        piece = Piece(pull, ticket, first, last, ring_blocks)
        if ring_blocks is not None:
            self._staged.add(piece)
        return piece

    def _reread(self, pull: Pull, ticket: Ticket) -> bool:
        """Go back to the first stale piece, if there is one. Returns False while that must wait."""
        stale = next((piece for piece in pull.pieces if piece.state == "stale"), None)
        if stale is None:
            return True
        if any(piece.state == "reading" for piece in pull.pieces):
            return False
        if stale.is_named_by(ticket):
            if pull.is_complete:
                blocks = f"{stale.first} to {stale.last - 1}"
                self._fail(
                    pull, "stale-generation", f"some of the prompt's blocks {blocks} were reused"
                )
            return False
        pull.posted = stale.first
        pull.pieces.clear()
        return True

    def _read(self, piece: Piece) -> None:
        pull = piece.pull
        connection = self._link.connection
        pull.pieces.append(piece)
        into = piece.local_blocks if piece.ring_blocks is None else piece.ring_blocks
        local_ids, remote_ids = order_pairs(into, piece.remote_blocks)
        source = connection.homes[piece.ticket.home]
        descriptors = count_descriptors(local_ids, remote_ids, source.whole_blocks)
        pull.num_descriptors += len(source.parts) * descriptors
        handles: list[Handle] = []
        try:
            for part in source.parts:
                handles.append(
                    self._agent.make_read(part.local, local_ids, part.remote, remote_ids)
                )
        except TransferError as error:
            release_all([partial(self._agent.release, handle) for handle in handles])
            if piece.ring_blocks is not None:
                self._give_back(piece, connection)
            self._fail(pull, "error", str(error))
            return
        piece.reads = len(handles)
        for index, handle in enumerate(handles):
            if not self._link.is_connected:  # lost in an earlier post
                release_all(
                    [partial(self._agent.release, unposted) for unposted in handles[index:]]
                )
                return
            self._flights.post(handle, lambda: self._data_done(piece))

    def _data_done(self, piece: Piece) -> None:
        piece.reads -= 1
        if piece.reads:
            return
        connection = self._link.connection
        if piece.ring_blocks is None:
            self._filled(piece, connection)
        elif piece.pull.reported:  # its blocks may belong to others by now
            self._give_back(piece, connection)
        else:
            self._repack(piece, piece.ring_blocks, connection)

    def _repack(self, piece: Piece, ring_blocks: np.ndarray, connection: Connection) -> None:
        assert connection.staging is not None
        piece.is_repacking = True
        first, end = piece.rows
        skip = first - piece.first * piece.pull.sizes.theirs
        has_ended = connection.staging.repack(ring_blocks, skip, end - first, piece.local_blocks)
        self._flights.watch(has_ended, partial(self._filled, piece, connection))

    def _give_back(self, piece: Piece, connection: Connection) -> None:
        """Give back the ring blocks of a piece. Nothing lands in them any more, and nobody needs
        their content."""
        assert piece.ring_blocks is not None and connection.staging is not None
        ring_blocks = piece.ring_blocks
        piece.ring_blocks = None
        piece.is_repacking = False
        self._staged.remove(piece)
        connection.staging.give_back(ring_blocks)

    def _filled(self, piece: Piece, connection: Connection) -> None:
        """Handle a piece whose rows are in our blocks."""
        if piece.ring_blocks is not None:
            self._give_back(piece, connection)
        if piece.pull.reported:
            if not piece.pull.is_written:
                self._settle(piece.pull)
            return
        waiting = self._verification.add(piece)
        more = connection.staging is not None and any(each.is_moving for each in piece.pull.pieces)
        if not more or waiting >= VERIFIED_TOGETHER:
            self._verification.start(connection)

    def _compared(self, batch: list[Piece]) -> None:
        for pull in dict.fromkeys(piece.pull for piece in batch):
            while pull.pieces and pull.pieces[0].state == "verified":
                pull.verified = pull.pieces.popleft().last
                pull.verified_at = time.time()
            self._advance(pull)
        if self._link.is_connected:
            self._verification.start(self._link.connection)

    def _finish(self, pull: Pull) -> None:
        pull.reported = True
        del self._pulls[pull.pull_id]
        status = self._link.status
        assert status is not None and pull.ticket is not None
        block_bytes = self._link.connection.homes[pull.ticket.home].num_bytes
        self._link.emit(
            PullDone(
                pull.pull_id,
                max(pull.end - pull.first, 0) * block_bytes,
                pull.num_descriptors,
                status.transport,
                time.monotonic() - pull.started,
                (pull.early - pull.first) * block_bytes,
                pull.read_s,
                pull.verified_at,
            )
        )

    def _fail(self, pull: Pull, reason: str, detail: str) -> None:
        """Report a failed pull. It is settled at once if nothing is under way into its blocks."""
        pull.reported = True
        settled = not pull.is_written
        if settled:
            del self._pulls[pull.pull_id]
        self._link.emit(
            PullFailed(pull.pull_id, reason, detail, settled, pull.num_verified, pull.is_complete)
        )

    def _settle(self, pull: Pull) -> None:
        del self._pulls[pull.pull_id]
        self._link.emit(PullSettled(pull.pull_id))


def whole_steps(num_blocks: int, step: int) -> int:
    """Round a number of the peer's blocks down to whole steps, at least one, so that no two pieces
    write one of our blocks."""
    return max(num_blocks // step, 1) * step
