"""A scheme says how weight matrices are stored. Implemented by the files beside this one; chosen by
`models.layers.linear`, a matrix each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdserve.kernels.linear.matrix import Matrix, Shard
from pdserve.kernels.linear.ops import LinearOps


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a matrix, or of several stacked along its rows. out_axis: along which it is
    stacked, and cut where ranks share rows; None: one for each of the stacked matrices. in_axis:
    along which it is cut where ranks share columns; None: it is not.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    out_axis: int | None = None
    in_axis: int | None = None


class Scheme(Protocol):
    name: str

    def tensors(self, rows: int, columns: int, dtype: torch.dtype) -> Mapping[str, TensorSpec]:
        """What a rank holds of a matrix [rows, columns] that is multiplied with activations of this
        dtype: by the checkpoint's name after the module's, such as "weight". ValueError for a
        matrix that cannot be stored so."""
        ...

    def finish(self, tensors: Mapping[str, Tensor], bias: Tensor | None, shard: Shard) -> Matrix:
        """The matrix, from its tensors as they were loaded."""
        ...

    def ops(self, device: torch.device) -> LinearOps:
        """Products with such matrices."""
        ...
