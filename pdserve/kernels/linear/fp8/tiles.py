# mypy: allow-untyped-defs
"""Triton product of many rows in e4m3 with a weight matrix in e4m3, tile by tile. It serves scales
that cover 128 columns, and shapes that torch._scaled_mm refuses or gets wrong.

Sums are in float32, as in small_products.py. This file knows nothing of models. triton_ops.py calls
it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.codes import dot_e4m3
from pdserve.kernels.launching.launch import cdiv, launch
from pdserve.kernels.linear.fp8.quantise import GROUP, Rounded
from pdserve.kernels.linear.fp8.small_products import Operand
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.small_products import with_bias

FEW = 256  # up to so many rows, tiles are small, so that more programs share the weights


def tile_size(num_rows: int) -> tuple[int, int, int]:
    """Returns (rows and outputs of a tile, warps, stages): 64 or 128 KiB of tiles are in flight."""
    return (64, 4, 4) if num_rows <= FEW else (128, 8, 4)


def launch_tiles(x: Rounded, m: Matrix, dtype: torch.dtype) -> Tensor:
    """Computes `x [rows, in] -> [rows, out]` in dtype; m.data must be contiguous."""
    num_rows = x.num_rows
    num_outputs, num_inputs = m.shape
    operand = Operand.of(m)
    out = torch.empty((num_rows, num_outputs), dtype=dtype, device=m.data.device)
    size, num_warps, num_stages = tile_size(num_rows)
    launch(
        tile_kernel,
        (cdiv(num_rows, size), cdiv(num_outputs, size)),
        (x.codes, x.scales, m.data, operand.scales, m.bias, out),
        (num_rows, num_outputs, num_inputs, x.scales.stride(0), operand.scales.stride(0)),
        GROUP_ROWS=operand.group_rows,
        GROUPED=operand.grouped,
        SIZE=size,
        STAGES=num_stages,
        num_warps=num_warps,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def tile_kernel(
    x_ptr,  # [num_rows, num_inputs], contiguous
    x_scales_ptr,  # [num_rows, num_inputs / 128 or 1]
    weight_ptr,  # [num_outputs, num_inputs], contiguous
    scales_ptr,  # [num_outputs / GROUP_ROWS, num_inputs / 128 or 1]
    bias_ptr,  # [num_outputs], or None
    out_ptr,  # [num_rows, num_outputs], contiguous
    num_rows,
    num_outputs,
    num_inputs,
    stride_x_scales,
    stride_scales,
    GROUP_ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program computes a (tile of rows, tile of outputs). Neighbours share their weights."""
    rows = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    outputs = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    columns = tl.arange(0, GROUP)
    # Rows and outputs past the last one are computed and not stored.
    near_rows = tl.minimum(rows, num_rows - 1)
    near_outputs = tl.minimum(outputs, num_outputs - 1)
    x_rows = x_ptr + (near_rows.to(tl.int64) * num_inputs)[:, None] + columns[None, :]
    weight_rows = weight_ptr + (near_outputs.to(tl.int64) * num_inputs)[:, None] + columns[None, :]
    x_scale_rows = x_scales_ptr + near_rows * stride_x_scales
    scale_rows = scales_ptr + near_outputs // GROUP_ROWS * stride_scales
    y = tl.zeros([SIZE, SIZE], tl.float32)
    for start in tl.range(0, num_inputs, GROUP, num_stages=STAGES):
        mask = (start + columns < num_inputs)[None, :]
        x = tl.load(x_rows + start, mask=mask, other=0.0)
        weights = tl.load(weight_rows + start, mask=mask, other=0.0)
        sums = dot_e4m3(x, tl.trans(weights))
        if GROUPED:
            x_scales = tl.load(x_scale_rows + start // GROUP)[:, None]
            sums *= x_scales * tl.load(scale_rows + start // GROUP)[None, :]
        y += sums
    if not GROUPED:
        y = y * tl.load(scale_rows)[None, :] * tl.load(x_scale_rows)[:, None]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    y = with_bias(y, bias_ptr, outputs[None, :], (outputs < num_outputs)[None, :], dtype)
    in_range = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    out = out_ptr + (rows.to(tl.int64) * num_outputs)[:, None] + outputs[None, :]
    tl.store(out, y.to(dtype), mask=in_range)
