# mypy: allow-untyped-defs
"""Triton product of few rows in e4m3 with a weight matrix in e4m3. It is bound by the bytes of the
weights.

Sums are in float32. If there is one scale for each row of x and of the matrix, the sums are scaled
at their end. If scales cover 128 columns, the sums are scaled after each 128. A single row goes
through tensor cores too: casting each weight to float32 would take longer than loading it. Tiles
follow from shapes alone. This file knows nothing of models. triton_ops.py calls it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.arrivals import arrivals
from pdserve.kernels.launching.codes import dot_e4m3
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import cdiv, launch
from pdserve.kernels.linear.fp8.quantise import FEW_ROWS, GROUP, Rounded
from pdserve.kernels.linear.gate_rows import gate_and_up, matrix_rows, outputs_of
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.small_products import (
    ProductTiles,
    merged,
    padded_rows,
    store_ended,
)

MAX_ROWS = FEW_ROWS
BLOCK_OUT = 64  # rows of a matrix that fill a warp group's tensor cores
STEPS = 2  # groups of columns that are loaded together: DRAM gives 256 bytes of a row at a time
SPLIT_INPUTS = 1024  # the fewest inputs of one split
MAX_SPLITS = 8
STAGE_BYTES = 192 * 1024  # shared memory of the tiles in flight
MAX_STAGES = 8


def small_tiles(
    num_rows: int, num_outputs: int, num_inputs: int, silu: bool, num_sms: int
) -> ProductTiles:
    """Returns tiles with one program per multiprocessor and many weights in flight. Narrow matrices
    are split along the inputs. Splits do not depend on the number of rows, so the result of a row
    does not depend on it either. For a wide matrix, two small programs per multiprocessor are
    faster at few rows, and larger tiles at many."""
    block_in = GROUP.value * STEPS
    num_tiles = cdiv(num_outputs * (2 if silu else 1), BLOCK_OUT)
    if num_tiles > 2 * num_sms:
        few = ProductTiles(BLOCK_OUT, block_in, 4, 4, 1)
        return few if num_rows <= 16 else ProductTiles(2 * BLOCK_OUT, block_in, 8, 4, 1)
    stage_bytes = (BLOCK_OUT + padded_rows(num_rows)) * block_in
    num_stages = min(STAGE_BYTES // stage_bytes, MAX_STAGES)
    wanted = num_sms // num_tiles
    num_splits = max(min(wanted, num_inputs // SPLIT_INPUTS, MAX_SPLITS), 1)
    return ProductTiles(BLOCK_OUT, block_in, 4, num_stages, num_splits)


class Operand(NamedTuple):
    """The layout of a matrix's scales, as far as a kernel needs it."""

    scales: Tensor
    group_rows: int
    grouped: bool

    @classmethod
    def of(cls, m: Matrix) -> "Operand":
        assert m.scales is not None, "the matrix has no scales"
        assert m.group[1] in (0, GROUP.value), "no kernel for groups of this many columns"
        return cls(m.scales, m.group[0], m.group[1] != 0)


def launch_small_product(
    x: Rounded,
    m: Matrix,
    dtype: torch.dtype,
    num_sms: int,
    silu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Computes `x [rows, in] -> [rows, out]`, or `[rows, out / 2]` with silu, in dtype. m.data must
    be contiguous. If residual [rows, out], contiguous, is given, the result is added to it."""
    num_rows = x.num_rows
    num_outputs = m.shape[0] // (2 if silu else 1)
    num_inputs = m.shape[1]
    operand = Operand.of(m)
    out = residual
    if out is None:
        out = torch.empty((num_rows, num_outputs), dtype=dtype, device=m.data.device)
    tiles = small_tiles(num_rows, num_outputs, num_inputs, silu, num_sms)
    num_tiles = (
        cdiv(m.shape[0], tiles.block_out) if not silu else cdiv(num_outputs, tiles.block_out // 2)
    )
    block_rows = padded_rows(num_rows)
    partial = None
    arrived = None
    if tiles.num_splits > 1:
        shape = (tiles.num_splits, num_tiles * tiles.block_out, block_rows)
        partial = torch.empty(shape, dtype=torch.float32, device=out.device)
        arrived = arrivals(out.device)
    launch(
        small_product_kernel,
        (num_tiles, tiles.num_splits),
        (x.codes, x.scales, m.data, operand.scales, m.bias, out, partial, arrived),
        (num_rows, num_outputs, num_inputs, x.scales.stride(0), operand.scales.stride(0)),
        SILU=silu,
        ADD=residual is not None,
        GROUP_ROWS=operand.group_rows,
        GROUPED=operand.grouped,
        BLOCK_ROWS=block_rows,
        BLOCK_OUT=tiles.block_out,
        NUM_SPLITS=tiles.num_splits,
        STEPS=tiles.block_in // GROUP.value,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        **launch_options(out.device),
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def small_product_kernel(
    x_ptr,  # [num_rows, num_inputs], contiguous
    x_scales_ptr,  # [num_rows, num_inputs / 128 or 1]
    weight_ptr,  # [num_outputs or 2 * num_outputs, num_inputs], contiguous
    scales_ptr,  # [rows / GROUP_ROWS, num_inputs / 128 or 1]
    bias_ptr,  # one per row of weight, or None
    out_ptr,  # [num_rows, num_outputs], contiguous
    partial_ptr,  # float32 [NUM_SPLITS, tiles * BLOCK_OUT, BLOCK_ROWS], or None
    arrivals_ptr,  # int32, one per tile of outputs, or None
    num_rows,
    num_outputs,
    num_inputs,
    stride_x_scales,
    stride_scales,
    SILU: tl.constexpr,
    ADD: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    STEPS: tl.constexpr,  # groups of 128 columns
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes a (tile of BLOCK_OUT rows of the matrix, split of the inputs). The last
    split of a tile to arrive adds all of them in order, so results do not depend on which is last.
    """
    begin(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    step: tl.constexpr = GROUP * STEPS
    span = tl.cdiv(num_inputs, step * NUM_SPLITS) * step
    first = split * span
    end = tl.minimum(first + span, num_inputs)
    rows = tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, GROUP)
    weight_rows = matrix_rows(tile, num_outputs, SILU, BLOCK_OUT)
    weights_at = weight_ptr + (weight_rows * num_inputs)[:, None] + columns[None, :]
    scales_at = scales_ptr + weight_rows // GROUP_ROWS * stride_scales
    x_at = x_ptr + (rows * num_inputs)[:, None] + columns[None, :]
    x_scales_at = x_scales_ptr + tl.minimum(rows, num_rows - 1) * stride_x_scales

    wait(PDL)
    y = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for start in tl.range(first, end, step, num_stages=STAGES):
        for number in tl.static_range(STEPS):
            at = start + number * GROUP
            mask = (at + columns < end)[None, :]
            weights = tl.load(weights_at + at, mask=mask, other=0.0, eviction_policy="evict_first")
            x = tl.trans(tl.load(x_at + at, mask=mask & (rows < num_rows)[:, None], other=0.0))
            sums = dot_e4m3(weights, x)
            if GROUPED:
                group = tl.minimum(at, num_inputs - 1) // GROUP
                sums *= tl.load(x_scales_at + group)[None, :] * tl.load(scales_at + group)[:, None]
            y += sums

    last = True
    if NUM_SPLITS > 1:
        parts = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        parts_at = partial_ptr + (parts * BLOCK_ROWS)[:, None] + rows[None, :]
        stride_split = tl.num_programs(0) * BLOCK_OUT * BLOCK_ROWS
        is_row = (rows < num_rows)[None, :]
        y, last = merged(y, parts_at, stride_split, is_row, arrivals_ptr, tile, split, NUM_SPLITS)
    if last:
        if not GROUPED:
            y = y * tl.load(scales_at)[:, None] * tl.load(x_scales_at)[None, :]
        gate, up = gate_and_up(y, SILU)
        outputs = outputs_of(tile, SILU, BLOCK_OUT)
        in_range = (outputs < num_outputs)[:, None] & (rows < num_rows)[None, :]
        store_ended(gate, up, bias_ptr, out_ptr, outputs, rows, in_range, num_outputs, SILU, ADD)
