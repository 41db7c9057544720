"""What ranks compute together: reference.py does it over a process group of torch, triton_ops.py in
each other's memory.

Every rank calls the same in the same order. `IDENTITY` is for a rank that has no other.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.kernels.norm.ops import Norm, NormOps

UNIT = 16  # columns: products are faster where rows of their result begin at a multiple


class Collective(Protocol):
    """Of `size` ranks, of which this is `rank`."""

    rank: int
    size: int

    def add(self, stream: Tensor, partial: Tensor) -> "Stream":
        """The stream `[T, width]` with sum(partial) added; it may be left to the next norm to
        finish it. The given stream may be overwritten."""
        ...

    def call_off(self) -> None:
        """Another rank is gone: what waits for it on the device ends. From any thread."""
        ...

    def check(self) -> None:
        """RuntimeError when what was computed last is not valid: a rank did not answer. To be asked
        when the device has done it, before anything of it is used."""
        ...

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


class FusedCollective(Collective, Protocol):
    """One whose `add` may leave the sum to the next norm."""

    def add_norm(self, unsummed: "Unsummed", norm: Norm) -> tuple[Tensor, Tensor]:
        """Finish what `add` left: its norm, and the stream."""
        ...


@dataclass(frozen=True, slots=True)
class Unsummed:
    """A residual stream that lacks the sum of all ranks' partial rows."""

    stream: Tensor
    partial: Tensor
    collective: FusedCollective


Stream = Tensor | Unsummed
"""The residual stream `[T, hidden]`."""


def normed(stream: Stream, norm: Norm, norms: NormOps) -> tuple[Tensor, Tensor]:
    """The norm of a stream, and the stream, finished."""
    if isinstance(stream, Unsummed):
        return stream.collective.add_norm(stream, norm)
    return norms.rms_norm(stream, norm), stream


def finished(stream: Stream) -> Tensor:
    """The stream with nothing left to be done."""
    if isinstance(stream, Unsummed):
        return stream.stream + stream.collective.sum(stream.partial)
    return stream


def slice_of(width: int, rank: int, size: int) -> slice:
    """The part of `width` that a rank has: as equal as can be, larger ones first; whole multiples
    of UNIT but for the last one, where there are enough."""
    unit = UNIT if width >= size * UNIT else 1
    each, more = divmod(-(-width // unit), size)
    first = (rank * each + min(rank, more)) * unit
    return slice(first, min(first + (each + (rank < more)) * unit, width))


class _Identity:
    rank = 0
    size = 1

    def add(self, stream: Tensor, partial: Tensor) -> Stream:
        return stream + partial

    def call_off(self) -> None: ...

    def check(self) -> None: ...

    def sum(self, partial: Tensor) -> Tensor:
        return partial

    def gather_columns(self, columns: Tensor, width: int) -> Tensor:
        return columns

    def broadcast(self, numbers: Tensor) -> Tensor:
        return numbers


IDENTITY: Collective = _Identity()
