"""Weights in 4 bits as in int4.py, multiplied by activations in e4m3 where there are many rows.

For such a product, the matrix is written again in e4m3, with a scale for each row of it. That scale
is a sixteenth of the row's largest. So the numbers of the group with this scale, which are whole
and at most 16, keep their value in e4m3, as do all numbers of a row that has one scale. Numbers of
other groups are rounded. Activations are rounded as for fp8 weights, by row.

On a GPU `linear/int4/rounded_ops.py` says what many rows are. Fewer have the products of int4.py,
which are more exact. On CPU all rows are multiplied like many, so no result depends on the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pdserve.kernels.e4m3 import check_device, to_codes
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.ops import Composed, LinearOps
from pdserve.kernels.linear.schemes.fp8 import product
from pdserve.kernels.linear.schemes.int4 import Int4, numbers_times
from pdserve.kernels.linear.schemes.scheme import Cut, Pieces
from pdserve.kernels.norm import reference as norms

LARGEST_NUMBER = 16  # a number less its zero point
SMALLEST = torch.finfo(torch.float32).tiny * LARGEST_NUMBER


@dataclass(frozen=True)
class Int4Fp8(Int4):
    """A scheme that holds what Int4 does, and a scale for each row.

    row_scales: float32 `[out, 1]`. The matrix in e4m3 has the codes of (number - zero) * (scale /
        row scale). If ranks share the columns, a row's scale is that of the rank's own columns.
    """

    name = "int4_fp8"

    def __str__(self) -> str:
        return f"{super().__str__()} with activations in fp8"

    def allocate(self, cuts: Sequence[Cut], dtype: torch.dtype, device: torch.device) -> Matrix:
        m = super().allocate(cuts, dtype, device)
        return replace(m, row_scales=torch.empty(m.shape[0], 1, device=device))

    def take(self, whole: Matrix, first: int, pieces: Pieces) -> None:
        super().take(whole, first, pieces)
        assert whole.scales is not None and whole.row_scales is not None
        rows = slice(first, first + len(pieces.codes))
        largest = whole.scales[rows].amax(1, keepdim=True).clamp(min=SMALLEST)
        whole.row_scales[rows] = largest / LARGEST_NUMBER

    def twin(self, m: Matrix, dtype: torch.dtype) -> Matrix:
        assert m.scales is not None and m.row_scales is not None, "the matrix is a twin already"
        codes = to_codes(numbers_times(m, m.scales / m.row_scales))
        return replace(
            m,
            data=(codes.float() * m.row_scales).to(dtype),
            scales=None,
            zeros=None,
            row_scales=None,
            num_columns=None,
            group=(1, 0),  # of activations, whose rows have one scale
        )

    def ops(self, device: torch.device) -> LinearOps:
        if device.type == "cpu":
            return Composed(product, norms)
        check_device(
            device,
            "activations in fp8 (model.activation_dtype) need",
            "set model.activation_dtype to 16-bit",
        )
        from pdserve.kernels.linear.int4 import rounded_ops

        return rounded_ops
