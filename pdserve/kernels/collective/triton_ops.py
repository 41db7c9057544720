"""Collective of ranks whose devices reach each other's memory: Triton kernels over peer_kernels.py.

A rank's region holds its inboxes: of sums by rows and by flat pieces, of tokens, of logits. Nothing
here waits for the device. Knows bytes and dtypes, not who shares the regions
(parallel/peer_memory.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.collective import peer_kernels as kernels
from pdserve.kernels.collective.ops import Unsummed, slice_of
from pdserve.kernels.launching.dependent_launch import launch_options
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.norm.ops import Norm

KINDS = {
    torch.float32: kernels.FLOAT32,
    torch.bfloat16: kernels.BFLOAT16,
    torch.float16: kernels.FLOAT16,
}
WORD = 8
ROW_SLOTS = 32  # rows of a step that are summed and normed at once
FLAT_BLOCK = 512
FLAT_SLOTS = 512  # so 1 MiB is summed at once
TOKEN_BLOCK = 128
CHUNK = 4096  # numbers of logits behind one flag
LIMIT = 1 << 26  # looks: about a minute


@dataclass(frozen=True)
class RegionLayout:
    """Where the inboxes lie in each rank's region, in words of 8 bytes. width: of the residual
    stream; max_rows: that sample in a step; vocab_size: of the logits, of the same dtype."""

    size: int
    width: int
    dtype: torch.dtype
    max_rows: int
    vocab_size: int

    @property
    def row_words(self) -> int:
        """Payloads of 4 bytes in a row."""
        return self.width * self.dtype.itemsize // 4

    @property
    def row_block(self) -> int:
        return next_power_of_2(self.row_words)

    @property
    def token_slots(self) -> int:
        return cdiv(self.max_rows, TOKEN_BLOCK)

    @property
    def chunks(self) -> int:
        """Of one rank's logits."""
        widest = slice_of(self.vocab_size, 0, self.size)
        return cdiv(self.max_rows * (widest.stop - widest.start), CHUNK)

    @property
    def rows(self) -> int:
        """Of sums by rows, which come first."""
        return 0

    @property
    def flat(self) -> int:
        """Of sums by flat pieces."""
        return self.rows + 2 * self.size * ROW_SLOTS * self.row_block

    @property
    def tokens(self) -> int:
        return self.flat + 2 * self.size * FLAT_SLOTS * FLAT_BLOCK

    @property
    def credits(self) -> int:
        return self.tokens + 2 * self.token_slots * TOKEN_BLOCK

    def flags(self, source: int) -> int:
        return self.credits + (1 + source) * self.chunks

    def logits(self, source: int) -> int:
        return self.flags(self.size) + source * self.chunks * (CHUNK * self.dtype.itemsize // WORD)

    @property
    def num_bytes(self) -> int:
        return self.logits(self.size) * WORD


class PeerCollective:
    """See `Collective`. regions: int64 `[size]` on the device, where each rank's zeroed region of
    `layout.num_bytes` begins. host_fault: int32 `[1]` in memory that device and host see, 0.
    memory: what owns the regions, kept."""

    def __init__(
        self,
        layout: RegionLayout,
        rank: int,
        regions: Tensor,
        host_fault: Tensor,
        memory: object = None,
    ) -> None:
        self.rank = rank
        self.size = layout.size
        self.limit = LIMIT
        self._layout = layout
        self._regions = regions
        self._host_fault = host_fault
        self._memory = memory
        device = regions.device
        self._options = launch_options(device)

        def counters(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._faults = counters(1)
        self._row_epochs = counters(ROW_SLOTS)
        self._flat_epochs = counters(FLAT_SLOTS)
        self._token_epochs = counters(layout.token_slots)
        self._chunk_epochs = [counters(layout.chunks) for _ in range(layout.size)]

    def call_off(self) -> None:
        self._host_fault.fill_(1)

    def check(self) -> None:
        """RuntimeError when a rank was not heard of in time; to be asked before results are
        used."""
        if int(self._host_fault[0]):
            raise RuntimeError(
                "a rank of this engine did not answer in time: what was computed is not valid"
            )

    def add(self, stream: Tensor, partial: Tensor) -> "Tensor | Unsummed":
        """The stream with the sum of all ranks' partial rows; of few rows the next norm finishes
        it. Written to the stream."""
        if len(partial) <= ROW_SLOTS and partial.shape[1] == self._layout.width:
            return Unsummed(stream, partial, self)
        return stream.add_(self.sum(partial))

    def add_norm(self, unsummed: Unsummed, norm: Norm) -> tuple[Tensor, Tensor]:
        stream, partial = unsummed.stream, unsummed.partial
        normed = torch.empty_like(partial)
        layout = self._layout
        launch(
            kernels.add_norm_kernel,
            (len(partial),),
            (
                _as_words(stream),
                _as_words(partial),
                _as_words(norm.weight),
                _as_words(normed),
                *self._shared(self._row_epochs),
            ),
            (norm.eps, layout.rows, self.limit),
            RANK=self.rank,
            SIZE=self.size,
            SLOTS=ROW_SLOTS,
            WORDS=layout.row_words,
            BLOCK=layout.row_block,
            KIND=KINDS[partial.dtype],
            PLUS_ONE=norm.plus_one,
            LOOKS=kernels.LOOK,
            num_warps=8,
            **self._options,
        )
        return normed, stream

    def sum(self, partial: Tensor) -> Tensor:
        given = partial.contiguous()
        total = torch.empty_like(given)
        source, target = _as_words(given).view(-1), _as_words(total).view(-1)
        step = FLAT_SLOTS * FLAT_BLOCK
        for start in range(0, len(source), step):
            piece = source[start : start + step]
            launch(
                kernels.sum_kernel,
                (cdiv(len(piece), FLAT_BLOCK),),
                (piece, target[start : start + step], *self._shared(self._flat_epochs)),
                (len(piece), self._layout.flat, self.limit),
                RANK=self.rank,
                SIZE=self.size,
                SLOTS=FLAT_SLOTS,
                BLOCK=FLAT_BLOCK,
                KIND=KINDS[given.dtype],
                LOOKS=kernels.LOOK,
                num_warps=4,
                **self._options,
            )
        return total

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
                kernels.send_columns_kernel,
                (cdiv(given.numel(), CHUNK),),
                (given, *self._shared(self._chunk_epochs[self.rank])),
                (
                    given.numel(),
                    layout.logits(self.rank),
                    layout.flags(self.rank),
                    layout.credits,
                    self.limit,
                ),
                RANK=self.rank,
                BLOCK=CHUNK,
                LOOKS=kernels.LOOK,
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
                kernels.take_columns_kernel,
                (cdiv(count, CHUNK),),
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
                BLOCK=CHUNK,
                LOOKS=kernels.LOOK,
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
            kernels.broadcast_kernel,
            (cdiv(len(sent), TOKEN_BLOCK),),
            (sent, *self._shared(self._token_epochs)),
            (len(sent), self._layout.tokens, self.limit),
            RANK=self.rank,
            SIZE=self.size,
            SLOTS=self._layout.token_slots,
            BLOCK=TOKEN_BLOCK,
            LOOKS=kernels.LOOK,
            num_warps=4,
            **self._options,
        )
        return sent

    def _shared(self, epochs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._regions, epochs, self._faults, self._host_fault


def _as_words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)
