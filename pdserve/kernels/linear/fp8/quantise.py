# mypy: allow-untyped-defs
"""Triton kernel that rounds activations to e4m3 before a product. There is a scale for each row, or
for each row and 128 columns. The kernel can norm the rows first, or gate them, so that such rows
are never stored in 16 bits.

The arithmetic is that of schemes/fp8.py `to_e4m3`, bit for bit. This file knows no product.
triton_ops.py calls it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.e4m3 import E4M3, LARGEST
from pdserve.kernels.launching.codes import to_e4m3
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.norm.elementwise import gated, weighted
from pdserve.kernels.norm.ops import Activation, Norm

GROUP = tl.constexpr(128)
SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny * LARGEST)
LARGEST_CODE = tl.constexpr(LARGEST)
FEW_ROWS = 64  # up to so many rows are multiplied in Triton, which needs no whole tiles
TILE_ROWS = 128


class Rounded(NamedTuple):
    """Activations of num_rows rows in e4m3: number = code * scale.

    codes: e4m3 `[T, in]`, contiguous.
    scales: float32 `[T, 1]`, or `[T, in / 128]`, rounded up.
    num_rows: rows after these have arbitrary content. They give cuBLAS whole tiles: it takes longer
        for 400 rows than for 512.
    """

    codes: Tensor
    scales: Tensor
    num_rows: int


def launch_quantise(
    x: Tensor,
    group_columns: int,
    norm: Norm | None = None,
    chosen: Tensor | None = None,
    activation: Activation | None = None,
) -> Rounded:
    """Rounds x `[T, in]`, whose last dim is contiguous. With norm it rounds the rms_norm of x, and
    with activation the gated x `[T, 2 * in]`. These are first rounded to x's dtype.

    group_columns: 128, or 0 for one scale per row.
    chosen: int32 with T numbers, contiguous. Rows with -1 there are left out, and their content is
        arbitrary.
    """
    assert group_columns in (0, GROUP.value), "no kernel for groups of this many columns"
    assert norm is None or activation is None, "no kernel norms and gates"
    num_rows, width = x.shape
    if activation is not None:
        width //= 2
    num_groups = cdiv(width, GROUP.value)
    held = num_rows if num_rows <= FEW_ROWS else cdiv(num_rows, TILE_ROWS) * TILE_ROWS
    codes = torch.empty((held, width), dtype=E4M3, device=x.device)
    shape = (held, num_groups if group_columns else 1)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    rounded = Rounded(codes, scales, num_rows)
    if not num_rows:
        return rounded
    block = next_power_of_2(num_groups)
    launch(
        quantise_kernel,
        (num_rows,),
        (x, norm.weight if norm else None, chosen, codes, scales),
        (norm.eps if norm else 0.0, x.stride(0)),
        WIDTH=width,
        NORM=norm is not None,
        PLUS_ONE=norm is not None and norm.plus_one,
        GATED=activation is not None,
        SILU=activation == "silu",
        CLAMPED=activation == "clamped_swiglu",
        GROUPED=bool(group_columns),
        BLOCK=block,
        num_warps=quantise_warps(block),
        **launch_options(x.device),
    )
    return rounded


def quantise_warps(block: int) -> int:
    """Number of warps that gives a thread 8 to 16 numbers, but at most 32."""
    return min(max(block // 4, 1), 32)


@triton.jit
def quantise_kernel(
    x_ptr,  # [T, WIDTH]; with GATED [T, 2 * WIDTH], gate and up
    norm_ptr,  # [WIDTH], or None
    chosen_ptr,  # int32 [T], or None
    codes_ptr,  # [T, WIDTH], contiguous
    scales_ptr,  # [T, WIDTH / 128 or 1], contiguous
    eps,
    stride_x,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    CLAMPED: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program rounds one row, which has up to BLOCK groups of 128 columns."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, BLOCK)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = columns < WIDTH
    if NORM:
        weight = tl.load(norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)

    wait(PDL)
    if chosen_ptr is not None:
        mask &= tl.load(chosen_ptr + row) >= 0
    x = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(tl.sum(x * x, 1), 0) / WIDTH + eps)
        x = weighted(x * scale, weight, x_ptr.dtype.element_ty, PLUS_ONE).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + row * stride_x + WIDTH + columns, mask=mask, other=0.0)
        x = gated(x, up.to(tl.float32), SILU, CLAMPED)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)

    # The bits of a larger float are larger if the sign is left out, and those of NaN the largest.
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    if not GROUPED:
        bits = tl.max(bits, 0, keep_dims=True)
    largest = bits.to(tl.float32, bitcast=True)
    largest = tl.where(largest < SMALLEST, SMALLEST, largest)
    scales = tl.div_rn(largest, tl.full(largest.shape, LARGEST_CODE, tl.float32))
    codes = to_e4m3(tl.div_rn(x, tl.broadcast_to(scales[:, None], x.shape)))
    tl.store(codes_ptr + row * WIDTH + columns, codes, mask=mask)
    if GROUPED:
        num_groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        tl.store(scales_ptr + row * num_groups + groups, scales, mask=groups < num_groups)
    else:
        tl.store(scales_ptr + row + tl.arange(0, 1), scales)
