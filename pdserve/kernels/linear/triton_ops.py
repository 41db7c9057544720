"""LinearOps of dense matrices on a GPU: Triton computes few rows, cuBLAS all others."""

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.collective.ops import Stream, normed
from pdserve.kernels.launching.checks import num_sms
from pdserve.kernels.launching.launch import is_hopper
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.small_products import MAX_ROWS, launch_row_product, launch_small_product
from pdserve.kernels.norm import triton_ops as norms
from pdserve.kernels.norm.ops import Activation, Norm


def linear(x: Tensor, m: Matrix) -> Tensor:
    if not _is_small(x, m.data):
        return functional.linear(x, m.data, m.bias)
    return _small_product(x, m)


def linear_into(x: Tensor, m: Matrix, out: Tensor) -> None:
    """Copies the product of few rows, which ranks hardly ever read from each other."""
    if _is_small(x, m.data):
        out.copy_(_small_product(x, m))
    elif m.bias is None:
        torch.mm(x, m.data.mT, out=out)
    else:
        torch.addmm(m.bias, x, m.data.mT, out=out)


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
    if activation == "silu" and _is_small(x, m.data):
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
    if _is_small(x, m.data):
        return _small_product(x, m, stream=stream)
    stream.addmm_(x, m.data.mT)
    return stream if m.bias is None else stream.add_(m.bias)


def _is_small(x: Tensor, weight: Tensor) -> bool:
    """True if small_products.py is faster and has a kernel: x has few rows, and the dtypes and
    layouts of x and weight fit."""
    return (
        0 < len(x) <= MAX_ROWS
        and (not x.is_cuda or is_hopper(x.device))  # the stages fill Hopper's shared memory
        and x.dtype != torch.float32
        and weight.shape[1] % 16 == 0
        and x.stride(1) == 1
        and weight.is_contiguous()
    )


def _small_product(
    x: Tensor, m: Matrix, silu: bool = False, stream: Tensor | None = None
) -> Tensor:
    if len(x) == 1:
        return launch_row_product(x, m.data, m.bias, silu, residual=stream)
    return launch_small_product(x, m.data, m.bias, num_sms(x.device), silu, stream)
