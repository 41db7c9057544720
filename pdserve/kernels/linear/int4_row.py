# mypy: allow-untyped-defs
"""A Triton product of one row with a matrix of int4, bound by the bytes of its words.

Every program streams words through registers, the first of them while the kernel before still
runs, and multiplies in float32: a group's sum is multiplied by its scale. It can end in SiLU * mul,
with matching rows of gate and up in one program. Tiles follow from shapes alone. Knows nothing of
models. Called through int4_ops.py.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.linear.int4_numbers import BLOCK, LANES, exact, power
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.small_products import with_bias
from pdserve.kernels.norm.elementwise import gated

COLUMNS = 128  # of a block
MAX_BLOCKS = 8  # of a step
NUM_WARPS = 2
THREAD_WORDS = 16


@dataclass(frozen=True)
class RowTiles:
    """Constants of one launch: a program computes block_out outputs (of gate and up alike),
    128 * num_blocks inputs per step."""

    block_out: int
    num_blocks: int
    num_warps: int


def row_tiles(num_inputs: int, silu: bool) -> RowTiles:
    """16 words, 64 bytes, per thread and step, and as many of the next step in flight."""
    num_blocks = min(next_power_of_2(cdiv(num_inputs, COLUMNS)), MAX_BLOCKS)
    words = 32 * NUM_WARPS * THREAD_WORDS
    block_out = min(words // (num_blocks * LANES.value), 16)
    return RowTiles(block_out // 2 if silu else block_out, num_blocks, NUM_WARPS)


def launch_int4_row(
    x: Tensor, m: Matrix, silu: bool = False, residual: Tensor | None = None
) -> Tensor:
    """`x [1, in] -> [1, out]`, or `[1, out / 2]` with silu; the last dim of x is contiguous, as m's
    tensors are. With residual [1, out] the result is added to it."""
    assert m.scales is not None and m.zeros is not None
    num_outputs = m.data.shape[0] // (2 if silu else 1)
    out = residual
    if out is None:
        out = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    tiles = row_tiles(x.shape[1], silu)
    launch(
        int4_row_kernel,
        (cdiv(num_outputs, tiles.block_out),),
        (x, m.data, m.scales, m.zeros, m.bias, out),
        (num_outputs, x.shape[1], m.data.stride(0), m.scales.shape[1]),
        SILU=silu,
        ADD=residual is not None,
        GROUP=m.group[1],
        BLOCK_OUT=tiles.block_out,
        NUM_BLOCKS=tiles.num_blocks,
        num_warps=tiles.num_warps,
        **launch_options(x.device),
    )
    return out


@triton.jit
def load_words(word_rows, block, num_blocks):
    """Words of a step, `[outputs, NUM_BLOCKS, 16]`; they are read once in a forward, so the cache
    need not keep them."""
    ok = (block < num_blocks)[None, :, None]
    at = (block * LANES)[None, :, None]
    return tl.load(word_rows + at, mask=ok, other=0, eviction_policy="evict_first")


@triton.jit
def load_inputs(x_ptr, block, num_inputs, NUMBER: tl.constexpr):
    """`[NUM_BLOCKS, 16]`: the inputs that number NUMBER of each word is multiplied with."""
    columns = (block * BLOCK + NUMBER * LANES)[:, None] + tl.arange(0, LANES)[None, :]
    return tl.load(x_ptr + columns, mask=columns < num_inputs, other=0.0)


@triton.jit
def added(
    sums,  # float32 [outputs, NUM_BLOCKS, 16]
    words,
    x,  # eight of load_inputs
    scale_rows,  # [outputs, 1]
    zero_rows,
    block,
    num_groups,
    GROUP: tl.constexpr,
):
    """sums and the products of a step; without groups those of the numbers, not scaled yet."""
    WIDTH: tl.constexpr = GROUP if GROUP else 128
    EACH: tl.constexpr = WIDTH // 16  # numbers of a word in one group
    for chunk in tl.static_range(128 // WIDTH):
        group = (block * 0)[None, :]
        if GROUP:
            group = tl.minimum(block * (BLOCK // GROUP) + chunk, num_groups - 1)[None, :]
        zeros = tl.load(zero_rows + group).to(tl.float32)
        part = tl.zeros(words.shape, tl.float32)
        for place in tl.static_range(EACH):
            raised = (zeros + power(chunk * EACH + place))[:, :, None]
            inputs = x[chunk * EACH + place].to(tl.float32)[None, :, :]
            part += exact(words, raised, chunk * EACH + place) * inputs
        if GROUP:
            part *= tl.load(scale_rows + group)[:, :, None]
        sums += part
    return sums


@triton.jit(do_not_specialize=["num_outputs"])
def int4_row_kernel(
    x_ptr,  # [num_inputs]
    words_ptr,  # int32 [num_outputs or 2 * num_outputs, 16 * blocks of 128 columns]
    scales_ptr,  # float32 [..., num_groups], contiguous
    zeros_ptr,  # uint8 [..., num_groups], contiguous
    bias_ptr,  # one a row of the matrix, or None
    out_ptr,  # [num_outputs]
    num_outputs,
    num_inputs,
    stride_words,
    num_groups,
    SILU: tl.constexpr,
    ADD: tl.constexpr,
    GROUP: tl.constexpr,  # columns: 32, 64, 128; 0: all
    BLOCK_OUT: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of BLOCK_OUT outputs). The next step's words are loaded before those of this
    one are used."""
    begin(PDL)
    outputs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    num_blocks = tl.cdiv(num_inputs, BLOCK)
    block = tl.arange(0, NUM_BLOCKS)
    # what lies past the last is computed and not stored
    rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    lanes = tl.arange(0, LANES)[None, None, :]
    word_rows = words_ptr + (rows * stride_words)[:, None, None] + lanes
    up_rows = word_rows + num_outputs.to(tl.int64) * stride_words
    scales = scales_ptr + (rows * num_groups)[:, None]
    zeros = zeros_ptr + (rows * num_groups)[:, None]
    up_scales = scales + num_outputs.to(tl.int64) * num_groups
    up_zeros = zeros + num_outputs.to(tl.int64) * num_groups
    words = load_words(word_rows, block, num_blocks)
    if SILU:
        up_words = load_words(up_rows, block, num_blocks)

    wait(PDL)
    in_range = outputs < num_outputs
    if ADD:  # loaded behind the sums, it would keep every program waiting for memory once more
        residual = tl.load(out_ptr + outputs, mask=in_range, other=0.0)
    sums = tl.zeros([BLOCK_OUT, NUM_BLOCKS, LANES], tl.float32)
    up_sums = tl.zeros([BLOCK_OUT, NUM_BLOCKS, LANES], tl.float32)
    for start in range(0, num_blocks, NUM_BLOCKS):
        here = start + block
        ahead = here + NUM_BLOCKS
        x = (
            load_inputs(x_ptr, here, num_inputs, 0),
            load_inputs(x_ptr, here, num_inputs, 1),
            load_inputs(x_ptr, here, num_inputs, 2),
            load_inputs(x_ptr, here, num_inputs, 3),
            load_inputs(x_ptr, here, num_inputs, 4),
            load_inputs(x_ptr, here, num_inputs, 5),
            load_inputs(x_ptr, here, num_inputs, 6),
            load_inputs(x_ptr, here, num_inputs, 7),
        )
        next_words = load_words(word_rows, ahead, num_blocks)
        if SILU:
            next_up = load_words(up_rows, ahead, num_blocks)
        sums = added(sums, words, x, scales, zeros, here, num_groups, GROUP)
        words = next_words
        if SILU:
            up_sums = added(up_sums, up_words, x, up_scales, up_zeros, here, num_groups, GROUP)
            up_words = next_up

    dtype: tl.constexpr = out_ptr.dtype.element_ty
    y = tl.sum(tl.sum(sums, 2), 1)
    if not GROUP:
        y *= tl.load(scales_ptr + rows)
    y = with_bias(y, bias_ptr, outputs, in_range, dtype)
    if SILU:
        up = tl.sum(tl.sum(up_sums, 2), 1)
        if not GROUP:
            up *= tl.load(scales_ptr + num_outputs + rows)
        y = gated(y, with_bias(up, bias_ptr, num_outputs + outputs, in_range, dtype), True)
    if ADD:
        y += residual.to(tl.float32)
    tl.store(out_ptr + outputs, y.to(dtype), mask=in_range)
