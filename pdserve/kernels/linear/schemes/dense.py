"""Dense weights: the device holds the matrix itself, in the dtype of the activations."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.linear import reference
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.ops import LinearOps
from pdserve.kernels.linear.schemes.scheme import Cut, Pieces, size_of


@dataclass(frozen=True)
class Dense:
    """A scheme that takes the pieces of every source."""

    name = "dense"

    def __str__(self) -> str:
        return "16 bits"

    def allocate(self, cuts: Sequence[Cut], dtype: torch.dtype, device: torch.device) -> Matrix:
        return Matrix(torch.empty(size_of(cuts), dtype=dtype, device=device))

    def take(self, whole: Matrix, first: int, pieces: Pieces) -> None:
        whole.data[first : first + len(pieces.codes)].copy_(pieces.dense())

    def quantise(self, dense: Tensor) -> Pieces:
        return Pieces(dense)

    def twin(self, m: Matrix, dtype: torch.dtype) -> Matrix:
        return m

    def ops(self, device: torch.device) -> LinearOps:
        if device.type == "cpu":
            return reference
        from pdserve.kernels.linear import triton_ops

        return triton_ops
