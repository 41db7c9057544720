"""Products of activations with weight matrices in plain torch.

On CPU a float32 product gives equal rows for every number of rows that is a multiple of
ROW_MULTIPLE: the model runner pads its rows to one.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.norm.reference import rms_norm, silu_mul

ROW_MULTIPLE = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`; x [T, in], weight [out, in]. Batch-invariant on CPU for T a multiple
    of ROW_MULTIPLE."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and _has_onednn_linear():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return functional.linear(x, weight, bias)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """`residual + linear(x)`; residual [T, out], contiguous. It may be overwritten: use what is
    returned."""
    return residual + linear(x, weight, bias)


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`linear(rms_norm(x))`; x [T, in]."""
    return linear(rms_norm(x, norm_weight, eps), weight, bias)


def norm_linear_silu_mul(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """norm_linear with a fused gate and up matrix [2 * I, in], then silu_mul; returns [T, I]."""
    return silu_mul(norm_linear(x, norm_weight, eps, weight, bias))


@lru_cache
def _has_onednn_linear() -> bool:
    """Whether torch brings oneDNN's float32 product: twice as fast as MKL's on AMD CPUs, which MKL
    gives no AVX-512."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
