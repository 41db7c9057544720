"""LinearOps of dense matrices in plain torch.

On CPU a float32 product gives equal rows for every number of rows that is a multiple of
ROW_MULTIPLE. Therefore the model runner pads its rows to such a number.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.ops import Composed
from pdserve.kernels.norm import reference as norms

ROW_MULTIPLE = 16


def linear(x: Tensor, m: Matrix) -> Tensor:
    """Computes the product. On CPU it is batch-invariant if T is a multiple of ROW_MULTIPLE."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and _has_onednn_linear():
        return torch.ops.mkldnn._linear_pointwise(x, m.data, m.bias, "none", [], "")
    return functional.linear(x, m.data, m.bias)


_composed = Composed(linear, norms)
norm_linear = _composed.norm_linear
norm_gated = _composed.norm_gated
add_linear = _composed.add_linear
linear_into = None


@lru_cache
def _has_onednn_linear() -> bool:
    """True if torch has oneDNN's float32 product. It is twice as fast as MKL's on AMD CPUs, where
    MKL does not use AVX-512."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
