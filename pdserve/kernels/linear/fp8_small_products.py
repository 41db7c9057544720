# mypy: allow-untyped-defs
"""Triton products of few rows in e4m3 with a weight matrix in e4m3, bound by the bytes of the
weights. small_products.py does the same for 16 bits, and explains the two kernels and their ends.

Sums are in float32. With a scale for each row of x and of the matrix they are scaled at their end;
where scales stand for 128 columns, after each 128. Tiles follow from shapes alone. Knows nothing of
models. Called through fp8_ops.py.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.arrivals import arrivals
from pdserve.kernels.launching.codes import dot_e4m3, from_e4m3
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.quantise import GROUP, Rounded
from pdserve.kernels.linear.small_products import (
    ProductTiles,
    merged,
    padded_rows,
    store_ended,
    with_bias,
)
from pdserve.kernels.norm.elementwise import gated

MAX_ROWS = 64
WARP_TILE = 2048  # weights of a row product's step, of one warp: 64 a thread, in 4 loads
NARROW = 4096  # inputs of a row product, up to which programs of half the size are the faster
SPLIT_INPUTS = 1024  # the fewest inputs of one split, as many bytes as in 16 bits
MAX_SPLITS = 8
STAGE_BYTES = 192 * 1024  # shared memory of the tiles in flight
MAX_STAGES = 10


def row_tiles(num_inputs: int, silu: bool) -> ProductTiles:
    """64 weights a thread: as many bytes as in 16 bits. block_in is a multiple of 128."""
    num_warps = 2 if num_inputs <= NARROW else 4
    block_in = min(max(next_power_of_2(num_inputs), GROUP.value), 512 * num_warps)
    block_out = min(WARP_TILE * num_warps // block_in, 16)
    return ProductTiles(block_out // 2 if silu else block_out, block_in, num_warps)


def small_tiles(
    num_rows: int, num_outputs: int, num_inputs: int, silu: bool, num_sms: int
) -> ProductTiles:
    """64 outputs fill a warp group's tensor cores. A stage has 8 KiB of weights (16 with gate and
    up), so that more stages are in flight than in 16 bits."""
    block_out = 64
    stage_bytes = (block_out * (2 if silu else 1) + padded_rows(num_rows)) * GROUP.value
    num_stages = min(STAGE_BYTES // stage_bytes, MAX_STAGES)
    wanted = num_sms // cdiv(num_outputs, block_out)
    num_splits = 1 if silu else max(min(wanted, num_inputs // SPLIT_INPUTS, MAX_SPLITS), 1)
    return ProductTiles(block_out, GROUP.value, 4, num_stages, num_splits)


class Operand(NamedTuple):
    """What a kernel needs to know of how a matrix's scales stand."""

    scales: Tensor
    group_rows: int
    grouped: bool

    @classmethod
    def of(cls, m: Matrix) -> "Operand":
        assert m.scales is not None, "a twin"
        assert m.group[1] in (0, GROUP.value), "no kernel for groups of so many columns"
        return cls(m.scales, m.group[0], m.group[1] != 0)


def launch_row_product(
    x: Rounded,
    m: Matrix,
    dtype: torch.dtype,
    silu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`x [1, in] -> [1, out]`, or `[1, out / 2]` with silu, in dtype; m.data is contiguous. With
    residual [1, out] the result is added to it."""
    num_outputs = m.shape[0] // (2 if silu else 1)
    num_inputs = m.shape[1]
    operand = Operand.of(m)
    out = torch.empty((1, num_outputs), dtype=dtype, device=m.data.device)
    out = out if residual is None else residual
    tiles = row_tiles(num_inputs, silu)
    launch(
        row_product_kernel,
        (cdiv(num_outputs, tiles.block_out),),
        (x.codes, x.scales, m.data, operand.scales, m.bias, out),
        (num_outputs, num_inputs, operand.scales.stride(0)),
        SILU=silu,
        ADD=residual is not None,
        GROUP_ROWS=operand.group_rows,
        GROUPED=operand.grouped,
        BLOCK_OUT=tiles.block_out,
        GROUPS=tiles.block_in // GROUP.value,
        num_warps=tiles.num_warps,
        **launch_options(out.device),
    )
    return out


def launch_small_product(
    x: Rounded,
    m: Matrix,
    dtype: torch.dtype,
    num_sms: int,
    silu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`x [rows, in] -> [rows, out]`, or `[rows, out / 2]` with silu, in dtype; m.data is
    contiguous. With residual [rows, out], contiguous, the result is added to it."""
    num_rows = len(x.codes)
    num_outputs = m.shape[0] // (2 if silu else 1)
    num_inputs = m.shape[1]
    operand = Operand.of(m)
    out = torch.empty((num_rows, num_outputs), dtype=dtype, device=m.data.device)
    out = out if residual is None else residual
    tiles = small_tiles(num_rows, num_outputs, num_inputs, silu, num_sms)
    block_rows = padded_rows(num_rows)
    partial = None
    arrived = None
    if tiles.num_splits > 1:
        shape = (tiles.num_splits, num_outputs, block_rows)
        partial = torch.empty(shape, dtype=torch.float32, device=out.device)
        arrived = arrivals(out.device)
    launch(
        small_product_kernel,
        (cdiv(num_outputs, tiles.block_out), tiles.num_splits),
        (x.codes, x.scales, m.data, operand.scales, m.bias, out, partial, arrived),
        (num_rows, num_outputs, num_inputs, x.scales.stride(0), operand.scales.stride(0)),
        SILU=silu,
        ADD=residual is not None,
        GROUP_ROWS=operand.group_rows,
        GROUPED=operand.grouped,
        BLOCK_ROWS=block_rows,
        BLOCK_OUT=tiles.block_out,
        NUM_SPLITS=tiles.num_splits,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        **launch_options(out.device),
    )
    return out


@triton.jit
def load_step(rows, first, columns, num_inputs):
    """A step of a row product's weights [BLOCK_OUT, GROUPS, 128]; they are read once in a forward,
    so the cache need not keep them."""
    mask = (first + columns < num_inputs)[None, :, :]
    return tl.load(rows + first, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_scales(rows, first, groups, num_inputs, GROUPED: tl.constexpr):
    """The scales [BLOCK_OUT, GROUPS] of a step that begins at column `first`."""
    group = first // GROUP + groups
    if GROUPED:
        mask = (group * GROUP < num_inputs)[None, :]
        scales = tl.load(rows[:, None] + group[None, :], mask=mask, other=0.0)
    else:
        scales = tl.zeros([rows.shape[0], groups.shape[0]], tl.float32)
    return scales


@triton.jit
def add_step(sums, weights, scales, x, GROUPED: tl.constexpr):
    """sums, to which the products of a step are added; x [GROUPS, 128]."""
    products = from_e4m3(weights, tl.float32) * x[None, :, :]
    if GROUPED:
        products *= scales[:, :, None]
    return sums + products


@triton.jit
def load_x(x_ptr, x_scales_ptr, first, columns, groups, num_inputs, GROUPED: tl.constexpr):
    """Activations [GROUPS, 128] of a step, scaled if each group has a scale of its own."""
    codes = tl.load(x_ptr + first + columns, mask=first + columns < num_inputs, other=0.0)
    x = from_e4m3(codes, tl.float32)
    if GROUPED:
        group = first // GROUP + groups
        x *= tl.load(x_scales_ptr + group, mask=group * GROUP < num_inputs, other=0.0)[:, None]
    return x


@triton.jit(do_not_specialize=["num_outputs"])
def row_product_kernel(
    x_ptr,  # [num_inputs]
    x_scales_ptr,  # [num_inputs / 128 or 1]
    weight_ptr,  # [num_outputs or 2 * num_outputs, num_inputs], contiguous
    scales_ptr,  # [rows / GROUP_ROWS, num_inputs / 128 or 1]
    bias_ptr,  # one a row of weight, or None
    out_ptr,  # [num_outputs]
    num_outputs,
    num_inputs,
    stride_scales,
    SILU: tl.constexpr,
    ADD: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of BLOCK_OUT outputs). The next step's weights are loaded before those of this
    one are used."""
    begin(PDL)
    step: tl.constexpr = GROUPS * GROUP
    outputs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    groups = tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    # what lies past the last is computed and not stored
    gate = tl.minimum(outputs, num_outputs - 1)
    up = num_outputs + gate
    gate_rows = weight_ptr + (gate.to(tl.int64) * num_inputs)[:, None, None] + columns[None, :, :]
    up_rows = weight_ptr + (up.to(tl.int64) * num_inputs)[:, None, None] + columns[None, :, :]
    gate_scale_rows = scales_ptr + gate // GROUP_ROWS * stride_scales
    up_scale_rows = scales_ptr + up // GROUP_ROWS * stride_scales
    gate_weights = load_step(gate_rows, 0, columns, num_inputs)
    gate_scales = load_scales(gate_scale_rows, 0, groups, num_inputs, GROUPED)
    if SILU:
        up_weights = load_step(up_rows, 0, columns, num_inputs)
        up_scales = load_scales(up_scale_rows, 0, groups, num_inputs, GROUPED)

    wait(PDL)
    in_range = outputs < num_outputs
    if ADD:
        residual = tl.load(out_ptr + outputs, mask=in_range, other=0.0)
    gate_sums = tl.zeros([BLOCK_OUT, GROUPS, GROUP], tl.float32)
    up_sums = tl.zeros([BLOCK_OUT, GROUPS, GROUP], tl.float32)
    x = load_x(x_ptr, x_scales_ptr, 0, columns, groups, num_inputs, GROUPED)
    for start in range(step, num_inputs + step, step):
        next_gate = load_step(gate_rows, start, columns, num_inputs)
        next_gate_scales = load_scales(gate_scale_rows, start, groups, num_inputs, GROUPED)
        if SILU:
            next_up = load_step(up_rows, start, columns, num_inputs)
            next_up_scales = load_scales(up_scale_rows, start, groups, num_inputs, GROUPED)
        next_x = load_x(x_ptr, x_scales_ptr, start, columns, groups, num_inputs, GROUPED)
        gate_sums = add_step(gate_sums, gate_weights, gate_scales, x, GROUPED)
        gate_weights = next_gate
        gate_scales = next_gate_scales
        if SILU:
            up_sums = add_step(up_sums, up_weights, up_scales, x, GROUPED)
            up_weights = next_up
            up_scales = next_up_scales
        x = next_x

    dtype: tl.constexpr = out_ptr.dtype.element_ty
    y = tl.sum(tl.sum(gate_sums, 2), 1)
    if not GROUPED:
        x_scale = tl.load(x_scales_ptr)
        y = y * tl.load(gate_scale_rows) * x_scale
    y = with_bias(y, bias_ptr, outputs, in_range, dtype)
    if SILU:
        second = tl.sum(tl.sum(up_sums, 2), 1)
        if not GROUPED:
            second = second * tl.load(up_scale_rows) * x_scale
        y = gated(y, with_bias(second, bias_ptr, num_outputs + outputs, in_range, dtype), True)
    if ADD:
        y += residual.to(tl.float32)
    tl.store(out_ptr + outputs, y.to(dtype), mask=in_range)


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def small_product_kernel(
    x_ptr,  # [num_rows, num_inputs], contiguous
    x_scales_ptr,  # [num_rows, num_inputs / 128 or 1]
    weight_ptr,  # [num_outputs or 2 * num_outputs, num_inputs], contiguous
    scales_ptr,  # [rows / GROUP_ROWS, num_inputs / 128 or 1]
    bias_ptr,  # one a row of weight, or None
    out_ptr,  # [num_rows, num_outputs], contiguous
    partial_ptr,  # float32 [NUM_SPLITS, num_outputs, BLOCK_ROWS], or None
    arrivals_ptr,  # int32, one a tile of outputs, or None
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
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of BLOCK_OUT outputs, split of the inputs). The last split of a tile to arrive
    adds all of them in order, so results do not depend on which that is."""
    begin(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    span = tl.cdiv(num_inputs, GROUP * NUM_SPLITS) * GROUP
    first = split * span
    end = tl.minimum(first + span, num_inputs)
    outputs = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, GROUP)
    gate = tl.minimum(outputs, num_outputs - 1)
    up = num_outputs + gate
    gate_rows = weight_ptr + (gate.to(tl.int64) * num_inputs)[:, None] + columns[None, :]
    up_rows = weight_ptr + (up.to(tl.int64) * num_inputs)[:, None] + columns[None, :]
    gate_scale_rows = scales_ptr + gate // GROUP_ROWS * stride_scales
    up_scale_rows = scales_ptr + up // GROUP_ROWS * stride_scales
    x_rows = x_ptr + (rows * num_inputs)[:, None] + columns[None, :]
    x_scale_rows = x_scales_ptr + tl.minimum(rows, num_rows - 1) * stride_x_scales

    wait(PDL)
    y = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    up_sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for start in tl.range(first, end, GROUP, num_stages=STAGES):
        mask = (start + columns < end)[None, :]
        weights = tl.load(gate_rows + start, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.trans(tl.load(x_rows + start, mask=mask & (rows < num_rows)[:, None], other=0.0))
        sums = dot_e4m3(weights, x)
        if GROUPED:
            x_scales = tl.load(x_scale_rows + start // GROUP)[None, :]
            sums *= x_scales * tl.load(gate_scale_rows + start // GROUP)[:, None]
        y += sums
        if SILU:
            up_weights = tl.load(
                up_rows + start, mask=mask, other=0.0, eviction_policy="evict_first"
            )
            sums = dot_e4m3(up_weights, x)
            if GROUPED:
                sums *= x_scales * tl.load(up_scale_rows + start // GROUP)[:, None]
            up_sums += sums

    in_range = (outputs < num_outputs)[:, None] & (rows < num_rows)[None, :]
    last = True
    if NUM_SPLITS > 1:
        parts = partial_ptr + (outputs * BLOCK_ROWS)[:, None] + rows[None, :]
        y, last = merged(
            y, parts, num_outputs * BLOCK_ROWS, in_range, arrivals_ptr, tile, split, NUM_SPLITS
        )
    if last:
        if not GROUPED:
            row_scales = tl.load(x_scale_rows)[None, :]
            y = y * tl.load(gate_scale_rows)[:, None] * row_scales
            if SILU:
                up_sums = up_sums * tl.load(up_scale_rows)[:, None] * row_scales
        store_ended(y, up_sums, bias_ptr, out_ptr, outputs, rows, in_range, num_outputs, SILU, ADD)
