"""Norms and gates in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dim of `x` [..., width], in float32, rounded to x's dtype
    before `weight`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of gate_up [T, 2 * I], gate first; returns [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
