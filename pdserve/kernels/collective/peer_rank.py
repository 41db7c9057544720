"""A rank whose device reaches the memory of other ranks. This file launches the kernels of
peer_moves.py, which move data between ranks without adding it up. It also has the sum over such
ranks that is left to a norm.

A rank's region holds its inboxes (region.py). Nothing here waits for the device. This file knows
bytes and dtypes, not who shares the regions (parallel/peer_memory.py does).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.collective import peer_moves
from pdserve.kernels.collective.faults import Faults
from pdserve.kernels.collective.ops import slice_of
from pdserve.kernels.collective.peer_waits import LOOK, flag_options
from pdserve.kernels.collective.region import MovesLayout
from pdserve.kernels.launching.dependent_launch import launch_options
from pdserve.kernels.launching.launch import cdiv, launch
from pdserve.kernels.norm.ops import Norm

LIMIT = 1 << 30  # looks: ten minutes and more; a step's deadline calls off sooner

SumRows = Callable[[Tensor, Tensor, Norm | None], None]
"""Takes out, stream and norm. Without a norm it writes the sum to out. With a norm it adds the sum
to the stream and writes the norm of the stream to out."""


@dataclass(frozen=True, slots=True)
class LeftSum:
    """Implements `Pending`. like: a tensor with the shape and dtype of the sum."""

    like: Tensor
    sum_rows: SumRows

    def sum(self) -> Tensor:
        total = self.like.new_empty(self.like.shape)
        self.sum_rows(total, total, None)
        return total

    def add_norm(self, stream: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        normed = stream.new_empty(stream.shape)
        self.sum_rows(normed, stream, norm)
        return normed, stream


class PeerRank:
    """The base class of `PeerCollective` and `PeerExchange`; their docstrings explain the
    arguments."""

    def __init__(
        self,
        moves: MovesLayout,
        rank: int,
        regions: Tensor,
        faults: Faults,
        memory: object,
    ) -> None:
        self.rank = rank
        self.size = moves.size
        self.limit = LIMIT
        self._moves = moves
        self._regions = regions
        self._faults = faults
        self._memory = memory
        self._options = launch_options(regions.device)
        self._flags = flag_options(regions.device)
        self._token_epochs = self._counters(moves.token_slots)
        self._chunk_epochs = [self._counters(moves.chunks) for _ in range(moves.size)]

    def call_off(self) -> None:
        self._faults.call_off()

    def check(self) -> None:
        self._faults.check()

    def gather_columns(self, columns: Tensor, width: int) -> Tensor:
        given = columns.contiguous()
        layout = self._moves
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
                num_warps=8,
                **self._flags,
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
                num_warps=8,
                **self._flags,
                **self._options,
            )
        return logits

    def broadcast(self, numbers: Tensor) -> Tensor:
        if numbers.dtype != torch.int32 or len(numbers) > self._moves.max_rows:
            raise ValueError(
                f"numbers must be int32, at most {self._moves.max_rows}, not "
                f"{numbers.dtype} {tuple(numbers.shape)}"
            )
        sent = numbers.contiguous()
        launch(
            peer_moves.broadcast_kernel,
            (cdiv(len(sent), self._moves.token_block),),
            (sent, *self._shared(self._token_epochs)),
            (len(sent), self._moves.tokens, self.limit),
            RANK=self.rank,
            SIZE=self.size,
            SLOTS=self._moves.token_slots,
            BLOCK=self._moves.token_block,
            LOOKS=LOOK,
            num_warps=4,
            **self._options,
        )
        return sent

    def _shared(self, epochs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._regions, epochs, self._faults.device, self._faults.host

    def _counters(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._regions.device)
