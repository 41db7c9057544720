# mypy: allow-untyped-defs
"""Dequantises a matrix of int4 into a scratch tensor, in 16 bits or in e4m3. This serves products
of so many rows that other products than int4's are faster.

The numbers are those of the CPU twin, bit for bit. This file knows no product. triton_ops.py and
rounded_ops.py call it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.e4m3 import E4M3
from pdserve.kernels.launching.codes import to_e4m3
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import cdiv, launch
from pdserve.kernels.linear.int4.numbers import BLOCK, LANES, joined
from pdserve.kernels.linear.matrix import Matrix

TILE_ROWS = 32  # rows of a program
TILE_BLOCKS = 1  # blocks of 128 columns that a program takes of each row
NUM_WARPS = 4

_scratches: dict[tuple[torch.device, torch.dtype], Tensor] = {}
_captured: list[Tensor] = []  # CUDA graphs read them, so they are kept after they are replaced


def dequantised_into_scratch(m: Matrix, dtype: torch.dtype) -> Tensor:
    """Returns `[out, in]` of dtype, contiguous, valid until the next call for this device and
    dtype. Therefore it must not be used in two streams of one device at once."""
    rows, columns = m.shape
    dense = scratch(rows * columns, dtype, m.data.device).view(rows, columns)
    dequantise_into(m, dense)
    return dense


def rounded_into_scratch(m: Matrix) -> Matrix:
    """Returns m, which has row_scales, as a matrix of kind "fp8". Its numbers are valid until the
    next call for this device; see `dequantised_into_scratch`."""
    codes = dequantised_into_scratch(m, E4M3)
    return Matrix(codes, m.bias, m.row_scales, shard=m.shard, kind="fp8")


def dequantise_into(m: Matrix, dense: Tensor) -> None:
    """Dequantises m into dense `[out, in]`, which must be contiguous. If dense is in e4m3, it gets
    codes, and m must have row_scales."""
    assert m.scales is not None and m.zeros is not None
    row_scales = m.row_scales if dense.dtype == E4M3 else None
    assert dense.dtype != E4M3 or row_scales is not None, "the matrix has no row_scales"
    assert m.scales.stride(0) == 1 and m.zeros.stride(0) == 1, "rows of a group must be contiguous"
    rows, columns = m.shape
    launch(
        dequantise_kernel,
        (cdiv(rows, TILE_ROWS), cdiv(columns, TILE_BLOCKS * BLOCK.value)),
        (m.data, m.scales, m.zeros, row_scales, dense),
        (
            rows,
            columns,
            m.data.stride(0),
            m.scales.shape[1],
            m.scales.stride(1),
            m.zeros.stride(1),
        ),
        GROUP=m.group[1],
        ROWS=TILE_ROWS,
        BLOCKS=TILE_BLOCKS,
        num_warps=NUM_WARPS,
        **launch_options(m.data.device),
    )


def scratch(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the first `size` numbers of the one scratch tensor of a device and dtype, which grows
    to the largest size.

    While a CUDA graph is captured, the existing tensor is returned and kept from then on. If it is
    too small, the graph gets a tensor from its own memory.
    """
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    kept = _scratches.get((device, dtype))
    if kept is None or len(kept) < size:
        kept = torch.empty(size, dtype=dtype, device=device)
        if not is_capturing:
            _scratches[device, dtype] = kept
    elif is_capturing and not any(kept is other for other in _captured):
        _captured.append(kept)
    return kept[:size]


@triton.jit
def weight(words, zeros, scales, NUMBER: tl.constexpr):
    """Returns number NUMBER of each word, less its zero point, times its scale, in float32. Byte
    NUMBER / 2 of int32 `zeros` has the zero point.

    The number stays at its place in its half of the word, which saves a cast: with the right
    exponent before it, it is added to a power of two.
    """
    PLACE: tl.constexpr = 4 * (NUMBER % 4)
    half = words if NUMBER < 4 else words >> 16
    raised = ((half & (15 << PLACE)) | ((150 - PLACE) << 23)).to(tl.float32, bitcast=True)
    zero = (zeros >> (8 * (NUMBER // 2)) & 0xFF).to(tl.float32) + 2.0 ** (23 - PLACE)
    return (raised - zero) * scales


@triton.jit
def stored(x, dtype: tl.constexpr):
    """Returns float32 x in dtype."""
    return to_e4m3(x) if dtype == tl.float8e4nv else x.to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def dequantise_kernel(
    words_ptr,  # int32 [num_rows, 16 * blocks of 128 columns]
    scales_ptr,  # float32 [num_rows, num_groups]; the rows of a group are contiguous
    zeros_ptr,  # int32 [num_rows, blocks of 128 columns], likewise; four in each
    row_scales_ptr,  # float32 [num_rows], by which scales are divided, or None
    out_ptr,  # [num_rows, num_columns], contiguous
    num_rows,
    num_columns,
    stride_words,
    num_groups,
    stride_scales,
    stride_zeros,
    GROUP: tl.constexpr,  # columns; 0: all
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program handles (tile of ROWS, BLOCKS blocks of 128 columns)."""
    begin(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    near = tl.minimum(rows, num_rows - 1)[:, None]
    num_blocks = tl.cdiv(num_columns, BLOCK)
    lanes = tl.arange(0, LANES)[None, :]
    columns = tl.arange(0, BLOCK)[None, :]
    step: tl.constexpr = GROUP if GROUP else 128
    out_dtype: tl.constexpr = out_ptr.dtype.element_ty
    wait(PDL)
    for number in tl.static_range(BLOCKS):
        at = tl.program_id(1) * BLOCKS + number
        block = tl.minimum(at, num_blocks - 1)
        words = tl.load(words_ptr + near * stride_words + block * LANES + lanes)
        zeros = tl.load(zeros_ptr + near + block * stride_zeros)
        group = block * (BLOCK // GROUP) if GROUP else 0
        scales_at = scales_ptr + near
        last = num_groups - 1
        s0 = tl.load(scales_at + tl.minimum(group, last) * stride_scales)
        s1 = tl.load(scales_at + tl.minimum(group + 32 // step, last) * stride_scales)
        s2 = tl.load(scales_at + tl.minimum(group + 64 // step, last) * stride_scales)
        s3 = tl.load(scales_at + tl.minimum(group + 96 // step, last) * stride_scales)
        if row_scales_ptr is not None:
            row_scales = tl.load(row_scales_ptr + near)
            s0, s1 = tl.div_rn(s0, row_scales), tl.div_rn(s1, row_scales)
            s2, s3 = tl.div_rn(s2, row_scales), tl.div_rn(s3, row_scales)
        made = (
            stored(weight(words, zeros, s0, 0), out_dtype),
            stored(weight(words, zeros, s0, 1), out_dtype),
            stored(weight(words, zeros, s1, 2), out_dtype),
            stored(weight(words, zeros, s1, 3), out_dtype),
            stored(weight(words, zeros, s2, 4), out_dtype),
            stored(weight(words, zeros, s2, 5), out_dtype),
            stored(weight(words, zeros, s3, 6), out_dtype),
            stored(weight(words, zeros, s3, 7), out_dtype),
        )
        dense = joined(made, 0, 128)
        mask = (rows < num_rows)[:, None] & (at * BLOCK + columns < num_columns)
        out = out_ptr + rows[:, None] * num_columns + at * BLOCK + columns
        tl.store(out, dense, mask=mask)
