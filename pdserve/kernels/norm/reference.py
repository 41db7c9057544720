"""Norms and gates, computed in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.norm.ops import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, Norm


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Root-mean-square norm over the last dim of `x` [..., width], computed in float32. The result
    is rounded to x's dtype before it is multiplied by the weight, or after by 1 + weight."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.plus_one:
        return (normed * (1.0 + norm.weight.float())).to(x.dtype)
    return norm.weight * normed.to(x.dtype)


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Computes `activation(gate) * up` of gate_up [T, 2 * I], gate first. Returns [T, I].

    gelu_tanh is PyTorch's GELU approximated by tanh. clamped_swiglu is gpt-oss's, which adds one to
    up.
    """
    first, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        first, up = first.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return first * sigmoid(SWIGLU_ALPHA * first) * (up + 1)
    if activation == "silu":
        return functional.silu(first) * up
    return functional.gelu(first, approximate="tanh") * up


def sigmoid(x: Tensor) -> Tensor:
    """Computes the sigmoid so that an element gets the same bits at any place, also on CPU. There
    torch's own sigmoid rounds the last elements of a tensor, which fill no vector, in another way;
    its exp does not."""
    return x.sigmoid() if x.is_cuda else 1.0 / (1.0 + torch.exp(-x))
