"""Norms, rotary embedding, gates and products in plain torch.

On CPU a float32 product gives equal rows for every number of rows that is a multiple of ROW_MULTIPLE: the model runner
pads its rows to one.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

ROW_MULTIPLE = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dim of `x` [..., width], in float32, rounded to x's dtype before `weight`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates halves (the Hugging Face Llama convention) of q [T, Hq, D] and k [T, Hk, D] by their positions [T].

    cos, sin: float32 [max_pos, D // 2]. Computed in float32. Use the returned tensors: an implementation may work in
    place.
    """
    cos_rows, sin_rows = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, D // 2]
    first, second = torch.cat((q, k), dim=1).float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos_rows - second * sin_rows, second * cos_rows + first * sin_rows), dim=-1)
    q_rotated, k_rotated = rotated.to(q.dtype).split((q.shape[1], k.shape[1]), dim=1)
    return q_rotated, k_rotated


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of gate_up [T, 2 * I], gate first; returns [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`; x [T, in], weight [out, in]. Batch-invariant on CPU for T a multiple of ROW_MULTIPLE."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and _has_onednn_linear():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return functional.linear(x, weight, bias)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """`residual + linear(x)`; residual [T, out], contiguous. It may be overwritten: use what is returned."""
    return residual + linear(x, weight, bias)


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear(rms_norm(x))`; x [T, in]."""
    return linear(rms_norm(x, norm_weight, eps), weight, bias)


def norm_linear_silu_mul(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """norm_linear with a fused gate and up matrix [2 * I, in], then silu_mul; returns [T, I]."""
    return silu_mul(norm_linear(x, norm_weight, eps, weight, bias))


@lru_cache
def _has_onednn_linear() -> bool:
    """Whether torch brings oneDNN's float32 product: twice as fast as MKL's on AMD CPUs, which MKL gives no AVX-512."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
