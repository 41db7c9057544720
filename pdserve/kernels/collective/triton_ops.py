"""Collective of ranks whose devices reach each other's memory: launches of the kernels of
peer_sums.py and peer_many_sums.py.

A rank's region holds its inboxes (region.py). Nothing here waits for the device. Knows bytes and
dtypes, not who shares the regions (parallel/peer_memory.py).
"""

import torch
from torch import Tensor

from pdserve.kernels.collective import peer_many_sums, peer_sums
from pdserve.kernels.collective.faults import Faults
from pdserve.kernels.collective.ops import Unsummed
from pdserve.kernels.collective.peer_rank import PeerRank
from pdserve.kernels.collective.peer_waits import LOOK
from pdserve.kernels.collective.region import RegionLayout
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.norm.ops import Norm

KINDS = {
    torch.float32: peer_sums.FLOAT32,
    torch.bfloat16: peer_sums.BFLOAT16,
    torch.float16: peer_sums.FLOAT16,
}


class PeerCollective(PeerRank):
    """See `Collective`. regions: int64 `[size]` on the device, where each rank's zeroed region of
    `layout.num_bytes` begins. memory: what owns the regions, kept."""

    def __init__(
        self,
        layout: RegionLayout,
        rank: int,
        regions: Tensor,
        faults: Faults,
        memory: object = None,
    ) -> None:
        super().__init__(layout.moves, rank, regions, faults, memory)
        self._layout = layout
        self._few_epochs = self._counters(layout.few_rows)
        self._many_epochs = self._counters(min(layout.many_slots, layout.programs))

    def add(self, stream: Tensor, partial: Tensor) -> Unsummed:
        """The next norm sums, and adds it to the stream, which is written."""
        return Unsummed(stream, partial, self)

    def add_norm(self, unsummed: Unsummed, norm: Norm) -> tuple[Tensor, Tensor]:
        normed = torch.empty_like(unsummed.partial)
        self._sum_rows(unsummed.partial, normed, unsummed.stream, norm)
        return normed, unsummed.stream

    def sum(self, partial: Tensor) -> Tensor:
        given = partial.contiguous()
        total = torch.empty_like(given)
        self._sum_rows(given, total, given, None)
        return total

    def _sum_rows(self, partial: Tensor, out: Tensor, stream: Tensor, norm: Norm | None) -> None:
        """out: the sum, or with a norm that of the stream with it added. ValueError for rows of
        another width than the layout's."""
        layout = self._layout
        if partial.shape[1] != layout.width or partial.dtype != layout.dtype:
            raise ValueError(
                f"rows to be summed must be {layout.dtype} and {layout.width} wide, not "
                f"{partial.dtype} {tuple(partial.shape)}"
            )
        if len(partial) <= layout.few_rows:
            self._sum_few(partial, out, stream, norm)
            return
        for start in range(0, len(partial), layout.many_rows):
            rows = slice(start, start + layout.many_rows)
            self._sum_many(partial[rows], out[rows], stream[rows], norm)

    def _sum_few(self, partial: Tensor, out: Tensor, stream: Tensor, norm: Norm | None) -> None:
        layout = self._layout
        launch(
            peer_sums.few_rows_kernel,
            (len(partial),),
            (
                _as_words(partial),
                _as_words(stream),
                _as_words(norm.weight if norm is not None else partial),
                _as_words(out),
                *self._shared(self._few_epochs),
            ),
            (norm.eps if norm is not None else 0.0, layout.few, self.limit),
            RANK=self.rank,
            SIZE=self.size,
            SLOTS=layout.few_rows,
            WORDS=layout.payloads,
            BLOCK=layout.payload_block,
            KIND=KINDS[partial.dtype],
            NORM=norm is not None,
            PLUS_ONE=norm is not None and norm.plus_one,
            LOOKS=LOOK,
            num_warps=8,
            **self._options,
        )

    def _sum_many(self, partial: Tensor, out: Tensor, stream: Tensor, norm: Norm | None) -> None:
        layout = self._layout
        num_rows = len(partial)
        programs = len(self._many_epochs)
        num_slots = num_rows if self.size == 2 else cdiv(num_rows, self.size)
        grid = (min(num_slots, programs),)
        constants = {
            "RANK": self.rank,
            "SIZE": self.size,
            "SLOTS": layout.many_slots,
            "PROGRAMS": programs,
            "WIDTH": layout.width,
            "ROW_WORDS": layout.row_words,
            "BLOCK": next_power_of_2(layout.width),
            "num_warps": 8,
            **self._options,
        }
        norming = {
            "NORM": norm is not None,
            "PLUS_ONE": norm is not None and norm.plus_one,
            **self._flags,
        }
        weight = norm.weight if norm is not None else partial
        shared = self._shared(self._many_epochs)
        places = (layout.many, layout.many_flags)
        launch(
            peer_many_sums.send_rows_kernel,
            grid,
            (partial, *shared[:-1]),
            (num_rows, *places),
            **constants,
        )
        numbers = (num_rows, norm.eps if norm is not None else 0.0, *places, self.limit)
        launch(
            peer_many_sums.sum_rows_kernel,
            grid,
            (partial, stream, weight, out, *shared),
            numbers,
            **constants,
            **norming,
        )
        if self.size > 2:
            launch(
                peer_many_sums.finish_rows_kernel,
                grid,
                (stream, weight, out, *shared),
                numbers,
                **constants,
                **norming,
            )


def _as_words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)
