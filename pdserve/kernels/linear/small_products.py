# mypy: allow-untyped-defs
"""Triton products of few rows with a weight matrix, for decode steps of small batches. They are
bound by the bytes of the weights.

`launch_row_product` takes one row: every program streams its weights through registers, and the
first of them while the kernel before still runs. `launch_small_product` takes up to MAX_ROWS rows
through shared memory and tensor cores. Both can end in SiLU * mul, with matching rows of gate and
up in one program. Tiles follow from shapes alone. The products serve float16 and bfloat16, because
tensor cores would make float32 inexact. This file knows nothing of models. triton_ops.py calls it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.arrivals import arrivals
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.dot import dot
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.norm.elementwise import gated

MAX_ROWS = 64
WARP_TILE = 1024  # weights that one warp takes in a step of a row product
NARROW = 2048  # up to so many inputs of a row product, programs of half the size are faster
# The fewest inputs of one split: a shorter split costs more in the merge than it wins.
SPLIT_INPUTS = 512
MAX_SPLITS = 8
STAGE_BYTES = 192 * 1024  # shared memory of the tiles in flight


@dataclass(frozen=True)
class ProductTiles:
    """Constants of one launch.

    block_out: outputs of a program; gate and up have so many each.
    block_in: inputs of a step.
    """

    block_out: int
    block_in: int
    num_warps: int
    num_stages: int = 1
    num_splits: int = 1


def row_tiles(num_inputs: int, silu: bool) -> ProductTiles:
    """Returns tiles with 32 weights per thread. These take so few registers that programs of the
    next kernel are resident too, with loads in flight."""
    num_warps = 2 if num_inputs <= NARROW else 4
    block_in = min(next_power_of_2(num_inputs), 512 * num_warps)
    block_out = min(WARP_TILE * num_warps // block_in, 16)
    return ProductTiles(block_out // 2 if silu else block_out, block_in, num_warps)


def small_tiles(
    num_rows: int, num_outputs: int, num_inputs: int, silu: bool, num_sms: int
) -> ProductTiles:
    """Returns tiles with one program per multiprocessor and many weights in flight. Narrow matrices
    are split along the inputs."""
    block_out = 64
    block_in = 128
    stage_bytes = (block_out * (2 if silu else 1) + padded_rows(num_rows)) * 2 * block_in
    num_stages = max(min(STAGE_BYTES // stage_bytes, 4 if silu else 6), 2)
    wanted = num_sms // cdiv(num_outputs, block_out)
    num_splits = 1 if silu else max(min(wanted, num_inputs // SPLIT_INPUTS, MAX_SPLITS), 1)
    return ProductTiles(block_out, block_in, 4, num_stages, num_splits)


def padded_rows(num_rows: int) -> int:
    return max(next_power_of_2(num_rows), 16)


def launch_row_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Computes `x [1, in] -> [1, out]`, or `[1, out / 2]` with silu. The last dims of x and weight
    must be contiguous. If residual [1, out] is given, the result is added to it.
    """
    num_outputs = weight.shape[0] // (2 if silu else 1)
    num_inputs = weight.shape[1]
    out = (
        torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
        if residual is None
        else residual
    )
    tiles = row_tiles(num_inputs, silu)
    launch(
        row_product_kernel,
        (cdiv(num_outputs, tiles.block_out),),
        (x, weight, bias, out),
        (num_outputs, num_inputs, weight.stride(0)),
        SILU=silu,
        ADD=residual is not None,
        BLOCK_OUT=tiles.block_out,
        BLOCK_IN=tiles.block_in,
        num_warps=tiles.num_warps,
        **launch_options(x.device),
    )
    return out


def launch_small_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_sms: int,
    silu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Computes `x [rows, in] -> [rows, out]`, or `[rows, out / 2]` with silu. The last dims of x
    and weight must be contiguous. If residual [rows, out], contiguous, is given, the result is
    added to it.
    """
    num_rows = x.shape[0]
    num_outputs = weight.shape[0] // (2 if silu else 1)
    num_inputs = weight.shape[1]
    out = (
        torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
        if residual is None
        else residual
    )
    tiles = small_tiles(num_rows, num_outputs, num_inputs, silu, num_sms)
    num_tiles = cdiv(num_outputs, tiles.block_out)
    block_rows = padded_rows(num_rows)
    partial = None
    arrived = None
    if tiles.num_splits > 1:
        partial = torch.empty(
            (tiles.num_splits, num_outputs, block_rows), dtype=torch.float32, device=x.device
        )
        arrived = arrivals(x.device)
    launch(
        small_product_kernel,
        (num_tiles, tiles.num_splits),
        (x, weight, bias, out, partial, arrived),
        (num_rows, num_outputs, num_inputs, x.stride(0), weight.stride(0)),
        SILU=silu,
        ADD=residual is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_OUT=tiles.block_out,
        BLOCK_IN=tiles.block_in,
        NUM_SPLITS=tiles.num_splits,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        **launch_options(x.device),
    )
    return out


@triton.jit
def with_bias(y, bias_ptr, outputs, mask, dtype: tl.constexpr):
    if bias_ptr is not None:
        y += tl.load(bias_ptr + outputs, mask=mask, other=0.0).to(tl.float32)
    return y.to(dtype).to(tl.float32)


@triton.jit
def load_weights(rows, start, columns, num_inputs):
    """Loads a step of a tile of weights. They are read once in a forward, so the cache need not
    keep them."""
    mask = (start + columns < num_inputs)[None, :]
    return tl.load(rows + start, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_inputs(x_ptr, start, columns, num_inputs):
    return tl.load(x_ptr + start + columns, mask=start + columns < num_inputs, other=0.0)


@triton.jit(do_not_specialize=["num_outputs"])
def row_product_kernel(
    x_ptr,  # [num_inputs]
    weight_ptr,  # [num_outputs or 2 * num_outputs, num_inputs]
    bias_ptr,  # one per row of weight, or None
    out_ptr,  # [num_outputs]
    num_outputs,
    num_inputs,
    stride_weight,
    SILU: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes a tile of BLOCK_OUT outputs. The next step's weights are loaded before
    those of the current step are used."""
    begin(PDL)
    outputs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    columns = tl.arange(0, BLOCK_IN)
    # Outputs past the last one are computed and not stored.
    rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    gate_rows = weight_ptr + (rows * stride_weight)[:, None] + columns[None, :]
    up_rows = gate_rows + num_outputs.to(tl.int64) * stride_weight
    gate_weights = load_weights(gate_rows, 0, columns, num_inputs)
    if SILU:
        up_weights = load_weights(up_rows, 0, columns, num_inputs)

    wait(PDL)
    in_range = outputs < num_outputs
    if ADD:  # loaded after the sums, it would make every program wait for memory once more
        residual = tl.load(out_ptr + outputs, mask=in_range, other=0.0)
    x = load_inputs(x_ptr, 0, columns, num_inputs)
    gate_sums = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    up_sums = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for start in range(BLOCK_IN, num_inputs + BLOCK_IN, BLOCK_IN):
        next_gate = load_weights(gate_rows, start, columns, num_inputs)
        if SILU:
            next_up = load_weights(up_rows, start, columns, num_inputs)
        next_x = load_inputs(x_ptr, start, columns, num_inputs)
        gate_sums += gate_weights.to(tl.float32) * x.to(tl.float32)[None, :]
        gate_weights = next_gate
        if SILU:
            up_sums += up_weights.to(tl.float32) * x.to(tl.float32)[None, :]
            up_weights = next_up
        x = next_x

    dtype: tl.constexpr = out_ptr.dtype.element_ty
    y = with_bias(tl.sum(gate_sums, 1), bias_ptr, outputs, in_range, dtype)
    if SILU:
        y = gated(
            y, with_bias(tl.sum(up_sums, 1), bias_ptr, num_outputs + outputs, in_range, dtype), True
        )
    if ADD:
        y += residual.to(tl.float32)
    tl.store(out_ptr + outputs, y.to(dtype), mask=in_range)


@triton.jit
def merged(y, parts, stride_split, in_range, arrivals_ptr, tile, split, NUM_SPLITS: tl.constexpr):
    """Adds the sums of all splits of a tile in order. The last split to arrive does it. Returns the
    sums, and whether this program is that split.

    parts: where the tile's sums of split 0 are stored, float32.
    """
    tl.store(parts + split * stride_split, y, mask=in_range)
    tl.debug_barrier()  # so that the arrival of one thread covers the stores of all threads
    last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == NUM_SPLITS - 1
    if last:
        y = tl.zeros(y.shape, tl.float32)
        for part in tl.static_range(NUM_SPLITS):
            y += tl.load(
                parts + part * stride_split, mask=in_range, other=0.0, cache_modifier=".cg"
            )
        tl.store(arrivals_ptr + tile, 0)
    return y, last


@triton.jit
def store_ended(
    y,  # float32 [outputs, rows]
    up,  # the same for the second half of the matrix, used with SILU
    bias_ptr,
    out_ptr,
    outputs,
    rows,
    in_range,
    num_outputs,
    SILU: tl.constexpr,
    ADD: tl.constexpr,
):
    """Applies bias, gate and residual to a tile of products, and stores it to its rows of out."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    columns_ok = (outputs < num_outputs)[:, None]
    y = with_bias(y, bias_ptr, outputs[:, None], columns_ok, dtype)
    if SILU:
        y = gated(
            y,
            with_bias(up, bias_ptr, (num_outputs + outputs)[:, None], columns_ok, dtype),
            True,
        )
    out = out_ptr + (rows * num_outputs)[None, :] + outputs[:, None]
    if ADD:
        y += tl.load(out, mask=in_range, other=0.0).to(tl.float32)
    tl.store(out, y.to(dtype), mask=in_range)


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def small_product_kernel(
    x_ptr,  # [num_rows, num_inputs]
    weight_ptr,  # [num_outputs or 2 * num_outputs, num_inputs]
    bias_ptr,  # one per row of weight, or None
    out_ptr,  # [num_rows, num_outputs], contiguous
    partial_ptr,  # float32 [NUM_SPLITS, num_outputs, BLOCK_ROWS], or None
    arrivals_ptr,  # int32, one per tile of outputs, or None
    num_rows,
    num_outputs,
    num_inputs,
    stride_x,
    stride_weight,
    SILU: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes a (tile of BLOCK_OUT outputs, split of the inputs). The last split of a
    tile to arrive adds all of them in order, so results do not depend on which is last.
    """
    begin(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    span = tl.cdiv(num_inputs, BLOCK_IN * NUM_SPLITS) * BLOCK_IN
    first = split * span
    end = tl.minimum(first + span, num_inputs)
    outputs = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_IN)
    weight_rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    gate_rows = weight_ptr + (weight_rows * stride_weight)[:, None] + columns[None, :]
    up_rows = gate_rows + num_outputs.to(tl.int64) * stride_weight
    x_rows = x_ptr + (rows * stride_x)[:, None] + columns[None, :]

    wait(PDL)
    y = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    up = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for start in tl.range(first, end, BLOCK_IN, num_stages=STAGES):
        mask = (start + columns < end)[None, :]
        weights = tl.load(gate_rows + start, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.trans(tl.load(x_rows + start, mask=mask & (rows < num_rows)[:, None], other=0.0))
        y = dot(weights, x, y)
        if SILU:
            up_weights = tl.load(
                up_rows + start, mask=mask, other=0.0, eviction_policy="evict_first"
            )
            up = dot(up_weights, x, up)

    in_range = (outputs < num_outputs)[:, None] & (rows < num_rows)[None, :]
    last = True
    if NUM_SPLITS > 1:
        parts = partial_ptr + (outputs * BLOCK_ROWS)[:, None] + rows[None, :]
        y, last = merged(
            y, parts, num_outputs * BLOCK_ROWS, in_range, arrivals_ptr, tile, split, NUM_SPLITS
        )
    if last:
        store_ended(y, up, bias_ptr, out_ptr, outputs, rows, in_range, num_outputs, SILU, ADD)
