"""A pipe that moves rows from one rank's device to another's memory, piece by piece. The stages of
a pipeline use it if they share a node.

The kernels are those that bring logits to rank 0 (peer_moves.py), here between two ranks: the rank
that takes rows has the part of rank 0. Each piece has a flag, and gets a credit once it was read,
so a sender is at most one call ahead. Calls are counted on the device, so a CUDA graph may replay
them. Nothing here waits for the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.collective import peer_moves
from pdserve.kernels.collective.faults import Faults
from pdserve.kernels.collective.peer_rank import LIMIT
from pdserve.kernels.collective.peer_waits import flag_options
from pdserve.kernels.collective.region import WORD, aligned
from pdserve.kernels.launching.dependent_launch import launch_options
from pdserve.kernels.launching.launch import cdiv, launch

TAKES, SENDS = 0, 1  # the two ranks of a pipe


@dataclass(frozen=True)
class PipeLayout:
    """Offsets in words of 8 bytes, in each rank's region, for rows of at most `[step_rows, width]`.

    chunk: number of numbers that share one flag.
    """

    width: int
    dtype: torch.dtype
    step_rows: int
    chunk: int = 4096

    @property
    def chunks(self) -> int:
        return cdiv(self.step_rows * self.width, self.chunk)

    @property
    def credits(self) -> int:
        """Offset of the credits, which say what the next rank has read. They come first."""
        return 0

    @property
    def flags(self) -> int:
        return aligned(self.chunks)

    @property
    def rows(self) -> int:
        return 2 * aligned(self.chunks)

    @property
    def num_bytes(self) -> int:
        return self.rows * WORD + self.chunks * self.chunk * self.dtype.itemsize


class PeerPipe:
    """Implements `parallel.pipe.Pipe`.

    own, next_one, previous: int64 `[]` on the device, the addresses of the zeroed regions of this
        rank and of its neighbours, `layout.num_bytes` each. None for a neighbour that does not
        exist.
    memory: the owner of the regions, kept alive.
    """

    landing: Tensor | None = None

    def __init__(
        self,
        layout: PipeLayout,
        own: Tensor,
        next_one: Tensor | None,
        previous: Tensor | None,
        faults: Faults,
        memory: object = None,
    ) -> None:
        self.limit = LIMIT
        self._layout = layout
        self._faults = faults
        self._memory = memory
        self._device = own.device
        self._options = launch_options(own.device)
        self._flags = flag_options(own.device)
        self._sending = torch.stack([next_one, own]) if next_one is not None else None
        self._taking = torch.stack([own, previous]) if previous is not None else None
        self._sent, self._taken = (
            torch.zeros(layout.chunks, dtype=torch.int32, device=own.device) for _ in range(2)
        )

    def send(self, rows: Tensor) -> None:
        assert self._sending is not None, "rows are sent to the next stage, but there is none"
        layout = self._layout
        self._check(len(rows), rows.shape[1], rows.dtype)
        launch(
            peer_moves.send_columns_kernel,
            (cdiv(rows.numel(), layout.chunk),),
            (rows.contiguous(), self._sending, self._sent, *self._shared),
            (rows.numel(), layout.rows, layout.flags, layout.credits, self.limit),
            RANK=SENDS,
            BLOCK=layout.chunk,
            num_warps=8,
            **self._flags,
            **self._options,
        )

    def recv(self, num_rows: int) -> Tensor:
        assert self._taking is not None, "rows are taken from the previous stage, but there is none"
        layout = self._layout
        self._check(num_rows, layout.width, layout.dtype)
        rows = torch.empty(num_rows, layout.width, dtype=layout.dtype, device=self._device)
        count = rows.numel()
        launch(
            peer_moves.take_columns_kernel,
            (cdiv(count, layout.chunk),),
            (rows, self._taking, self._taken, *self._shared),
            (
                count,
                count,
                0,
                count,
                layout.rows,
                layout.flags,
                layout.credits,
                self.limit,
            ),
            SOURCE=SENDS,
            WHOLE=True,
            BLOCK=layout.chunk,
            num_warps=8,
            **self._flags,
            **self._options,
        )
        return rows

    def flush(self) -> None:
        """Does nothing: the device sends without any help."""

    def call_off(self) -> None:
        self._faults.call_off()

    def check(self) -> None:
        self._faults.check()

    @property
    def _shared(self) -> tuple[Tensor, Tensor]:
        return self._faults.device, self._faults.host

    def _check(self, num_rows: int, width: int, dtype: torch.dtype) -> None:
        layout = self._layout
        if num_rows > layout.step_rows or (width, dtype) != (layout.width, layout.dtype):
            raise ValueError(
                f"rows for another stage must be {layout.dtype}, {layout.width} wide and at most "
                f"{layout.step_rows}, not {dtype} [{num_rows}, {width}]"
            )
