"""A scheme says how the device holds weight matrices. The files beside this one implement it.

A matrix is filled part by part. `models.weights` reads what a rank holds of one checkpoint module,
a `Source` makes Pieces of it, and the scheme puts these into tensors that it allocated before. So
a rank never has more than one part twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.ops import LinearOps


@dataclass(frozen=True)
class Cut:
    """The rows and columns that a rank holds of the matrix of one checkpoint module.

    of_rows, of_columns: the size of the whole matrix.
    Sizes count numbers of the matrix, however they are packed.
    """

    rows: slice
    of_rows: int
    columns: slice
    of_columns: int

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def num_columns(self) -> int:
        return self.columns.stop - self.columns.start


@dataclass(frozen=True)
class Pieces:
    """The numbers of a cut on their way from a checkpoint to a scheme's tensors.

    codes: `[rows, columns]` of the cut; without scales they are the numbers themselves.
    scales, zeros: float `[groups of rows, groups of columns]`, for the groups that the cut touches.
    group: rows and columns of a group; 0 columns: all.
    offset: rows of the first group that are before the cut.
    """

    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    group: tuple[int, int] = (1, 0)
    offset: int = 0

    def dense(self) -> Tensor:
        """Returns the numbers; they are float32 if they have scales."""
        if self.scales is None:
            return self.codes
        return dequantised(self.codes, self.scales, self.zeros, self.group, self.offset)

    def reordered(self, ordered: Callable[[Tensor], Tensor]) -> "Pieces":
        """Returns the same pieces with rows in another order. Raises ValueError if that order would
        separate rows that share a scale."""
        places = ordered(torch.arange(len(self.codes)))
        if torch.equal(places, torch.arange(len(self.codes))):
            return self
        group = self.group[0]
        if group > 1 and not torch.equal(
            (places + self.offset) // group, (torch.arange(len(places)) + self.offset) // group
        ):
            raise ValueError(
                f"its scales cover {group} rows each, and the rotation needs rows in an order that "
                "mixes them: use the model's 16-bit weights"
            )
        values = [self.scales, self.zeros]
        if group == 1:
            values = [None if each is None else ordered(each) for each in values]
        return replace(self, codes=ordered(self.codes), scales=values[0], zeros=values[1])


class Scheme(Protocol):
    """A way to hold matrices. It is a value: equal schemes hold matrices alike.

    name: also the `kind` of its matrices.
    """

    name: str

    def allocate(self, cuts: Sequence[Cut], dtype: torch.dtype, device: torch.device) -> Matrix:
        """Makes an unfilled matrix without bias, for cuts that are put below each other. It will be
        multiplied with activations of this dtype. Raises ValueError for cuts that the scheme cannot
        hold."""
        ...

    def take(self, whole: Matrix, first: int, pieces: Pieces) -> None:
        """Fills the rows of one cut, which begin at row `first`, with pieces on any device. Pieces
        without scales are quantised."""
        ...

    def quantise(self, dense: Tensor) -> Pieces:
        """Returns pieces of this scheme that are near these numbers, float `[rows, columns]`."""
        ...

    def twin(self, m: Matrix, dtype: torch.dtype) -> Matrix:
        """Returns the matrix, or a stack, in the form that `ops` of the CPU take for activations of
        this dtype."""
        ...

    def ops(self, device: torch.device) -> LinearOps:
        """Returns products with such matrices. Raises ValueError if this device has none."""
        ...


def size_of(cuts: Sequence[Cut]) -> tuple[int, int]:
    """Rows and columns that cuts take when they are put below each other."""
    columns = cuts[0].num_columns
    assert all(cut.num_columns == columns for cut in cuts), "parts have different widths"
    return sum(cut.num_rows for cut in cuts), columns


def check_columns(cut: Cut, group: int) -> None:
    """Raises ValueError if a rank's columns are not whole groups. The last group may end early."""
    ends = cut.columns.stop == cut.of_columns or cut.columns.stop % group == 0
    if cut.columns.start % group or not ends:
        raise ValueError(
            f"a rank would have columns {cut.columns.start} to {cut.columns.stop} of "
            f"{cut.of_columns}, but each scale covers {group} columns: choose an "
            f"engine.tensor_parallel that gives each rank a multiple of {group}"
        )


def put_rows(whole: Matrix, first: int, pieces: Pieces) -> None:
    """Does `Scheme.take` for a matrix in which every row has scales of its own."""
    assert whole.scales is not None and whole.group[0] == 1 and pieces.scales is not None
    assert whole.group[1] == pieces.group[1], "pieces and matrix have different groups"
    rows = len(pieces.codes)
    whole.data[first : first + rows].copy_(pieces.codes)
    scales = of_rows(pieces.scales, pieces.group[0], pieces.offset, rows)
    whole.scales[first : first + rows].copy_(scales)


def dequantised(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    group: tuple[int, int] = (1, 0),
    offset: int = 0,
) -> Tensor:
    """Returns `(code - zero) * scale`, rounded once: float32 `[..., rows, columns]`. See Pieces."""
    rows, columns = codes.shape[-2:]

    def spread(values: Tensor) -> Tensor:
        values = of_rows(values.float(), group[0], offset, rows)
        if group[1]:
            values = values.repeat_interleave(group[1], -1)[..., :columns]
        return values

    numbers = codes.float()
    if zeros is not None:
        numbers = numbers - spread(zeros)
    return numbers * spread(scales)


def of_rows(values: Tensor, group_rows: int, offset: int, rows: int) -> Tensor:
    """Repeats the values of groups of rows for each row: `[..., rows, groups of columns]`. The
    first row is row `offset` of its group."""
    if group_rows > 1:
        values = values.repeat_interleave(group_rows, -2)
    return values.narrow(-2, offset, rows)
