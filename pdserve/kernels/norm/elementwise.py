# mypy: allow-untyped-defs
"""Triton kernels of one pass over the activations: RMS norm and gate.

Each reads and writes every element once and computes in float32. They know nothing of models.
triton_ops.py calls them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.norm.ops import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, Norm

LIMIT = tl.constexpr(SWIGLU_LIMIT)
ALPHA = tl.constexpr(SWIGLU_ALPHA)
GATE_BLOCK = 1024


def launch_rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Does what reference.rms_norm does. x is [rows, width] or [rows, heads, width], with any
    strides except for the last one, which must be 1."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    per_row = x.shape[1] if x.ndim == 3 else 1
    block, rows, warps = _norm_tile(width)
    num_rows = x.numel() // width
    launch(
        rms_norm_kernel,
        (cdiv(num_rows, rows),),
        (x, norm.weight, y),
        (norm.eps, num_rows, per_row, x.stride(0), x.stride(1) if x.ndim == 3 else 0),
        WIDTH=width,
        PLUS_ONE=norm.plus_one,
        BLOCK=block,
        ROWS=rows,
        num_warps=warps,
        **launch_options(x.device),
    )
    return y


def launch_gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Does what reference.gate does. The last dim of gate_up must be contiguous."""
    num_tokens = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    y = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_tokens, cdiv(width, GATE_BLOCK))
    launch(
        gate_kernel,
        grid,
        (gate_up, y),
        (width, gate_up.stride(0)),
        SILU=activation == "silu",
        CLAMPED=activation == "clamped_swiglu",
        BLOCK=GATE_BLOCK,
        num_warps=4,
        **launch_options(y.device),
    )
    return y


def _norm_tile(width: int) -> tuple[int, int, int]:
    """Returns (block, rows, warps) of one program of the norm. Narrow rows share a program; wide
    rows get more warps."""
    block = next_power_of_2(width)
    rows = max(1024 // block, 1)
    return block, rows, min(max(block * rows // 512, 1), 16)


@triton.jit
def weighted(normed, weight, dtype: tl.constexpr, PLUS_ONE: tl.constexpr):
    """Does the last step of a norm: multiplies rows that are already scaled by the norm's weight.
    Both are float32; the result is in dtype."""
    if PLUS_ONE:
        y = normed * (1.0 + weight)
    else:  # rounded here too, as in the training of models
        rounded = normed.to(dtype).to(tl.float32)
        y = rounded * weight
    return y.to(dtype)


@triton.jit(do_not_specialize=["num_rows", "per_row"])
def rms_norm_kernel(
    x_ptr,  # [num_rows / per_row, per_row, WIDTH]
    weight_ptr,
    y_ptr,  # contiguous
    eps,
    num_rows,
    per_row,
    stride_outer,
    stride_inner,
    WIDTH: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    columns = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)

    wait(PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    mask = (row < num_rows)[:, None] & (columns < WIDTH)[None, :]
    offsets = row // per_row * stride_outer + row % per_row * stride_inner
    x = tl.load(x_ptr + offsets[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + eps)
    y = weighted(x * scale[:, None], weight[None, :], y_ptr.dtype.element_ty, PLUS_ONE)
    tl.store(y_ptr + (row * WIDTH)[:, None] + columns[None, :], y, mask=mask)


@triton.jit
def gated(gate, up, SILU: tl.constexpr, CLAMPED: tl.constexpr = False):
    """Computes `activation(gate) * up` in float32. With CLAMPED it is that of clamped_swiglu."""
    if CLAMPED:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        y = gate / (1.0 + tl.exp(-(gate * ALPHA))) * (up + 1.0)
    elif SILU:
        y = gate / (1.0 + tl.exp(-gate)) * up
    else:  # 0.5 * gate * (1 + tanh(z)) is gate * sigmoid(2 * z)
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        y = gate / (1.0 + tl.exp(-2.0 * z)) * up
    return y


@triton.jit
def gate_kernel(
    gate_up_ptr,  # [T, 2 * width]
    y_ptr,  # [T, width], contiguous
    width,
    stride_token,
    SILU: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    row = gate_up_ptr + token * stride_token
    gate = tl.load(row + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + width + columns, mask=mask, other=0.0).to(tl.float32)
    y = gated(gate, up, SILU, CLAMPED)
    tl.store(y_ptr + token * width + columns, y.to(y_ptr.dtype.element_ty), mask=mask)
