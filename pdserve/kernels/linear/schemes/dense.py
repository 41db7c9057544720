"""Dense weights: the matrix itself, in the dtype of the activations."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pdserve.kernels.linear import reference
from pdserve.kernels.linear.matrix import Matrix, Shard
from pdserve.kernels.linear.ops import LinearOps
from pdserve.kernels.linear.schemes.scheme import TensorSpec


class Dense:
    name = "dense"

    def tensors(self, rows: int, columns: int, dtype: torch.dtype) -> Mapping[str, TensorSpec]:
        return {"weight": TensorSpec((rows, columns), dtype, out_axis=0, in_axis=1)}

    def finish(self, tensors: Mapping[str, Tensor], bias: Tensor | None, shard: Shard) -> Matrix:
        return Matrix(tensors["weight"], bias, shard=shard)

    def ops(self, device: torch.device) -> LinearOps:
        if device.type == "cpu":
            return reference
        from pdserve.kernels.linear import triton_ops

        return triton_ops
