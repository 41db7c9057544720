"""Weights in 8-bit floating point numbers (e4m3, Micikevicius et al. 2022), and activations rounded
to them. Fp8 has a scale for each row, Fp8Block one for each block of 128 x 128.

Activations are scaled by row, or by row and 128 columns. They are never scaled by tensor, nor by
what calibration found, so a row does not depend on its neighbours. On CPU the twin is the
dequantised matrix, which is multiplied by rounded activations. On a GPU `linear/fp8` multiplies
codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.e4m3 import E4M3, LARGEST, check_device, to_codes
from pdserve.kernels.linear import reference
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.ops import Composed, LinearOps
from pdserve.kernels.linear.schemes.scheme import (
    Cut,
    Pieces,
    check_columns,
    dequantised,
    put_rows,
    size_of,
)
from pdserve.kernels.norm import reference as norms

SMALLEST = torch.finfo(torch.float32).tiny * LARGEST  # smaller maxima would have no normal scale
BLOCK = 128


@dataclass(frozen=True)
class Fp8:
    """A scheme with one scale per row, by which the row's largest number becomes 448.

    data: e4m3 `[out, in]`.
    scales: float32 `[out, 1]`.
    If ranks share the columns, a row's scale is that of the rank's own columns.
    """

    name = "fp8"

    def __str__(self) -> str:
        return "fp8 with a scale per row"

    def allocate(self, cuts: Sequence[Cut], dtype: torch.dtype, device: torch.device) -> Matrix:
        rows, columns = size_of(cuts)
        data = torch.empty(rows, columns, dtype=E4M3, device=device)
        return Matrix(data, scales=torch.empty(rows, 1, device=device), kind=self.name)

    def take(self, whole: Matrix, first: int, pieces: Pieces) -> None:
        if pieces.scales is None:
            pieces = self.quantise(pieces.codes.to(whole.data.device))
        put_rows(whole, first, pieces)

    def quantise(self, dense: Tensor) -> Pieces:
        return Pieces(*to_e4m3(dense, (1, 0)))

    def twin(self, m: Matrix, dtype: torch.dtype) -> Matrix:
        return _twin(m, dtype)

    def ops(self, device: torch.device) -> LinearOps:
        return _ops(device)


@dataclass(frozen=True)
class Fp8Block:
    """A scheme with one scale per block.

    data: e4m3 `[out, in]`.
    scales: float32 `[out / 128, in / 128]`, rounded up.
    If a cut does not begin and end with whole blocks, two modules would meet in one block. Then
    scales are repeated for each row: `[out, in / 128]`.
    """

    name = "fp8_block"

    def __str__(self) -> str:
        return f"fp8 in blocks of {BLOCK} x {BLOCK}"

    def allocate(self, cuts: Sequence[Cut], dtype: torch.dtype, device: torch.device) -> Matrix:
        rows, columns = size_of(cuts)
        for cut in cuts:
            check_columns(cut, BLOCK)
        is_whole = all(cut.rows.start % BLOCK == 0 for cut in cuts) and all(
            cut.num_rows % BLOCK == 0 for cut in cuts[:-1]
        )
        group_rows = BLOCK if is_whole else 1
        scales = torch.empty(-(-rows // group_rows), -(-columns // BLOCK), device=device)
        data = torch.empty(rows, columns, dtype=E4M3, device=device)
        return Matrix(data, scales=scales, kind=self.name, group=(group_rows, BLOCK))

    def take(self, whole: Matrix, first: int, pieces: Pieces) -> None:
        if pieces.scales is None:
            pieces = self.quantise(pieces.codes.to(whole.data.device))
        if whole.group[0] == 1:
            return put_rows(whole, first, pieces)
        assert whole.scales is not None and pieces.scales is not None
        assert pieces.group == (BLOCK, BLOCK) and not pieces.offset and not first % BLOCK
        whole.data[first : first + len(pieces.codes)].copy_(pieces.codes)
        block = first // BLOCK
        whole.scales[block : block + len(pieces.scales)].copy_(pieces.scales)

    def quantise(self, dense: Tensor) -> Pieces:
        return Pieces(*to_e4m3(dense, (BLOCK, BLOCK)), group=(BLOCK, BLOCK))

    def twin(self, m: Matrix, dtype: torch.dtype) -> Matrix:
        return _twin(m, dtype)

    def ops(self, device: torch.device) -> LinearOps:
        return _ops(device)


def online() -> Fp8:
    """Makes the scheme of model.quantization: fp8."""
    return Fp8()


def to_e4m3(x: Tensor, group: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns codes e4m3 of x `[rows, columns]`, and float32 scales `[groups of rows, groups of
    columns]`. The scales map each group's largest number to 448.

    group: rows and columns of a group; 0 columns: all.
    """
    rows, columns = x.shape
    down, across = group[0], group[1] or columns
    padded = functional.pad(x.float(), (0, -columns % across, 0, -rows % down))
    num_down, num_across = len(padded) // down, padded.shape[1] // across
    blocks = padded.view(num_down, down, num_across, across)
    largest = blocks.abs().amax((1, 3)).clamp(min=SMALLEST)
    # Divided by a tensor, because a GPU would multiply by the inverse of a number.
    scales = largest / largest.new_full((), LARGEST)
    scaled = blocks / scales[:, None, :, None]
    codes = to_codes(scaled).view(padded.shape)
    return codes[:rows, :columns], scales


def rounded(x: Tensor, group_columns: int) -> Tensor:
    """Rounds activations x `[T, in]` to e4m3 and returns them in their own dtype. They are scaled
    by row, or by row and group_columns columns."""
    codes, scales = to_e4m3(x, (1, group_columns))
    return dequantised(codes, scales, group=(1, group_columns)).to(x.dtype)


def product(x: Tensor, m: Matrix) -> Tensor:
    """Computes `LinearOps.linear` of a twin. It is as batch-invariant as products of dense
    matrices."""
    return reference.linear(rounded(x, m.group[1]), m)


def _twin(m: Matrix, dtype: torch.dtype) -> Matrix:
    assert m.scales is not None, "the matrix is a twin already"
    return replace(m, data=dequantised(m.data, m.scales, group=m.group).to(dtype), scales=None)


def _ops(device: torch.device) -> LinearOps:
    if device.type == "cpu":
        return Composed(product, norms)
    check_device(device)
    from pdserve.kernels.linear.fp8 import triton_ops

    return triton_ops
