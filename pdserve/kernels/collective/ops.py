"""What ranks compute together: reference.py does it over a process group of torch.

Every rank calls the same in the same order. `ALONE` is for a rank that has no other.
"""

from typing import Protocol

from torch import Tensor

UNIT = 16  # columns: products are faster where rows of their result begin at a multiple


class Collective(Protocol):
    """Of `size` ranks, of which this is `rank`."""

    rank: int
    size: int

    def sum(self, partial: Tensor) -> Tensor:
        """Of all ranks' partial `[T, width]`: added in float32 in the order of the ranks, whatever
        T and however it is done, and rounded to partial's dtype."""
        ...

    def gather_columns(self, columns: Tensor, width: int) -> Tensor:
        """`[N, width]` from the ranks' columns, side by side in their order, on rank 0; on others
        their own columns. As `slice_of` says, each rank has its part of width."""
        ...

    def broadcast(self, numbers: Tensor) -> Tensor:
        """Rank 0's numbers; on others those given say shape and dtype, and may be overwritten."""
        ...


def slice_of(width: int, rank: int, size: int) -> slice:
    """The part of `width` that a rank has: as equal as can be, larger ones first; whole multiples
    of UNIT but for the last one, where there are enough."""
    unit = UNIT if width >= size * UNIT else 1
    each, more = divmod(-(-width // unit), size)
    first = (rank * each + min(rank, more)) * unit
    return slice(first, min(first + (each + (rank < more)) * unit, width))


class _Alone:
    rank = 0
    size = 1

    def sum(self, partial: Tensor) -> Tensor:
        return partial

    def gather_columns(self, columns: Tensor, width: int) -> Tensor:
        return columns

    def broadcast(self, numbers: Tensor) -> Tensor:
        return numbers


ALONE: Collective = _Alone()
