"""What ranks compute together: reference.py does it over a process group of torch, triton_ops.py
and peer_exchange.py in each other's memory.

A `Collective` joins the ranks of one home, which share its rows by tensor parallelism; an
`Exchange` joins all ranks of a stage, whatever their homes. Every rank calls the same in the same
order. `IDENTITY` and `ALONE` are for a rank that has no other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.kernels.norm.ops import Norm, NormOps

UNIT = 16  # columns: products are faster where rows of their result begin at a multiple

Product = Callable[[Tensor], Tensor]
"""Makes a rank's partial rows of the rows given, each of one row alone."""


class Collective(Protocol):
    """Of `size` ranks, of which this is `rank`."""

    rank: int
    size: int

    def add(self, stream: Tensor, partial: Tensor) -> "Stream":
        """The stream `[T, width]` with sum(partial) added; it may be left to the next norm to
        finish it. The given stream may be overwritten."""
        ...

    def add_product(self, stream: Tensor, x: Tensor, product: Product) -> "Stream":
        """The stream with sum(product(x)) added, as by `add`. Of many rows product may be called
        several times, each time with the next of x: rows are on their way then while others are
        multiplied. The stream must be finished before anything else is summed."""
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


class Exchange(Protocol):
    """Joins the `size` ranks of a stage, of which this is `rank`: those of home h come one after
    another and are followed by those of home h + 1.

    A home is a group of ranks that have the same rows (a data-parallel rank); there are
    `num_homes`, and this rank belongs to `home`. Each home brings rows of its own to a step.
    counts: how many rows each home has in this call, all at least 1; every rank gives the same.
    """

    rank: int
    size: int
    num_homes: int
    home: int

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """`[sum(counts), width]`: the rows of all homes, one home after another. rows:
        `[counts[home], width]`, the same on all ranks of a home. Any dtype and width, which may
        change from call to call."""
        ...

    def add_rows(self, stream: Tensor, partial: Tensor, counts: Sequence[int]) -> "Stream":
        """The stream `[counts[home], width]` with the sum of all ranks' partial rows of this home
        added. partial: `[sum(counts), width]`.

        The sum is made in float32 in the order of the ranks, rounded to partial's dtype, and then
        added, as in `Collective.add`. The given stream may be overwritten."""
        ...

    def gather_columns(self, columns: Tensor, width: int) -> Tensor:
        """See `Collective.gather_columns`; the ranks are those of the stage."""
        ...

    def broadcast(self, numbers: Tensor) -> Tensor:
        """See `Collective.broadcast`; the ranks are those of the stage."""
        ...

    def call_off(self) -> None:
        """See `Collective.call_off`."""
        ...

    def check(self) -> None:
        """See `Collective.check`."""
        ...


class Pending(Protocol):
    """A sum over ranks that was left to the next norm; done once, by one of these."""

    def sum(self) -> Tensor:
        """The sum for the rows of the stream."""
        ...

    def add_norm(self, stream: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """The norm of the stream with the sum added, and this stream."""
        ...


@dataclass(frozen=True, slots=True)
class Unsummed:
    """A residual stream that lacks a sum over ranks."""

    stream: Tensor
    pending: Pending


Stream = Tensor | Unsummed
"""The residual stream `[T, hidden]`."""


def normed(stream: Stream, norm: Norm, norms: NormOps) -> tuple[Tensor, Tensor]:
    """The norm of a stream, and the stream, finished."""
    if isinstance(stream, Unsummed):
        return stream.pending.add_norm(stream.stream, norm)
    return norms.rms_norm(stream, norm), stream


def finished(stream: Stream) -> Tensor:
    """The stream with nothing left to be done."""
    if isinstance(stream, Unsummed):
        return stream.stream + stream.pending.sum()
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

    def add_product(self, stream: Tensor, x: Tensor, product: Product) -> Stream:
        return stream + product(x)

    def call_off(self) -> None: ...

    def check(self) -> None: ...

    def sum(self, partial: Tensor) -> Tensor:
        return partial

    def gather_columns(self, columns: Tensor, width: int) -> Tensor:
        return columns

    def broadcast(self, numbers: Tensor) -> Tensor:
        return numbers


IDENTITY: Collective = _Identity()


class HomeAlone:
    """The `Exchange` of a stage with one home: there is nobody to exchange rows with, and what is
    left is the collective's."""

    num_homes = 1
    home = 0

    def __init__(self, collective: Collective) -> None:
        self.rank = collective.rank
        self.size = collective.size
        self._collective = collective

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        return rows

    def add_rows(self, stream: Tensor, partial: Tensor, counts: Sequence[int]) -> Stream:
        return self._collective.add(stream, partial)

    def gather_columns(self, columns: Tensor, width: int) -> Tensor:
        return self._collective.gather_columns(columns, width)

    def broadcast(self, numbers: Tensor) -> Tensor:
        return self._collective.broadcast(numbers)

    def call_off(self) -> None:
        self._collective.call_off()

    def check(self) -> None:
        self._collective.check()


ALONE: Exchange = HomeAlone(IDENTITY)
