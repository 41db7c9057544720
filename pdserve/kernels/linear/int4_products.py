# mypy: allow-untyped-defs
"""Triton products of up to MAX_ROWS rows with a matrix of int4, bound by the bytes of its words
where rows are few.

They run on tensor cores, a group at a time: numbers less their zero points are exact in 16 bits,
and a group's float32 sum is multiplied by its scale. All can end in SiLU * mul, with matching rows
of gate and up in one program. Tiles follow from shapes alone. For float16 and bfloat16, on Hopper.
Knows nothing of models. Called through int4_ops.py.
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
from pdserve.kernels.linear.int4_numbers import BLOCK, LANES, joined, numbers, raised
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.small_products import merged, store_ended

MAX_ROWS = 400
COLUMNS = 128  # of a step
MAX_SPLITS = 8
SPLIT_INPUTS = 1024  # the fewest inputs of one split
STAGE_BYTES = 96 * 1024  # shared memory of the tiles in flight: two programs fit
PROGRAMS = 2  # of a multiprocessor at once


@dataclass(frozen=True)
class Int4Tiles:
    """Constants of one launch: a program computes block_rows x block_out outputs (of gate and up
    alike), 128 inputs per step."""

    block_rows: int
    block_out: int
    num_warps: int
    num_stages: int
    num_splits: int


def int4_tiles(
    num_rows: int, num_outputs: int, num_inputs: int, silu: bool, num_sms: int
) -> Int4Tiles:
    """Two programs per multiprocessor, each with 16 KiB of words or more in flight; narrow matrices
    are split along the inputs. More rows take more warps: of sums, a thread holds 64 per matrix at
    most, and as many of the group that is being added up."""
    block_rows = min(max(next_power_of_2(num_rows), 16), 128)
    has_many_warps = block_rows >= (64 if silu else 128)
    block_out = 128 if has_many_warps and not (silu and block_rows == 128) else 64
    stage_bytes = COLUMNS * (block_rows * 2 + block_out * (2 if silu else 1) // 2)
    num_stages = max(min(STAGE_BYTES // stage_bytes, 6), 2)
    num_tiles = cdiv(num_outputs, block_out) * cdiv(num_rows, block_rows)
    wanted = PROGRAMS * num_sms // num_tiles
    num_splits = 1 if silu else max(min(wanted, num_inputs // SPLIT_INPUTS, MAX_SPLITS), 1)
    return Int4Tiles(block_rows, block_out, 8 if has_many_warps else 4, num_stages, num_splits)


def launch_int4_product(
    x: Tensor, m: Matrix, num_sms: int, silu: bool = False, residual: Tensor | None = None
) -> Tensor:
    """`x [rows, in] -> [rows, out]`, or `[rows, out / 2]` with silu; the last dim of x is
    contiguous, as m's tensors are. With residual [rows, out], contiguous, the result is added to
    it."""
    assert m.scales is not None and m.zeros is not None
    num_rows, num_inputs = x.shape
    num_outputs = m.data.shape[0] // (2 if silu else 1)
    out = residual
    if out is None:
        out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    tiles = int4_tiles(num_rows, num_outputs, num_inputs, silu, num_sms)
    num_tiles = cdiv(num_outputs, tiles.block_out)
    row_tiles = cdiv(num_rows, tiles.block_rows)
    partial = arrived = None
    if tiles.num_splits > 1:
        shape = (tiles.num_splits, row_tiles, num_outputs, tiles.block_rows)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrived = arrivals(x.device)
    launch(
        int4_product_kernel,
        (row_tiles, num_tiles, tiles.num_splits),  # those that read the same words run together
        (x, m.data, m.scales, m.zeros, m.bias, out, partial, arrived),
        (num_rows, num_outputs, num_inputs, x.stride(0), m.data.stride(0), m.scales.shape[1]),
        SILU=silu,
        ADD=residual is not None,
        GROUP=m.group[1],
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_OUT=tiles.block_out,
        NUM_SPLITS=tiles.num_splits,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        **launch_options(x.device),
    )
    return out


@triton.jit
def zeros_of(zeros_rows, block, num_groups, PAIR: tl.constexpr, GROUP: tl.constexpr):
    """Zero points of numbers 2 * PAIR and the next, of a block of 128 columns."""
    if GROUP:
        group = tl.minimum(block * (BLOCK // GROUP) + PAIR * 2 * LANES // GROUP, num_groups - 1)
        zeros = tl.load(zeros_rows + group)
    else:
        zeros = tl.load(zeros_rows)
    return zeros


@triton.jit
def step(
    y,  # float32 [BLOCK_OUT, BLOCK_ROWS]
    word_rows,
    scale_rows,
    zero_rows,
    x_rows,
    block,
    end,
    num_groups,
    rows_ok,
    GROUP: tl.constexpr,
):
    """y and the product of 128 columns; without groups that of the numbers, not scaled yet."""
    dtype: tl.constexpr = x_rows.dtype.element_ty
    WIDTH: tl.constexpr = GROUP if GROUP else 128
    words = tl.load(word_rows + block * LANES, eviction_policy="evict_first")
    n = numbers(
        words,
        raised(zeros_of(zero_rows, block, num_groups, 0, GROUP), dtype),
        raised(zeros_of(zero_rows, block, num_groups, 1, GROUP), dtype),
        raised(zeros_of(zero_rows, block, num_groups, 2, GROUP), dtype),
        raised(zeros_of(zero_rows, block, num_groups, 3, GROUP), dtype),
        dtype,
    )
    for chunk in tl.static_range(128 // WIDTH):
        columns = block * BLOCK + chunk * WIDTH + tl.arange(0, WIDTH)
        mask = (columns < end)[None, :] & rows_ok[:, None]
        x = tl.trans(tl.load(x_rows + columns[None, :], mask=mask, other=0.0))
        weights = joined(n, chunk * WIDTH // LANES, WIDTH)
        if GROUP:
            group = tl.minimum(block * (BLOCK // GROUP) + chunk, num_groups - 1)
            scales = tl.load(scale_rows + group)
            y += dot(weights, x, tl.zeros(y.shape, tl.float32)) * scales[:, None]
        else:
            y = dot(weights, x, y)
    return y


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def int4_product_kernel(
    x_ptr,  # [num_rows, num_inputs]
    words_ptr,  # int32 [num_outputs or 2 * num_outputs, 16 * blocks of 128 columns]
    scales_ptr,  # float32 [..., num_groups], contiguous
    zeros_ptr,  # uint8 [..., num_groups], contiguous
    bias_ptr,  # one a row of the matrix, or None
    out_ptr,  # [num_rows, num_outputs], contiguous
    partial_ptr,  # float32 [NUM_SPLITS, tiles of rows, num_outputs, BLOCK_ROWS], or None
    arrivals_ptr,  # int32, one a tile, or None
    num_rows,
    num_outputs,
    num_inputs,
    stride_x,
    stride_words,
    num_groups,
    SILU: tl.constexpr,
    ADD: tl.constexpr,
    GROUP: tl.constexpr,  # columns: 32, 64, 128; 0: all
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of BLOCK_ROWS rows, tile of BLOCK_OUT outputs, split of the inputs). The last
    split of a tile to arrive adds all of them in order, as in small_products.py."""
    begin(PDL)
    row_tile = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    num_blocks = tl.cdiv(num_inputs, BLOCK)
    span = tl.cdiv(num_blocks, NUM_SPLITS)
    first = split * span
    last_block = tl.minimum(first + span, num_blocks)
    outputs = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    lanes = tl.arange(0, LANES)
    rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    rows_ok = rows < num_rows
    # what lies past the last is computed and not stored
    matrix_rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    words = words_ptr + (matrix_rows * stride_words)[:, None] + lanes[None, :]
    scales = scales_ptr + matrix_rows * num_groups
    zeros = zeros_ptr + matrix_rows * num_groups
    up_start = num_outputs.to(tl.int64)
    up_words = words + up_start * stride_words
    up_scales = scales + up_start * num_groups
    up_zeros = zeros + up_start * num_groups
    x_rows = x_ptr + (rows.to(tl.int64) * stride_x)[:, None]

    wait(PDL)
    y = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    up = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for block in tl.range(first, last_block, num_stages=STAGES):
        y = step(y, words, scales, zeros, x_rows, block, num_inputs, num_groups, rows_ok, GROUP)
        if SILU:
            up = step(
                up,
                up_words,
                up_scales,
                up_zeros,
                x_rows,
                block,
                num_inputs,
                num_groups,
                rows_ok,
                GROUP,
            )
    if not GROUP:
        y *= tl.load(scales)[:, None]
        if SILU:
            up *= tl.load(up_scales)[:, None]

    in_range = (outputs < num_outputs)[:, None] & rows_ok[None, :]
    last = True
    if NUM_SPLITS > 1:
        parts = partial_ptr + row_tile * num_outputs * BLOCK_ROWS
        parts += (outputs * BLOCK_ROWS)[:, None] + tl.arange(0, BLOCK_ROWS)[None, :]
        stride_split = tl.num_programs(0) * num_outputs * BLOCK_ROWS
        number = tile * tl.num_programs(0) + row_tile
        y, last = merged(y, parts, stride_split, in_range, arrivals_ptr, number, split, NUM_SPLITS)
    if last:
        store_ended(y, up, bias_ptr, out_ptr, outputs, rows, in_range, num_outputs, SILU, ADD)
