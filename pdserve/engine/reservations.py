"""Blocks for prompts whose rows somebody else fills: reserved, then joined to the batch or given
back.

Knows blocks and requests; not who fills them, nor when. One object an engine; called through it.
"""

from dataclasses import dataclass

from pdserve.configs.kv_layout import KVLayout
from pdserve.engine.memory.block_manager import OutOfBlocks
from pdserve.engine.requests import Requests
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.scheduling.sequence import Request
from pdserve.protocol.block_digests import BlockHasher
from pdserve.protocol.commands import Start


@dataclass
class Reservation:
    """Blocks for rows that somebody else will fill. block_table: the first `num_cached` hold their
    rows already."""

    request: Request
    starts: tuple[Start, ...]
    block_table: list[int]
    num_cached: int

    @property
    def destination(self) -> list[int]:
        """The blocks to fill."""
        return self.block_table[self.num_cached :]


class Reservations:
    """num_out: reservations that were neither joined nor given back."""

    def __init__(
        self,
        hasher: BlockHasher,
        layout: KVLayout,
        requests: Requests,
        scheduler: Scheduler,
    ) -> None:
        self._hasher = hasher
        self._layout = layout
        self._requests = requests
        self._scheduler = scheduler
        self.num_out = 0

    def reserve(
        self, request: Request, starts: tuple[Start, ...], num_blocks: int | None = None
    ) -> Reservation | None:
        """Blocks for the prompt's rows, or for the first num_blocks, cached ones first; None when
        too few are free."""
        blocks = self._scheduler.homes[request.home].blocks
        cached = blocks.match(request.prompt_hashes(self._hasher)[:num_blocks])
        blocks.acquire(cached)
        missing = (num_blocks or self._layout.num_blocks_for(request.num_prompt_tokens)) - len(
            cached
        )
        try:
            fresh = blocks.allocate(missing, cached[-1] if cached else None)
        except OutOfBlocks:
            blocks.release(cached)
            return None
        self.num_out += 1
        return Reservation(request, starts, cached + fresh, len(cached))

    def join(self, reservation: Reservation) -> None:
        """All rows of the reservation are in place: its choices go on behind their forced
        tokens."""
        self.num_out -= 1
        request = reservation.request
        request.prompt_reported = request.prefix_looked_up = True
        request.cached_tokens = reservation.num_cached * self._layout.block_size
        self._requests.register(request)
        rows = request.num_prompt_tokens
        for index, start in enumerate(reservation.starts):
            seq = self._requests.new_sequence(request, start)
            seq.block_table = list(reservation.block_table)
            seq.num_computed = rows
            if index:
                self._scheduler.home_of(seq).blocks.acquire(seq.block_table)
            self._scheduler.commit_full_blocks(seq)
            self._scheduler.add(seq)

    def cancel(self, reservation: Reservation, settled: bool, num_filled: int = 0) -> list[int]:
        """Give a reservation back. The first num_filled blocks of its destination hold their rows,
        and stay cached. settled False: the others go to quarantine; those blocks are returned.
        """
        self.num_out -= 1
        blocks = self._scheduler.homes[reservation.request.home].blocks
        filled = reservation.num_cached + num_filled
        hashes = reservation.request.prompt_hashes(self._hasher)
        for block, block_hash in list(zip(reservation.block_table, hashes, strict=False))[:filled]:
            blocks.commit(block, block_hash)
        blocks.release(reservation.block_table[:filled])
        destination = reservation.block_table[filled:]
        if settled:
            blocks.release(destination)
            return []
        blocks.quarantine(destination, "transfer")
        return destination
