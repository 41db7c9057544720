"""The interfaces of what ranks compute together. reference.py implements them over a process group
of torch; triton_ops.py and peer_exchange.py implement them in each other's memory.

A `Collective` joins the ranks of one home, which share its rows by tensor parallelism. An
`Exchange` joins all ranks of a stage, whatever their homes. Every rank must make the same calls in
the same order. `IDENTITY` and `ALONE` are for a rank that has no other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from torch import Tensor

from pdserve.kernels.norm.ops import Norm, NormOps

UNIT = 16  # columns; products are faster where the rows of their result begin at a multiple of it


class Rows(Protocol):
    """Rows that a product takes: a tensor, or rows that are not finished (linear/ops.py)."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Self: ...


R = TypeVar("R", bound=Rows)
Product = Callable[[R], Tensor]
"""Computes a rank's partial rows from the rows given, each of them from one row alone."""
ProductInto = Callable[[R, Tensor], object]
"""Writes what a Product returns to a tensor with contiguous rows."""


class Collective(Protocol):
    """Joins the `size` ranks of a home; this is `rank`."""

    rank: int
    size: int

    def add(self, stream: Tensor, partial: Tensor) -> "Stream":
        """Returns the stream `[T, width]` with sum(partial) added. The next norm may have to finish
        the sum. The given stream may be overwritten."""
        ...

    def begin(self) -> None:
        """Says that the next calls are those of a new step."""
        ...

    def add_product(
        self, stream: Tensor, x: R, product: Product[R], into: ProductInto[R] | None = None
    ) -> "Stream":
        """Returns the stream with sum(product(x)) added, like `add`.

        For many rows, product may be called several times, each time with the next rows of x, so
        that some rows are sent while others are multiplied. If `into` is given, it may be called
        instead, so that the rows lie where other ranks can read them. The stream must be finished
        before anything else is summed.
        """
        ...

    def call_off(self) -> None:
        """Ends what waits on the device for another rank that is gone. Any thread may call it."""
        ...

    def check(self) -> None:
        """Raises RuntimeError if the last results are not valid because a rank did not answer. Call
        it when the device has computed them, before any of them is used."""
        ...

    def sum(self, partial: Tensor) -> Tensor:
        """Returns the sum of all ranks' partial `[T, width]`. It is added in float32 in the order
        of the ranks, whatever T is and however it is done, and rounded to partial's dtype."""
        ...

    def gather_columns(self, columns: Tensor, width: int) -> Tensor:
        """Puts the ranks' columns side by side in their order, and returns `[N, width]` on rank 0.
        Other ranks return their own columns. `slice_of` says which part of width a rank has."""
        ...

    def broadcast(self, numbers: Tensor) -> Tensor:
        """Returns rank 0's numbers. On other ranks, the given numbers say shape and dtype, and may
        be overwritten."""
        ...


class Exchange(Protocol):
    """Joins the `size` ranks of a stage; this is `rank`. The ranks of home h come one after
    another, and those of home h + 1 follow.

    A home is a group of ranks that have the same rows (a data-parallel rank). There are `num_homes`
    homes, and this rank belongs to `home`. Each home brings rows of its own to a step.
    counts: number of rows of each home in this call, all at least 1. Every rank gives the same.
    """

    rank: int
    size: int
    num_homes: int
    home: int

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Returns `[sum(counts), width]`: the rows of all homes, one home after another.

        rows: `[counts[home], width]`, the same on all ranks of a home. Dtype and width are free and
            may change from call to call.
        """
        ...

    def add_rows(self, stream: Tensor, partial: Tensor, counts: Sequence[int]) -> "Stream":
        """Returns the stream `[counts[home], width]` with the sum of all ranks' partial rows of
        this home added. partial is `[sum(counts), width]`.

        The sum is made in float32 in the order of the ranks, rounded to partial's dtype, and then
        added, as in `Collective.add`. The given stream may be overwritten.
        """
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
    """A sum over ranks that was left to the next norm. One of these methods is called, once."""

    def sum(self) -> Tensor:
        """Returns the sum for the rows of the stream."""
        ...

    def add_norm(self, stream: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Returns the norm of the stream with the sum added, and this stream."""
        ...


@dataclass(frozen=True, slots=True)
class Unsummed:
    """A residual stream that lacks a sum over ranks."""

    stream: Tensor
    pending: Pending


Stream = Tensor | Unsummed
"""The residual stream `[T, hidden]`."""


def normed(stream: Stream, norm: Norm, norms: NormOps) -> tuple[Tensor, Tensor]:
    """Returns the norm of a stream, and the finished stream."""
    if isinstance(stream, Unsummed):
        return stream.pending.add_norm(stream.stream, norm)
    return norms.rms_norm(stream, norm), stream


def finished(stream: Stream) -> Tensor:
    """Returns the stream with its pending sum added, if it has one."""
    if isinstance(stream, Unsummed):
        return stream.stream + stream.pending.sum()
    return stream


def slice_of(width: int, rank: int, size: int) -> slice:
    """Returns the part of `width` that a rank has. Parts are as equal as possible, larger ones
    first. All but the last are whole multiples of UNIT if the width is large enough."""
    unit = UNIT if width >= size * UNIT else 1
    each, more = divmod(-(-width // unit), size)
    first = (rank * each + min(rank, more)) * unit
    return slice(first, min(first + (each + (rank < more)) * unit, width))


class _Identity:
    rank = 0
    size = 1

    def add(self, stream: Tensor, partial: Tensor) -> Stream:
        return stream + partial

    def begin(self) -> None: ...

    def add_product(
        self, stream: Tensor, x: R, product: Product[R], into: ProductInto[R] | None = None
    ) -> Stream:
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
    """The `Exchange` of a stage with one home. It has nobody to exchange rows with, and leaves the
    rest to the collective."""

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
