"""Weights in 4 bits, with a scale and a zero point for each row and group of columns (Frantar et
al. 2022, GPTQ; Lin et al. 2023, AWQ). Activations keep their 16 bits.

On CPU the twin is the dequantised matrix; on a GPU `linear/int4` multiplies packed words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.linear import reference
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.ops import LinearOps
from pdserve.kernels.linear.schemes.scheme import Cut, Pieces, check_columns, dequantised, size_of

LARGEST = 15
PER_WORD = 8
BLOCK = 128  # columns that are packed together, in 16 words
LANES = BLOCK // PER_WORD
SPREAD = 32  # each stored zero point serves so many columns
SMALLEST = torch.finfo(torch.float32).tiny * LARGEST


@dataclass(frozen=True)
class Int4:
    """A scheme of 4-bit numbers in which w = (number - zero) * scale.

    columns: number of columns that share a scale; 0: all of a row.
    data: int32 `[out, 16 * ceil(in / 128)]`. In each block of 128 columns, number j of word c (4
        bits, from the lowest) is column 16 j + c. So 16 neighbours have the same place in 16
        neighbouring words.
    scales: float32 `[out, in / columns]`.
    zeros: int32 `[out, ceil(in / 128)]`. Each byte, from the lowest, is the zero point of 32
        columns.
    Scales and zeros of neighbouring rows are contiguous, because a GPU loads a tile's rows at once.
    """

    columns: int
    name = "int4"

    def __str__(self) -> str:
        return f"int4 in groups of {self.columns}" if self.columns else "int4 with a scale per row"

    def allocate(self, cuts: Sequence[Cut], dtype: torch.dtype, device: torch.device) -> Matrix:
        rows, columns = size_of(cuts)
        for cut in cuts if self.columns else ():
            check_columns(cut, self.columns)
        groups = columns // self.columns if self.columns else 1
        data = torch.empty(rows, LANES * -(-columns // BLOCK), dtype=torch.int32, device=device)
        return Matrix(
            data,
            scales=torch.empty(groups, rows, device=device).mT,
            zeros=torch.empty(-(-columns // BLOCK), rows, dtype=torch.int32, device=device).mT,
            kind=self.name,
            group=(1, self.columns),
            num_columns=columns,
        )

    def take(self, whole: Matrix, first: int, pieces: Pieces) -> None:
        if pieces.scales is None:
            pieces = self.quantise(pieces.codes.to(whole.data.device))
        assert whole.scales is not None and pieces.scales is not None
        assert whole.zeros is not None and pieces.zeros is not None
        assert pieces.group == whole.group, "pieces and matrix have different groups"
        rows = slice(first, first + len(pieces.codes))
        whole.data[rows].copy_(packed(pieces.codes.to(whole.data.device)))
        whole.scales[rows].copy_(pieces.scales)
        zeros = packed_zeros(pieces.zeros.to(whole.data.device), self.columns, whole.shape[1])
        whole.zeros[rows].copy_(zeros)

    def quantise(self, dense: Tensor) -> Pieces:
        """Quantises by the smallest and the largest number of each group and 0."""
        groups = dense.float().unflatten(1, (-1, self.columns or dense.shape[1]))
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        span = (high - low).clamp(min=SMALLEST)
        # Divided by a tensor, because a GPU would multiply by the inverse of a number.
        scales = span / span.new_full((), LARGEST)
        zeros = (-low / scales).round()
        codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, LARGEST)
        return Pieces(codes.flatten(1).to(torch.uint8), scales, zeros, (1, self.columns))

    def twin(self, m: Matrix, dtype: torch.dtype) -> Matrix:
        assert m.scales is not None, "the matrix is a twin already"
        dense = numbers_times(m, m.scales).to(dtype)
        return replace(m, data=dense, scales=None, zeros=None, num_columns=None)

    def ops(self, device: torch.device) -> LinearOps:
        if device.type == "cpu":
            return reference
        from pdserve.kernels.linear.int4 import triton_ops

        return triton_ops


def numbers_times(m: Matrix, scales: Tensor) -> Tensor:
    """Returns the numbers less their zero points, times `scales`, which are laid out like m's:
    float32 `[..., out, in]`."""
    assert m.zeros is not None
    codes = unpacked(m.data, m.shape[1])
    shifts = 8 * torch.arange(BLOCK // SPREAD, dtype=torch.int32, device=m.zeros.device)
    spread = (m.zeros[..., None] >> shifts & 0xFF).flatten(-2)
    zeros = spread[..., :: max(m.group[1] // SPREAD, 1)][..., : scales.shape[-1]]
    return dequantised(codes, scales, zeros, m.group)


def packed_zeros(zeros: Tensor, group_columns: int, num_columns: int) -> Tensor:
    """Packs zero points 0 to 16 `[rows, groups]` into int32 `[rows, ceil(num_columns / 128)]`; see
    Int4."""
    count = BLOCK // SPREAD * -(-num_columns // BLOCK)
    each = group_columns // SPREAD if group_columns else count
    spread = zeros.to(torch.uint8).repeat_interleave(each, 1)
    return functional.pad(spread, (0, count - spread.shape[1])).contiguous().view(torch.int32)


def packed(codes: Tensor) -> Tensor:
    """Packs numbers 0 to 15 `[rows, columns]` into int32 `[rows, 16 * ceil(columns / 128)]`; see
    Int4."""
    padded = functional.pad(codes.long(), (0, -codes.shape[1] % BLOCK))
    places = padded.unflatten(1, (-1, PER_WORD, LANES))
    shifts = 4 * torch.arange(PER_WORD, device=codes.device)[:, None]
    words = (places << shifts).sum(2).flatten(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpacked(data: Tensor, columns: int) -> Tensor:
    """Returns the numbers that were packed, uint8 `[..., columns]`."""
    lanes = data.unflatten(-1, (-1, 1, LANES))
    shifts = 4 * torch.arange(PER_WORD, dtype=torch.int32, device=data.device)[:, None]
    return (lanes >> shifts & LARGEST).to(torch.uint8).flatten(-3)[..., :columns]
