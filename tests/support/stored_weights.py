"""Weights as a checkpoint has them, and as a rank fills them: for tests of what is read of which
tensor."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pdserve.kernels.linear.matrix import WHOLE, Matrix, Shard
from pdserve.kernels.linear.schemes.dense import Dense
from pdserve.kernels.linear.schemes.scheme import Scheme
from pdserve.models.sources.dense import DenseSource
from pdserve.models.sources.source import Source
from pdserve.models.weights import Part, Plain, StoredMatrix, Weight

CPU = torch.device("cpu")
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
}
Tensors = dict[str, Tensor]


class Stored:
    """A checkpoint tensor that notes what is read of it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape)
        self.dtype = DTYPES[tensor.dtype]
        self.num_read = 0

    def read(self, window: tuple[slice, ...]) -> Tensor:
        piece = self._tensor[window]
        self.num_read += piece.numel()
        return piece


def weight_of(
    parts: list[Part],
    columns: int,
    shard: Shard = WHOLE,
    source: Source | None = None,
    scheme: Scheme | None = None,
    plain: Mapping[str, Plain] | None = None,
) -> tuple[Weight, Matrix]:
    """A weight, and the matrix that it fills."""
    source, scheme = source or DenseSource(), scheme or Dense()
    cuts = [part.cut(columns, shard) for part in parts]
    matrix = scheme.allocate(cuts, torch.float32, CPU)
    stored = StoredMatrix(matrix, scheme, [source] * len(parts), cuts)
    return Weight(parts, plain or {}, CPU, lambda tensors: None, stored), matrix


def load(weight: Weight, stored: Tensors, names: list[str] | None = None) -> int:
    """Loads all that the weight takes; how many numbers were read."""
    read = 0
    for name in names or weight.names:
        if name in stored:
            tensor = Stored(stored[name])
            weight.load(name, tensor)
            read += tensor.num_read
    assert not weight.missing
    weight.finish()
    return read
