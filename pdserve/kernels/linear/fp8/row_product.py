# mypy: allow-untyped-defs
"""Triton product of one row in e4m3 with a weight matrix in e4m3, for decode steps of one sequence.

It is bound by the bytes of the weights. They are loaded as words of four codes, and multiplied in
float32. Every program streams its weights through registers, and the first of them while the kernel
before still runs, as in linear/small_products.py. This file knows nothing of models.
small_products.py calls it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.codes import from_words
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.linear.fp8.quantise import GROUP, Rounded
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.linear.small_products import with_bias
from pdserve.kernels.norm.elementwise import gated

WORD = tl.constexpr(4)  # codes of a word
GROUP_WORDS = tl.constexpr(GROUP.value // WORD.value)
BLOCK_OUT = 2  # outputs of a program; gate and up have so many each
BLOCK_WORDS = 512  # words of a step, at most
NUM_WARPS = 4


def takes(m: Matrix) -> bool:
    """True if the rows of a matrix are whole words."""
    return m.shape[1] % WORD.value == 0


def launch_row_product(
    x: Rounded,
    m: Matrix,
    dtype: torch.dtype,
    silu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Computes `x [1, in] -> [1, out]`, or `[1, out / 2]` with silu, in dtype. m.data must be
    contiguous. If residual [1, out] is given, the result is added to it."""
    assert m.scales is not None, "the matrix has no scales"
    num_outputs = m.shape[0] // (2 if silu else 1)
    num_words = m.shape[1] // WORD.value
    out = residual
    if out is None:
        out = torch.empty((1, num_outputs), dtype=dtype, device=m.data.device)
    launch(
        row_product_kernel,
        (cdiv(num_outputs, BLOCK_OUT),),
        (
            x.codes.view(torch.int32),
            x.scales,
            m.data.view(torch.int32),
            m.scales,
            m.bias,
            out,
        ),
        (num_outputs, num_words, m.scales.stride(0)),
        SILU=silu,
        ADD=residual is not None,
        GROUP_ROWS=m.group[0],
        GROUPED=m.group[1] != 0,
        BLOCK_OUT=BLOCK_OUT,
        BLOCK_WORDS=min(next_power_of_2(num_words), BLOCK_WORDS),
        num_warps=NUM_WARPS,
        **launch_options(out.device),
    )
    return out


@triton.jit
def _load(rows, start, columns, num_words):
    """Loads a step of a tile of weights, which are read once in a forward."""
    mask = (start + columns < num_words)[None, :]
    return tl.load(rows + start, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _added(sums, weights, x0, x1, x2, x3, scales, GROUPED: tl.constexpr):
    """Returns float32 sums `[outputs, words]` plus the products of each word's codes."""
    w0, w1, w2, w3 = from_words(weights)
    if GROUPED:
        part = w0 * x0[None, :] + w1 * x1[None, :] + w2 * x2[None, :] + w3 * x3[None, :]
        sums += part * scales
    else:
        sums += w0 * x0[None, :]
        sums += w1 * x1[None, :]
        sums += w2 * x2[None, :]
        sums += w3 * x3[None, :]
    return sums


@triton.jit
def _scales_of(x_scales_ptr, scales_at, start, columns, num_words, GROUPED: tl.constexpr):
    """Returns the scales of each output and word, or 1 if there is one scale a row."""
    if GROUPED:
        group = tl.minimum(start + columns, num_words - 1) // GROUP_WORDS
        found = tl.load(x_scales_ptr + group)[None, :] * tl.load(scales_at + group[None, :])
    else:
        found = 1.0
    return found


@triton.jit(do_not_specialize=["num_outputs"])
def row_product_kernel(
    x_ptr,  # int32 [num_words]; four codes each, like the weights
    x_scales_ptr,  # float32 [num_words / 32 or 1]
    weight_ptr,  # int32 [num_outputs or 2 * num_outputs, num_words], contiguous
    scales_ptr,  # float32 [rows / GROUP_ROWS, num_words / 32 or 1]
    bias_ptr,  # one per row of weight, or None
    out_ptr,  # [num_outputs]
    num_outputs,
    num_words,
    stride_scales,
    SILU: tl.constexpr,
    ADD: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes a tile of BLOCK_OUT outputs. The next step's weights are loaded before
    those of the current step are used."""
    begin(PDL)
    outputs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    columns = tl.arange(0, BLOCK_WORDS)
    # Outputs past the last one are computed and not stored.
    rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    gate_rows = weight_ptr + (rows * num_words)[:, None] + columns[None, :]
    up_rows = gate_rows + num_outputs.to(tl.int64) * num_words
    gate_scales_at = scales_ptr + (rows // GROUP_ROWS * stride_scales)[:, None]
    up_scales_at = scales_ptr + ((rows + num_outputs) // GROUP_ROWS * stride_scales)[:, None]
    gate_weights = _load(gate_rows, 0, columns, num_words)
    if SILU:
        up_weights = _load(up_rows, 0, columns, num_words)

    wait(PDL)
    in_range = outputs < num_outputs
    if ADD:  # loaded after the sums, it would make every program wait for memory once more
        residual = tl.load(out_ptr + outputs, mask=in_range, other=0.0)
    x = tl.load(x_ptr + columns, mask=columns < num_words, other=0)
    gate_sums = tl.zeros([BLOCK_OUT, BLOCK_WORDS], tl.float32)
    up_sums = tl.zeros([BLOCK_OUT, BLOCK_WORDS], tl.float32)
    for start in range(BLOCK_WORDS, num_words + BLOCK_WORDS, BLOCK_WORDS):
        next_gate = _load(gate_rows, start, columns, num_words)
        if SILU:
            next_up = _load(up_rows, start, columns, num_words)
        next_x = tl.load(x_ptr + start + columns, mask=start + columns < num_words, other=0)
        x0, x1, x2, x3 = from_words(x)
        here = start - BLOCK_WORDS
        scales = _scales_of(x_scales_ptr, gate_scales_at, here, columns, num_words, GROUPED)
        gate_sums = _added(gate_sums, gate_weights, x0, x1, x2, x3, scales, GROUPED)
        gate_weights = next_gate
        if SILU:
            scales = _scales_of(x_scales_ptr, up_scales_at, here, columns, num_words, GROUPED)
            up_sums = _added(up_sums, up_weights, x0, x1, x2, x3, scales, GROUPED)
            up_weights = next_up
        x = next_x

    dtype: tl.constexpr = out_ptr.dtype.element_ty
    y, up = tl.sum(gate_sums, 1), tl.sum(up_sums, 1)
    if not GROUPED:
        x_scale = tl.load(x_scales_ptr)
        y *= tl.load(scales_ptr + rows * stride_scales) * x_scale
        if SILU:
            up *= tl.load(scales_ptr + (rows + num_outputs) * stride_scales) * x_scale
    y = with_bias(y, bias_ptr, outputs, in_range, dtype)
    if SILU:
        y = gated(y, with_bias(up, bias_ptr, num_outputs + outputs, in_range, dtype), True)
    if ADD:
        y += residual.to(tl.float32)
    tl.store(out_ptr + outputs, y.to(dtype), mask=in_range)
