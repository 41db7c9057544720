"""Reserves blocks for prompts whose rows somebody else fills. A reservation is later joined to the
batch or given back.

Knows blocks and requests; not who fills them, nor when. An engine makes one object of it and calls
it.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from pdserve.configs.kv_layout import KVLayout
from pdserve.engine.memory.block_manager import OutOfBlocks
from pdserve.engine.requests import Requests
from pdserve.engine.scheduling import placing
from pdserve.engine.scheduling.home import Home
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.scheduling.sequence import Request
from pdserve.protocol.block_digests import BlockHasher
from pdserve.protocol.commands import Start


@dataclass
class Reservation:
    """Blocks for rows that somebody else will fill."""

    request: Request
    starts: tuple[Start, ...]
    block_table: list[int]
    num_cached: int  # leading blocks of block_table that already hold their rows
    home: int  # the home that the blocks belong to

    @property
    def destination(self) -> list[int]:
        """The blocks to fill."""
        return self.block_table[self.num_cached :]


class Reservations:
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

    @property
    def num_out(self) -> int:
        """Number of reservations that were neither joined nor given back."""
        return sum(home.num_reserved for home in self._scheduler.homes)

    def reserve(
        self,
        request: Request,
        starts: tuple[Start, ...],
        num_blocks: int | None = None,
        keeps_room: bool = False,
        may_use: Callable[[Home], bool] = lambda home: True,
    ) -> Reservation | None:
        """Reserve blocks for the prompt's rows, or for its first num_blocks, in the home that suits
        them best. Cached blocks come first. Returns None if too few are free everywhere.

        - keeps_room: leave a block to grow into for each running sequence.
        - may_use: says which homes may be taken.
        """
        wanted = num_blocks or self._layout.num_blocks_for(request.num_prompt_tokens)
        hashes = request.prompt_hashes(self._hasher)[:num_blocks]
        for home in self._best_homes(hashes):
            has_room = not keeps_room or not home.num_running or home.num_spare_blocks >= wanted
            if not has_room or not may_use(home):
                continue
            blocks = home.blocks
            cached = blocks.match(hashes)
            blocks.acquire(cached)
            try:
                fresh = blocks.allocate(wanted - len(cached), cached[-1] if cached else None)
            except OutOfBlocks:
                blocks.release(cached)
                continue
            home.num_reserved += 1
            return Reservation(request, starts, cached + fresh, len(cached), home.number)
        return None

    def _best_homes(self, hashes: SequenceOf[bytes]) -> SequenceOf[Home]:
        homes = list(self._scheduler.homes)
        if len(homes) == 1:
            return homes
        size = self._layout.block_size
        sequences = [*self._scheduler.running, *self._scheduler.waiting]
        loads = placing.loads_of(homes, sequences)
        costs = {
            home.number: loads[home.number] - len(home.blocks.match(hashes)) * size
            for home in homes
        }
        return placing.in_order(homes, costs)

    def join(self, reservation: Reservation) -> None:
        """Let the choices of a reservation continue after their forced tokens. All its rows must be
        in place."""
        request = reservation.request
        request.prompt_reported = request.prefix_looked_up = True
        request.cached_tokens = reservation.num_cached * self._layout.block_size
        request.home = reservation.home
        home = self._scheduler.homes[reservation.home]
        home.num_reserved -= 1
        self._requests.register(request)
        rows = request.num_prompt_tokens
        for index, start in enumerate(reservation.starts):
            seq = self._requests.new_sequence(request, start)
            seq.block_table = list(reservation.block_table)
            seq.num_computed = rows
            if index:
                home.blocks.acquire(seq.block_table)
            home.commit_full_blocks(seq)
            self._scheduler.add(seq)

    def cancel(self, reservation: Reservation, settled: bool, num_filled: int = 0) -> list[int]:
        """Give a reservation back. The first num_filled blocks of its destination hold their rows
        and stay cached. If settled is False, the other blocks go to quarantine and are returned.
        """
        home = self._scheduler.homes[reservation.home]
        home.num_reserved -= 1
        blocks = home.blocks
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
