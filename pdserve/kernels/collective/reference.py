"""Collective and Exchange over a process group of torch.distributed, which is gloo's on CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import BroadcastOptions
from torch.nn import functional

from pdserve.kernels.collective.ops import Product, ProductInto, R, Stream, slice_of


class _GroupRank:
    """A rank of a process group. It holds what does not depend on why the ranks were joined."""

    def __init__(self, group: ProcessGroup) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._group = group

    def call_off(self) -> None:
        """Does nothing: the group's collectives fail by themselves."""

    def check(self) -> None:
        """Does nothing: a collective that failed has raised an error."""

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


class GroupCollective(_GroupRank):
    """Implements `Collective`. It waits for every result."""

    def add(self, stream: Tensor, partial: Tensor) -> Stream:
        return stream + self.sum(partial)

    def begin(self) -> None:
        """Does nothing."""

    def add_product(
        self, stream: Tensor, x: R, product: Product[R], into: ProductInto[R] | None = None
    ) -> Stream:
        return self.add(stream, product(x))

    def sum(self, partial: Tensor) -> Tensor:
        return _sum_in_order(self._gathered(partial))


class GroupExchange(_GroupRank):
    """Implements `Exchange`. The group joins all ranks of the stage in their order. It waits for
    every result."""

    def __init__(self, group: ProcessGroup, num_homes: int) -> None:
        super().__init__(group)
        self.num_homes = num_homes
        self._home_size = self.size // num_homes
        self.home = self.rank // self._home_size

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        own = functional.pad(rows, (0, 0, 0, max(counts) - len(rows)))
        first_of_each_home = self._gathered(own)[:: self._home_size]
        return torch.cat([part[:n] for part, n in zip(first_of_each_home, counts, strict=True)])

    def add_rows(self, stream: Tensor, partial: Tensor, counts: Sequence[int]) -> Stream:
        first = sum(counts[: self.home])
        own = slice(first, first + counts[self.home])
        return stream + _sum_in_order([part[own] for part in self._gathered(partial)])


def _sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Returns the sum in float32, rounded to the dtype of the parts."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)
