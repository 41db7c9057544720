# mypy: allow-untyped-defs
"""Dequantises a matrix of int4 into a scratch tensor, for products of so many rows that those of
dense matrices are the faster.

The numbers are those of the CPU twin, bit for bit. Knows no product. Called by triton_ops.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import cdiv, launch
from pdserve.kernels.linear.int4.numbers import BLOCK, LANES
from pdserve.kernels.linear.matrix import Matrix

TILE_ROWS = 8  # of a program, which takes TILE_COLUMNS of each
TILE_COLUMNS = 512
NUM_WARPS = 4

_scratches: dict[tuple[torch.device, torch.dtype], Tensor] = {}
_captured: list[Tensor] = []  # read by CUDA graphs, so that they outlive their successors


def dequantised_into_scratch(m: Matrix, dtype: torch.dtype) -> Tensor:
    """`[out, in]` of dtype, contiguous, valid until the next call for this device and dtype. That
    is why it must not be used in two streams of one device at once."""
    assert m.scales is not None and m.zeros is not None
    rows, columns = m.shape
    dense = scratch(rows * columns, dtype, m.data.device).view(rows, columns)
    launch(
        dequantise_kernel,
        (cdiv(rows, TILE_ROWS), cdiv(columns, TILE_COLUMNS)),
        (m.data, m.scales, m.zeros, dense),
        (rows, columns, m.data.stride(0), m.scales.stride(1), m.zeros.stride(1)),
        GROUP=m.group[1],
        ROWS=TILE_ROWS,
        COLUMNS=TILE_COLUMNS,
        num_warps=NUM_WARPS,
        **launch_options(m.data.device),
    )
    return dense


def scratch(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[size]`: the front of the one scratch tensor of a device and dtype, which grows to the
    largest size.

    A CUDA graph that is being captured gets the tensor that is there, which is kept from then on,
    or one from the graph's own memory where that is too small.
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


@triton.jit(do_not_specialize=["num_rows"])
def dequantise_kernel(
    words_ptr,  # int32 [num_rows, 16 * blocks of 128 columns]
    scales_ptr,  # float32 [num_rows, num_groups], the rows of a group together
    zeros_ptr,  # int32 [num_rows, blocks of 128 columns], likewise: four in each
    out_ptr,  # [num_rows, num_columns], contiguous
    num_rows,
    num_columns,
    stride_words,
    stride_scales,
    stride_zeros,
    GROUP: tl.constexpr,  # columns; 0: all
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of ROWS, tile of COLUMNS). Eight columns read each word, all but the first from
    the nearest cache, so that what is written is contiguous."""
    begin(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    at = (rows * stride_words)[:, None] + (columns // BLOCK * LANES + columns % LANES)[None, :]
    words = tl.load(words_ptr + at, mask=mask, other=0)
    group = columns // GROUP if GROUP else columns * 0
    scales_at = scales_ptr + rows[:, None] + (group * stride_scales)[None, :]
    zeros_at = zeros_ptr + rows[:, None] + (columns // BLOCK * stride_zeros)[None, :]
    scales = tl.load(scales_at, mask=mask, other=0.0)
    zeros = tl.load(zeros_at, mask=mask, other=0) >> (columns % BLOCK // 32 * 8)[None, :] & 0xFF
    shifts = (columns % BLOCK // LANES * 4)[None, :]
    dense = ((words >> shifts & 15) - zeros).to(tl.float32) * scales

    wait(PDL)
    out = out_ptr + (rows * num_columns)[:, None] + columns[None, :]
    tl.store(out, dense.to(out_ptr.dtype.element_ty), mask=mask)
