"""Dense weights: the matrix itself, in the dtype of the activations."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pdserve.kernels.linear import reference
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.ops import LinearOps
from pdserve.kernels.linear.schemes.scheme import Cut, Pieces, size_of
from pdserve.kernels.linear.schemes.source import Read, Storage


class DenseSource:
    """16-bit, 32-bit or 64-bit numbers: `weight [out, in]`."""

    def reads(self, cut: Cut) -> Mapping[str, Read]:
        return {"weight": Read(((cut.of_rows, cut.of_columns),), (cut.rows, cut.columns))}

    def pieces(self, raw: Mapping[str, Tensor], cut: Cut) -> Pieces:
        return Pieces(raw["weight"])


class Dense:
    """Takes the pieces of every source."""

    name = "dense"

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


DENSE = Storage(DenseSource(), Dense())
