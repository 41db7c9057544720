"""Weights as a checkpoint has them, and as a rank fills them: for tests of what is read of which
tensor."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pdserve.kernels.linear.matrix import WHOLE, Matrix, Shard
from pdserve.kernels.linear.schemes.dense import DENSE
from pdserve.kernels.linear.schemes.scheme import Scheme
from pdserve.kernels.linear.schemes.source import Source
from pdserve.models.weights import Part, Plain, StoredMatrix, Weight

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]


class Stored:
    """A checkpoint tensor that notes what is read of it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape)
        self.num_read = 0

    def read(self, window: tuple[slice, ...]) -> Tensor:
        piece = self._tensor[window]
        self.num_read += piece.numel()
        return piece


def weight_of(
    parts: list[Part],
    columns: int,
    shard: Shard = WHOLE,
    source: Source = DENSE.source,
    scheme: Scheme = DENSE.scheme,
    plain: Mapping[str, Plain] | None = None,
) -> tuple[Weight, Matrix]:
    """A weight, and the matrix that it fills."""
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
