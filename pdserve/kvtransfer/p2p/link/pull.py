"""One pull on its way, and the pieces in which it is read.

Knows which positions of a prompt are wanted, read and verified, and into which memory a piece
moves. Posts no read, and knows no link and no thread. `link_pulls.py` moves the pieces,
`rank_receiver.py` makes the pulls.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pdserve.kvtransfer.p2p.ranges import BlockSizes
from pdserve.protocol.handoff import Ticket


@dataclass(eq=False)
class Pull:
    """One pull on its way. Positions count the prompt's blocks of the *peer's* size, from 0. Those
    from `first` to before `end` are wanted; until the ticket is complete, those with room here.
    """

    pull_id: int
    sizes: BlockSizes
    skip: int  # blocks of our size that are not pulled
    local_blocks: tuple[int, ...]  # for the prompt's blocks of our size from `skip` on
    started: float  # monotonic; when the complete ticket came (before: when the pull began)
    patience: float  # seconds that one read may take before the complete ticket
    ticket: Ticket | None = None  # the newest
    is_complete: bool = False  # the ticket is the complete one
    deadline: float | None = None  # monotonic, for the complete ticket
    posted: int = 0  # positions before it are read or under way
    verified: int = 0  # positions before it hold what was published
    verified_at: float = field(default_factory=time.time)  # when, in seconds since the epoch
    early: int = 0  # `verified` when the complete ticket came
    read_s: float = 0.0  # time of pieces from post to verified; overlaps count once
    read_until: float = 0.0  # monotonic; when the last of them ended
    pieces: deque["Piece"] = field(default_factory=deque)
    num_descriptors: int = 0
    reported: bool = False  # its end was reported
    is_advancing: bool = False  # `LinkPulls` is reading its pieces right now

    def __post_init__(self) -> None:
        self.first, self.end = self.sizes.cover(self.skip, self.skip + len(self.local_blocks))
        if not self.local_blocks:
            self.first = self.end
        self.posted = self.verified = self.early = self.first

    @property
    def readable(self) -> int:
        """The position before which the newest ticket allows reads. Of a part, only what fills
        whole blocks of ours counts, so that no two pieces write into one.
        """
        assert self.ticket is not None
        named = len(self.ticket.block_ids)
        return min(named if self.ticket.num_tokens else named - named % self.sizes.step, self.end)

    @property
    def num_verified(self) -> int:
        """Number of local blocks that hold what was published."""
        if self.is_complete and self.verified >= self.end:
            return len(self.local_blocks)
        return min(max(self.sizes.filled(self.verified) - self.skip, 0), len(self.local_blocks))

    def is_late(self, now: float) -> bool:
        if self.deadline is not None:
            return now > self.deadline
        return any(piece.reads and now > piece.posted + self.patience for piece in self.pieces)

    @property
    def is_written(self) -> bool:
        """True if bytes may land in its blocks."""
        return any(piece.is_written for piece in self.pieces)


@dataclass(eq=False)
class Piece:
    """The positions from first to before last of a pull, which are read by one ticket.

    - reads: number of reads that have not ended.
    - ring_blocks: one block of the staging ring per position, while they are taken.
    """

    pull: Pull
    ticket: Ticket
    first: int
    last: int
    ring_blocks: np.ndarray | None = None
    reads: int = 0
    is_repacking: bool = False
    state: Literal["reading", "verified", "stale"] = "reading"
    posted: float = field(default_factory=time.monotonic)

    @property
    def remote_blocks(self) -> tuple[int, ...]:
        return self.ticket.block_ids[self.first : self.last]

    @property
    def rows(self) -> tuple[int, int]:
        """The prompt's rows that it moves, `(first, after the last)`."""
        pull = self.pull
        end = (pull.skip + len(pull.local_blocks)) * pull.sizes.ours
        return max(self.first * pull.sizes.theirs, pull.skip * pull.sizes.ours), min(
            self.last * pull.sizes.theirs, end
        )

    @property
    def local_blocks(self) -> tuple[int, ...]:
        """The blocks of our size that it fills."""
        first, end = self.rows
        ours = self.pull.sizes.ours
        return self.pull.local_blocks[
            first // ours - self.pull.skip : -(-end // ours) - self.pull.skip
        ]

    @property
    def is_moving(self) -> bool:
        """True if its bytes are on their way to `local_blocks`."""
        return self.reads > 0 or self.is_repacking

    @property
    def is_written(self) -> bool:
        """True if bytes may land in `local_blocks`."""
        return self.is_repacking if self.ring_blocks is not None else self.reads > 0

    @property
    def generations(self) -> tuple[int, ...]:
        return self.ticket.generations[self.first : self.last]

    def is_named_by(self, ticket: Ticket) -> bool:
        """True if the ticket names the same blocks, of the same home and generations."""
        span = slice(self.first, self.last)
        return (ticket.home, ticket.block_ids[span], ticket.generations[span]) == (
            self.ticket.home,
            self.remote_blocks,
            self.generations,
        )
