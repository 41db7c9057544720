# mypy: allow-untyped-defs
"""Triton products of up to MAX_ROWS rows with a matrix of int4. For few rows they are bound by the
bytes of the words.

They run on tensor cores. For few rows, numbers less their zero points are exact in 16 bits, and the
float32 sum of a group is multiplied by its scale. For many rows that would take more registers than
there are, so weights are multiplied by their scales and rounded to 16 bits. Tiles follow from
shapes alone. The products serve float16 and bfloat16, on Hopper. This file knows nothing of models.
triton_ops.py calls it.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.arrivals import arrivals
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.dot import dot
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.linear.gate_rows import gate_and_up, matrix_rows, outputs_of
from pdserve.kernels.linear.int4.numbers import BLOCK, LANES, joined, numbers, raised, weights_of
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.small_products import merged, store_ended

MAX_ROWS = 1024
FEW_ROWS = 64
ROW_TILE = 128  # rows of a program that has many
GROUPS = (0, 32, 64, 128)  # columns of a scale that these products take
MAX_SPLITS = 8
SPLIT_INPUTS = 1024  # the fewest inputs of one split
BLOCK_OUT = 64  # rows of the matrix of a program that has few rows
FOLDED_GROUPS = (32,)  # with groups of so many columns, few rows are multiplied like many
LEAST_BUSY = 0.8  # share of the multiprocessors over all rounds of large tiles
PROGRAMS = 2  # of a multiprocessor at once: one loads while another unpacks numbers


@dataclass(frozen=True)
class Int4Tiles:
    """Constants of one launch.

    block_rows: rows of a program.
    block_out: rows of the matrix of a program.
    num_blocks: a step takes this many times 128 inputs.
    """

    block_rows: int
    block_out: int
    num_warps: int
    num_stages: int
    num_splits: int = 1
    num_blocks: int = 1


def int4_tiles(num_rows: int, num_matrix_rows: int, num_inputs: int, num_sms: int) -> Int4Tiles:
    """Returns the tiles of a launch. For few rows, narrow matrices are split along the inputs, and
    the number of splits does not depend on the rows. A program of two warps has more to do between
    two waits. It takes several blocks of a wide matrix at a step, because DRAM gives longer pieces
    of a row faster."""
    if num_rows > FEW_ROWS:
        return _tiles_of_many_rows(num_rows, num_matrix_rows, num_sms)
    wanted = PROGRAMS * num_sms // cdiv(num_matrix_rows, BLOCK_OUT)
    num_splits = max(min(wanted, num_inputs // SPLIT_INPUTS, MAX_SPLITS), 1)
    is_wide = wanted <= 1
    if num_rows <= 8:
        wide, narrow = Int4Tiles(8, BLOCK_OUT, 2, 3, num_blocks=4), Int4Tiles(8, BLOCK_OUT, 2, 5)
    elif num_rows <= 16:
        wide, narrow = Int4Tiles(16, BLOCK_OUT, 2, 4, num_blocks=2), Int4Tiles(16, BLOCK_OUT, 4, 5)
    else:
        rows = next_power_of_2(num_rows)
        wide, narrow = Int4Tiles(rows, 2 * BLOCK_OUT, 4, 3), Int4Tiles(rows, BLOCK_OUT, 4, 4)
    return replace(wide if is_wide else narrow, num_splits=num_splits)


def rows_to_warm() -> list[int]:
    """Returns numbers of rows, above FEW_ROWS, that meet every tile that any matrix has: one for
    each number of row tiles."""
    return list(range(FEW_ROWS + 1, MAX_ROWS + 1, ROW_TILE))


def _tiles_of_many_rows(num_rows: int, num_matrix_rows: int, num_sms: int) -> Int4Tiles:
    """Returns large tiles, unless there is one tile of rows, or the last round of programs would
    leave many multiprocessors idle."""
    small, large = Int4Tiles(ROW_TILE, 64, 4, 3), Int4Tiles(ROW_TILE, 128, 8, 3)
    num_programs = cdiv(num_rows, large.block_rows) * cdiv(num_matrix_rows, large.block_out)
    busy = num_programs / (cdiv(num_programs, num_sms) * num_sms)
    return large if num_rows > large.block_rows and busy > LEAST_BUSY else small


def launch_int4_product(
    x: Tensor, m: Matrix, num_sms: int, silu: bool = False, residual: Tensor | None = None
) -> Tensor:
    """Computes `x [rows, in] -> [rows, out]`, or `[rows, out / 2]` with silu. The last dim of x and
    m's tensors must be contiguous. If residual [rows, out], contiguous, is given, the result is
    added to it."""
    assert m.scales is not None and m.zeros is not None
    num_rows, num_inputs = x.shape
    num_outputs = m.data.shape[0] // (2 if silu else 1)
    out = residual
    if out is None:
        out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    tiles = int4_tiles(num_rows, m.data.shape[0], num_inputs, num_sms)
    num_tiles = cdiv(num_outputs, tiles.block_out // (2 if silu else 1))
    row_tiles = cdiv(num_rows, tiles.block_rows)
    partial = arrived = None
    if tiles.num_splits > 1:
        shape = (tiles.num_splits, row_tiles, num_tiles * tiles.block_out, tiles.block_rows)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrived = arrivals(x.device)
    launch(
        int4_product_kernel,
        (row_tiles, num_tiles, tiles.num_splits),  # programs that read the same words run together
        (x, m.data, m.scales, m.zeros, m.bias, out, partial, arrived),
        (
            num_rows,
            num_outputs,
            num_inputs,
            x.stride(0),
            m.data.stride(0),
            m.scales.shape[1],
            m.scales.stride(1),
            m.zeros.stride(1),
        ),
        SILU=silu,
        ADD=residual is not None,
        GROUP=m.group[1],
        FOLDED=num_rows > FEW_ROWS or m.group[1] in FOLDED_GROUPS,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_OUT=tiles.block_out,
        NUM_SPLITS=tiles.num_splits,
        NUM_BLOCKS=tiles.num_blocks,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        **launch_options(x.device),
    )
    return out


@triton.jit
def scales_of(rows_at, block, num_groups, stride, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """Returns the scales `[BLOCK_OUT]` of the CHUNK-th group of a block; past the last group, those
    of the last."""
    if GROUP:
        group = tl.minimum(block * (BLOCK // GROUP) + CHUNK, num_groups - 1)
        scales = tl.load(rows_at + group * stride)
    else:
        scales = tl.load(rows_at)
    return scales


@triton.jit
def added(
    y,  # float32 [BLOCK_OUT, BLOCK_ROWS]
    words,
    zeros,  # one for every two numbers of a word, which are 32 neighbouring columns
    scales_at,
    x_rows,
    block,
    end,
    num_groups,
    stride,
    rows_ok,
    GROUP: tl.constexpr,
    FOLDED: tl.constexpr,
):
    """Returns y plus the product of 128 columns. Without groups the product is not scaled yet."""
    dtype: tl.constexpr = x_rows.dtype.element_ty
    WIDTH: tl.constexpr = GROUP if GROUP and not FOLDED else 128
    z0, z1 = raised(zeros, 0, dtype), raised(zeros, 1, dtype)
    z2, z3 = raised(zeros, 2, dtype), raised(zeros, 3, dtype)
    if FOLDED and GROUP:
        s0 = scales_of(scales_at, block, num_groups, stride, 0, GROUP).to(dtype)[:, None]
        s1 = scales_of(scales_at, block, num_groups, stride, 32 // GROUP, GROUP).to(dtype)[:, None]
        s2 = scales_of(scales_at, block, num_groups, stride, 64 // GROUP, GROUP).to(dtype)[:, None]
        s3 = scales_of(scales_at, block, num_groups, stride, 96 // GROUP, GROUP).to(dtype)[:, None]
        n = weights_of(words, z0, z1, z2, z3, s0, s1, s2, s3, dtype)
    else:
        n = numbers(words, z0, z1, z2, z3, dtype)
    for chunk in tl.static_range(128 // WIDTH):
        columns = block * BLOCK + chunk * WIDTH + tl.arange(0, WIDTH)
        mask = (columns < end)[None, :] & rows_ok[:, None]
        x = tl.trans(tl.load(x_rows + columns[None, :], mask=mask, other=0.0))
        weights = joined(n, chunk * WIDTH // LANES, WIDTH)
        if GROUP and not FOLDED:
            part = dot(weights, x, tl.zeros(y.shape, tl.float32))
            y += part * scales_of(scales_at, block, num_groups, stride, chunk, GROUP)[:, None]
        else:
            y = dot(weights, x, y)
    return y


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def int4_product_kernel(
    x_ptr,  # [num_rows, num_inputs]
    words_ptr,  # int32 [num_outputs or 2 * num_outputs, 16 * blocks of 128 columns]
    scales_ptr,  # float32 [..., num_groups]; the rows of a group are contiguous
    zeros_ptr,  # int32 [..., blocks of 128 columns], likewise; four in each
    bias_ptr,  # one per row of the matrix, or None
    out_ptr,  # [num_rows, num_outputs], contiguous
    partial_ptr,  # float32 [NUM_SPLITS, tiles of rows, tiles * BLOCK_OUT, BLOCK_ROWS], or None
    arrivals_ptr,  # int32, one per tile, or None
    num_rows,
    num_outputs,
    num_inputs,
    stride_x,
    stride_words,
    num_groups,
    stride_scales,  # from one group to the next
    stride_zeros,
    SILU: tl.constexpr,
    ADD: tl.constexpr,
    GROUP: tl.constexpr,  # columns: 32, 64, 128; 0: all
    FOLDED: tl.constexpr,  # scales multiply the weights, not the sums
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,  # blocks of a step
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes a (tile of BLOCK_ROWS rows, tile of BLOCK_OUT rows of the matrix, split
    of the inputs). The last split of a tile to arrive adds all of them in order, as in
    small_products.py."""
    begin(PDL)
    row_tile = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    num_blocks = tl.cdiv(num_inputs, BLOCK)
    span = tl.cdiv(num_blocks, NUM_SPLITS)
    first = split * span
    last_block = tl.minimum(first + span, num_blocks)
    rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    rows_ok = rows < num_rows
    matrix = matrix_rows(tile, num_outputs, SILU, BLOCK_OUT)
    words_at = words_ptr + (matrix * stride_words)[:, None] + tl.arange(0, LANES)[None, :]
    scales_at = scales_ptr + matrix
    zeros_at = zeros_ptr + matrix
    x_rows = x_ptr + (rows.to(tl.int64) * stride_x)[:, None]

    wait(PDL)
    y = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for start in tl.range(first, last_block, NUM_BLOCKS, num_stages=STAGES):
        for number in tl.static_range(NUM_BLOCKS):
            block = tl.minimum(start + number, num_blocks - 1)
            # Past the split's last block, the inputs count as zeros.
            end = tl.where(start + number < last_block, num_inputs, 0)
            words = tl.load(words_at + block * LANES, eviction_policy="evict_first")
            zeros = tl.load(zeros_at + block * stride_zeros)
            y = added(
                y,
                words,
                zeros,
                scales_at,
                x_rows,
                block,
                end,
                num_groups,
                stride_scales,
                rows_ok,
                GROUP,
                FOLDED,
            )
    if not GROUP:
        y *= tl.load(scales_at)[:, None]

    last = True
    if NUM_SPLITS > 1:
        stride_row_tile = tl.num_programs(1) * BLOCK_OUT * BLOCK_ROWS
        parts = (tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)) * BLOCK_ROWS
        parts_at = partial_ptr + row_tile * stride_row_tile
        parts_at += parts[:, None] + tl.arange(0, BLOCK_ROWS)[None, :]
        stride_split = tl.num_programs(0) * stride_row_tile
        number = tile * tl.num_programs(0) + row_tile
        y, last = merged(
            y, parts_at, stride_split, rows_ok[None, :], arrivals_ptr, number, split, NUM_SPLITS
        )
    if last:
        gate, up = gate_and_up(y, SILU)
        outputs = outputs_of(tile, SILU, BLOCK_OUT)
        in_range = (outputs < num_outputs)[:, None] & rows_ok[None, :]
        store_ended(gate, up, bias_ptr, out_ptr, outputs, rows, in_range, num_outputs, SILU, ADD)
