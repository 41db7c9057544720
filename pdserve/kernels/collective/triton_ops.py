"""Collective of ranks whose devices reach each other's memory: launches of the kernels of
peer_sums.py and peer_moves.py.

A rank's region holds its inboxes (region.py). Nothing here waits for the device. Knows bytes and
dtypes, not who shares the regions (parallel/peer_memory.py).
"""

import torch
from torch import Tensor

from pdserve.kernels.collective import peer_moves, peer_sums
from pdserve.kernels.collective.faults import Faults
from pdserve.kernels.collective.ops import Unsummed, slice_of
from pdserve.kernels.collective.peer_waits import LOOK
from pdserve.kernels.collective.region import RegionLayout
from pdserve.kernels.launching.dependent_launch import launch_options
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.norm.ops import Norm

KINDS = {
    torch.float32: peer_sums.FLOAT32,
    torch.bfloat16: peer_sums.BFLOAT16,
    torch.float16: peer_sums.FLOAT16,
}
LIMIT = 1 << 30  # looks: ten minutes and more; a step's deadline calls off sooner


class PeerCollective:
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
        self.rank = rank
        self.size = layout.size
        self.limit = LIMIT
        self._layout = layout
        self._regions = regions
        self._faults = faults
        self._memory = memory
        device = regions.device
        self._options = launch_options(device)

        def counters(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._few_epochs = counters(layout.few_rows)
        self._many_epochs = counters(layout.many_slots)
        self._token_epochs = counters(layout.token_slots)
        self._chunk_epochs = [counters(layout.chunks) for _ in range(layout.size)]

    def call_off(self) -> None:
        self._faults.call_off()

    def check(self) -> None:
        self._faults.check()

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
        is_pair = self.size == 2
        launch(
            peer_sums.many_rows_kernel if is_pair else peer_sums.shared_rows_kernel,
            (len(partial) if is_pair else cdiv(len(partial), self.size),),
            (
                partial,
                stream,
                norm.weight if norm is not None else partial,
                out,
                *self._shared(self._many_epochs),
            ),
            (
                *(() if is_pair else (len(partial),)),
                norm.eps if norm is not None else 0.0,
                layout.many,
                layout.many_flags,
                self.limit,
            ),
            RANK=self.rank,
            SIZE=self.size,
            SLOTS=layout.many_slots,
            WIDTH=layout.width,
            ROW_WORDS=layout.row_words,
            BLOCK=next_power_of_2(layout.width),
            NORM=norm is not None,
            PLUS_ONE=norm is not None and norm.plus_one,
            LOOKS=LOOK,
            num_warps=8,
            **self._options,
        )

    def gather_columns(self, columns: Tensor, width: int) -> Tensor:
        given = columns.contiguous()
        layout = self._layout
        parts = [slice_of(width, rank, self.size) for rank in range(self.size)]
        if len(given) > layout.max_rows or width > layout.vocab_size:
            raise ValueError(
                f"logits of {len(given)} rows and {width} columns do not fit the inbox for "
                f"{layout.max_rows} rows and {layout.vocab_size} columns"
            )
        if self.rank:
            launch(
                peer_moves.send_columns_kernel,
                (cdiv(given.numel(), layout.chunk),),
                (given, *self._shared(self._chunk_epochs[self.rank])),
                (
                    given.numel(),
                    layout.logits(self.rank),
                    layout.flags(self.rank),
                    layout.credits,
                    self.limit,
                ),
                RANK=self.rank,
                BLOCK=layout.chunk,
                LOOKS=LOOK,
                num_warps=8,
                **self._options,
            )
            return columns
        logits = given.new_empty(len(given), width)
        logits[:, parts[0]] = given
        for source in range(1, self.size):
            part = parts[source]
            count = len(given) * (part.stop - part.start)
            launch(
                peer_moves.take_columns_kernel,
                (cdiv(count, layout.chunk),),
                (logits, *self._shared(self._chunk_epochs[source])),
                (
                    count,
                    part.stop - part.start,
                    part.start,
                    width,
                    layout.logits(source),
                    layout.flags(source),
                    layout.credits,
                    self.limit,
                ),
                SOURCE=source,
                WHOLE=False,
                BLOCK=layout.chunk,
                LOOKS=LOOK,
                num_warps=8,
                **self._options,
            )
        return logits

    def broadcast(self, numbers: Tensor) -> Tensor:
        if numbers.dtype != torch.int32 or len(numbers) > self._layout.max_rows:
            raise ValueError(
                f"numbers must be int32, at most {self._layout.max_rows}, not "
                f"{numbers.dtype} {tuple(numbers.shape)}"
            )
        sent = numbers.contiguous()
        launch(
            peer_moves.broadcast_kernel,
            (cdiv(len(sent), self._layout.token_block),),
            (sent, *self._shared(self._token_epochs)),
            (len(sent), self._layout.tokens, self.limit),
            RANK=self.rank,
            SIZE=self.size,
            SLOTS=self._layout.token_slots,
            BLOCK=self._layout.token_block,
            LOOKS=LOOK,
            num_warps=4,
            **self._options,
        )
        return sent

    def _shared(self, epochs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._regions, epochs, self._faults.device, self._faults.host


def _as_words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)
