"""LinearOps of matrices of int4 on a GPU. For few rows, Triton multiplies the packed words. For
many rows, the matrix is dequantised and multiplied by cuBLAS."""

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.collective.ops import Stream, normed
from pdserve.kernels.launching.checks import num_sms
from pdserve.kernels.launching.launch import is_hopper
from pdserve.kernels.linear.int4.dense import dequantised_into_scratch
from pdserve.kernels.linear.int4.products import GROUPS, MAX_ROWS, launch_int4_product
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.norm import triton_ops as norms
from pdserve.kernels.norm.ops import Activation, Norm

linear_into = None


def linear(x: Tensor, m: Matrix) -> Tensor:
    if _is_small(x, m):
        return _small_product(x, m)
    return functional.linear(x, dequantised_into_scratch(m, x.dtype), m.bias)


def norm_linear(stream: Stream, norm: Norm, m: Matrix) -> tuple[Tensor, Tensor]:
    x, finished = normed(stream, norm, norms)
    return linear(x, m), finished


def norm_gated(
    stream: Stream,
    norm: Norm,
    m: Matrix,
    activation: Activation,
    may_leave_gate: bool = False,
) -> tuple[Tensor, Tensor]:
    x, finished = normed(stream, norm, norms)
    if activation == "silu" and _is_small(x, m):
        return _small_product(x, m, silu=True), finished
    return norms.gate(linear(x, m), activation), finished


def add_linear(stream: Tensor, x: Tensor, m: Matrix, post_norm: Norm | None = None) -> Tensor:
    """Adds the product to the stream in place."""
    if stream.shape != (len(x), len(m.data)) or not stream.is_contiguous():
        raise ValueError(
            f"stream must be contiguous {(len(x), len(m.data))}, not {tuple(stream.shape)}"
        )
    if post_norm is not None:
        return stream.add_(norms.rms_norm(linear(x, m), post_norm))
    if _is_small(x, m):
        return _small_product(x, m, stream=stream)
    stream.addmm_(x, dequantised_into_scratch(m, x.dtype).mT)
    return stream if m.bias is None else stream.add_(m.bias)


def _is_small(x: Tensor, m: Matrix) -> bool:
    """True if products with packed words are faster and there is a kernel: x has few rows, and its
    dtype, its layout and the groups of m fit."""
    return (
        0 < len(x) <= MAX_ROWS
        and (not x.is_cuda or is_hopper(x.device))  # older GPUs lack the PTX instructions
        and x.dtype in (torch.bfloat16, torch.float16)
        and m.group[1] in GROUPS
        and x.stride(1) == 1
    )


def _small_product(
    x: Tensor, m: Matrix, silu: bool = False, stream: Tensor | None = None
) -> Tensor:
    return launch_int4_product(x, m, num_sms(x.device), silu, stream)
