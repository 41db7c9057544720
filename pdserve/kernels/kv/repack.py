# mypy: allow-untyped-defs
"""Triton kernel that moves KV rows between blocks of different sizes. The source is the staging
ring, whose blocks are those of a peer; the target is the own KV cache. If only the own KV cache is
in e4m3, the kernel rounds the rows. This file knows layouts, and nothing of transfers.
triton_ops.py calls it.
"""

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.codes import to_e4m3
from pdserve.kernels.launching.launch import launch, next_power_of_2

MAX_STEP = 1 << 14  # elements that a program moves at once


def launch_repack(
    source: Tensor,
    source_ids: Tensor,
    kv_cache: Tensor,
    block_ids: Tensor,
    skip: int,
    num_rows: int,
    scales: Tensor | None = None,
) -> None:
    """Does what reference.repack does, on contiguous blocks."""
    _, num_heads, num_layers, planes, source_size, head_dim = source.shape
    block_size = kv_cache.shape[4]
    rows = min(source_size, block_size)
    launch(
        repack_kernel,
        (-(-num_rows // rows), num_heads * num_layers * planes),
        (source, source_ids, kv_cache, block_ids, scales),
        (
            skip // rows,
            source_size // rows,
            block_size // rows,
            source.stride(0),
            kv_cache.stride(0),
        ),
        RUN=rows * head_dim,
        IS_ROUNDED=source.dtype != kv_cache.dtype,
        BLOCK=min(next_power_of_2(rows * head_dim), MAX_STEP),
        num_warps=4 if rows * head_dim <= 4096 else 8,
    )


@triton.jit(do_not_specialize=["skip", "source_runs", "block_runs"])
def repack_kernel(
    source_ptr,  # [num_slots, planes, source_runs * RUN]
    source_ids_ptr,  # int32
    kv_cache_ptr,  # [num_blocks, planes, block_runs * RUN]
    block_ids_ptr,  # int32
    scales_ptr,  # float32 [planes], or None: all are 1
    skip,
    source_runs,
    block_runs,
    stride_source,
    stride_block,
    RUN: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program moves a (run of neighbouring rows, plane). A plane is K or V of one head in one
    layer. A run has as many rows as the smaller of the two blocks.
    """
    run = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    there = skip + run
    source_block = tl.load(source_ids_ptr + there // source_runs).to(tl.int64)
    block = tl.load(block_ids_ptr + run // block_runs).to(tl.int64)
    source = (
        source_ptr
        + source_block * stride_source
        + (plane * source_runs + there % source_runs) * RUN
    )
    target = kv_cache_ptr + block * stride_block + (plane * block_runs + run % block_runs) * RUN
    for start in range(0, RUN, BLOCK):
        elements = start + tl.arange(0, BLOCK)
        mask = elements < RUN
        moved = tl.load(source + elements, mask=mask)
        if IS_ROUNDED:
            moved = moved.to(tl.float32)
            if scales_ptr is not None:
                moved = moved / tl.load(scales_ptr + plane)
            moved = to_e4m3(moved)
        tl.store(target + elements, moved, mask=mask)
