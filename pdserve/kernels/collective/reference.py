"""Collective over a process group of torch.distributed: gloo's on CPU."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import BroadcastOptions
from torch.nn import functional

from pdserve.kernels.collective.ops import Stream, slice_of


class GroupCollective:
    """See `Collective`. Waits for every result."""

    def __init__(self, group: ProcessGroup) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._group = group

    def add(self, stream: Tensor, partial: Tensor) -> Stream:
        return stream + self.sum(partial)

    def call_off(self) -> None:
        """Its collectives fail by themselves."""

    def check(self) -> None:
        """A collective that fails has raised."""

    def sum(self, partial: Tensor) -> Tensor:
        first, *others = self._gathered(partial)
        total = first.float()
        for part in others:
            total = total + part.float()
        return total.to(partial.dtype)

    def gather_columns(self, columns: Tensor, width: int) -> Tensor:
        parts = [slice_of(width, rank, self.size) for rank in range(self.size)]
        widths = [part.stop - part.start for part in parts]
        gathered = self._gathered(functional.pad(columns, (0, max(widths) - columns.shape[1])))
        if self.rank:
            return columns
        return torch.cat([part[:, :n] for part, n in zip(gathered, widths, strict=True)], 1)

    def broadcast(self, numbers: Tensor) -> Tensor:
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        sent = numbers.contiguous()
        self._group.broadcast([sent], options).wait()
        return sent

    def _gathered(self, part: Tensor) -> list[Tensor]:
        given = part.contiguous()
        parts = [torch.empty_like(given) for _ in range(self.size)]
        self._group.allgather([parts], [given]).wait()
        return parts
