"""Exchange of ranks whose devices reach each other's memory. It launches the kernels of
peer_rows.py.

Nothing here waits for the device. This file knows bytes and dtypes, not who shares the regions
(parallel/peer_memory.py does).
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pdserve.kernels.collective import peer_rows
from pdserve.kernels.collective.faults import Faults
from pdserve.kernels.collective.ops import Stream, Unsummed
from pdserve.kernels.collective.peer_rank import LeftSum, PeerRank
from pdserve.kernels.collective.region import WORD, ExchangeLayout, words_of_row
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2, power_of_2_below
from pdserve.kernels.norm.ops import Norm

TILE_NUMBERS = 1024  # a program moves several narrow rows at once, up to so many numbers
MOVED = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # bytes -> dtype as which rows are moved


class PeerExchange(PeerRank):
    """Implements `Exchange`.

    regions: int64 `[size]` on the device, the addresses of the zeroed regions of all ranks of the
        stage. Each region has `layout.num_bytes`.
    memory: the owner of the regions, kept alive.
    """

    def __init__(
        self,
        layout: ExchangeLayout,
        rank: int,
        regions: Tensor,
        faults: Faults,
        memory: object = None,
    ) -> None:
        if layout.num_homes > peer_rows.MAX_HOMES:
            raise ValueError(
                f"{layout.num_homes} homes: at most {peer_rows.MAX_HOMES} exchange rows over the "
                "memory of their GPUs"
            )
        super().__init__(layout.moves, rank, regions, faults, memory)
        self.num_homes = layout.num_homes
        self.home = rank // layout.home_size
        self._layout = layout
        self._gather_epochs = self._counters(layout.programs)
        self._add_epochs = self._counters(layout.programs)

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        layout = self._layout
        self._check_rows(rows, counts, counts[self.home])
        given = _as_numbers(rows.contiguous())
        width = given.shape[1]
        gathered = given.new_empty(sum(counts), width)
        cut = self._cut(width, given.dtype, max(1, TILE_NUMBERS // next_power_of_2(width)))
        for start, programs in self._pieces(counts, cut):
            constants = self._constants(width, cut) | {"TILE": cut.tile}
            numbers = (*_ends(counts), start, layout.gathered, layout.gather_flags)
            shared = self._shared(self._gather_epochs)
            launch(
                peer_rows.send_gathered_kernel,
                (programs,),
                (given, gathered, *shared[:-1]),
                numbers,
                **constants,
            )
            launch(
                peer_rows.take_gathered_kernel,
                (programs,),
                (gathered, *shared),
                (*numbers, self.limit),
                **constants,
                **self._flags,
            )
        return gathered.view(rows.dtype)

    def add_rows(self, stream: Tensor, partial: Tensor, counts: Sequence[int]) -> Stream:
        """Leaves the sum to the next norm, which adds it to the stream and writes the stream."""
        held = stream.contiguous()
        sum_rows = functools.partial(self._sum_rows, partial.contiguous(), tuple(counts))
        return Unsummed(held, LeftSum(held, sum_rows))

    def _sum_rows(
        self,
        partial: Tensor,
        counts: Sequence[int],
        out: Tensor,
        stream: Tensor,
        norm: Norm | None,
    ) -> None:
        """Writes the sum of this home's rows to out. With a norm, adds the sum to the stream, and
        writes the norm of the stream to out."""
        layout = self._layout
        self._check_rows(partial, counts, sum(counts))
        width = partial.shape[1]
        cut = self._cut(width, partial.dtype, 1)
        for start, programs in self._pieces(counts, cut):
            constants = self._constants(width, cut)
            shared = self._shared(self._add_epochs)
            piece, places = (*_ends(counts), start), (layout.added, layout.add_flags)
            launch(
                peer_rows.send_partial_kernel,
                (programs,),
                (partial, *shared[:-1]),
                (*piece, *places),
                **constants,
            )
            launch(
                peer_rows.add_rows_kernel,
                (programs,),
                (
                    partial,
                    stream,
                    norm.weight if norm is not None else partial,
                    out,
                    *shared,
                ),
                (*piece, norm.eps if norm is not None else 0.0, *places, self.limit),
                **constants,
                NORM=norm is not None,
                PLUS_ONE=norm is not None and norm.plus_one,
                **self._flags,
            )

    def _cut(self, width: int, dtype: torch.dtype, tile: int) -> "_Cut":
        """Decides how rows fit an area. Raises ValueError for a row that does not fit.

        tile: number of rows that a program moves at once, if that many fit.
        """
        words = words_of_row(width, dtype)
        fit = self._layout.area_words // words
        if not fit:
            raise ValueError(
                f"rows of {words * WORD} bytes do not fit areas of "
                f"{self._layout.area_words * WORD} bytes"
            )
        tile = power_of_2_below(min(tile, fit))
        held = fit // tile * tile * self._layout.programs
        return _Cut(tile, held, words * WORD // dtype.itemsize)

    def _pieces(self, counts: Sequence[int], cut: "_Cut") -> Iterator[tuple[int, int]]:
        """Yields the first row of each piece in the rows of a home, and the number of programs for
        the largest home. Both are the same on all ranks."""
        most = max(counts)
        for start in range(0, most, cut.held):
            rows = min(most - start, cut.held)
            yield start, min(cdiv(rows, cut.tile), self._layout.programs)

    def _constants(self, width: int, cut: "_Cut") -> dict[str, Any]:
        layout = self._layout
        return {
            "RANK": self.rank,
            "HOMES": layout.num_homes,
            "HOME_SIZE": layout.home_size,
            "AREAS": layout.programs,
            "AREA_WORDS": layout.area_words,
            "HELD": cut.held,
            "WIDTH": width,
            "STRIDE": cut.stride,
            "BLOCK": next_power_of_2(width),
            "num_warps": 8,
            **self._options,
        }

    def _check_rows(self, rows: Tensor, counts: Sequence[int], num_rows: int) -> None:
        if len(counts) != self.num_homes or min(counts) < 1 or len(rows) != num_rows:
            raise ValueError(
                f"{len(rows)} rows do not go with {self.num_homes} homes that have {list(counts)}"
            )


@dataclass(frozen=True)
class _Cut:
    """Sizes by which rows are cut.

    tile: rows that a program moves at once.
    held: rows of a home in a piece.
    stride: numbers from one row of an area to the next.
    """

    tile: int
    held: int
    stride: int


def _as_numbers(rows: Tensor) -> Tensor:
    """Views the same bytes as integers of up to 4 bytes, since rows are only moved."""
    row_bytes = rows.shape[1] * rows.dtype.itemsize
    return rows.view(MOVED[next(size for size in (4, 2, 1) if row_bytes % size == 0)])


def _ends(counts: Sequence[int]) -> tuple[int, ...]:
    """The end of each home's rows. Homes that do not exist have no rows."""
    ends = tuple(accumulate(counts))
    return ends + ends[-1:] * (peer_rows.MAX_HOMES - len(ends))
