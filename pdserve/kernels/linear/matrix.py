"""A weight matrix as products take it, however it is stored: one value that is passed to the ops as
a whole.

This file knows no product and no file. A scheme (`schemes/scheme.py`) allocates the tensors of a
matrix, and fills them while a checkpoint is read.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """The part of a matrix that a rank has: part `index` of `count` equal ones along an axis.

    axis: "out" (rows), "in" (columns), or None for the whole matrix.
    """

    axis: Literal["out", "in"] | None = None
    index: int = 0
    count: int = 1


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix, or a stack of equal ones, whose tensors have one more dim in front.

    data: `[out, in]`; in the dtype of activations for kind "dense", codes for other kinds.
    bias: `[out]`; for a stack `[count, out]`.
    scales, zeros: one for each group of codes, `[out / group rows, in / group columns]`, rounded
        up.
    row_scales: float32 `[out, 1]`, only of kind "int4_fp8": the scales by which its numbers become
        e4m3.
    shard: the part of the whole matrix that this is.
    kind: name of the scheme, which says which products read the matrix.
    group: rows and columns of a scale; 0 columns: all of a row.
    num_columns: number of columns of a matrix whose codes are packed in data.
    """

    data: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    zeros: Tensor | None = None
    row_scales: Tensor | None = None
    shard: Shard = WHOLE
    kind: str = "dense"
    group: tuple[int, int] = (1, 0)
    num_columns: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and columns that the matrix has; for a stack, those of each matrix."""
        rows, columns = self.data.shape[-2:]
        return rows, columns if self.num_columns is None else self.num_columns

    def stacked(self, count: int) -> "Matrix":
        """Returns a stack of `count` matrices of equal heights, which this one has one below the
        other."""

        def apart(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.unflatten(0, (count, -1))

        data = self.data.unflatten(0, (count, -1))
        return replace(
            self,
            data=data,
            bias=apart(self.bias),
            scales=apart(self.scales),
            zeros=apart(self.zeros),
            row_scales=apart(self.row_scales),
        )

    def expert(self, number: int) -> "Matrix":
        """Returns one matrix of a stack, without a copy."""

        def of_it(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[number]

        return replace(
            self,
            data=self.data[number],
            bias=of_it(self.bias),
            scales=of_it(self.scales),
            zeros=of_it(self.zeros),
            row_scales=of_it(self.row_scales),
        )
