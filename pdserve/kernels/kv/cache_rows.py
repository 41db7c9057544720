# mypy: allow-untyped-defs
"""Triton kernels that write rows of the KV cache, normed and rotated on the way (rope_write_kv),
copy its blocks (copy_blocks), and gather a sequence's rows from them (gather_kv).

All offsets are int64, because KV caches exceed 2 ** 31 elements. This file knows nothing of who
owns a block. triton_ops.py calls it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.kv.ops import HeadNorms, RowScales
from pdserve.kernels.launching.codes import in_dtype, rounded_to_e4m3, to_e4m3
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.norm.elementwise import weighted

ROPE_TILE = 1024  # elements of half a head, over all heads of one program
COPY_BLOCK = 4096
GATHER_ROWS = 32


def launch_rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    norms: HeadNorms | None,
    scales: RowScales | None,
) -> None:
    """Does what reference.rope_write_kv does, and norms and rotates q and k in place. For a kv in
    e4m3 it also scales q, and rounds k and v, in place.

    q, k, v: the last dim is contiguous.
    cos, sin, weights of the norms, scales: contiguous.
    scales: must be None unless kv is in e4m3.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    block_half = next_power_of_2(head_dim // 2)
    q_heads, kv_heads = (
        min(next_power_of_2(heads), max(ROPE_TILE // block_half, 1))
        for heads in (num_heads, num_kv_heads)
    )
    q_tiles = cdiv(num_heads, q_heads)
    weights = (norms.q.weight, norms.k.weight) if norms is not None else (None, None)
    each = (scales.k, scales.v) if scales is not None else (None, None)
    launch(
        rope_write_kv_kernel,
        (num_tokens, q_tiles + cdiv(num_kv_heads, kv_heads)),
        (q, k, v, cos, sin, positions, kv, slot_mapping, *weights, *each),
        (
            num_heads,
            num_kv_heads,
            q_tiles,
            kv.shape[3].bit_length() - 1,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            *kv.stride()[:3],
            norms.q.eps if norms is not None else 0.0,
            norms.k.eps if norms is not None else 0.0,
        ),
        Q_PLUS_ONE=norms is not None and norms.q.plus_one,
        K_PLUS_ONE=norms is not None and norms.k.plus_one,
        HALF=head_dim // 2,
        BLOCK_HALF=block_half,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        num_warps=4,
        **launch_options(q.device),
    )


def launch_copy_blocks(kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """Does what reference.copy_blocks does, on a contiguous KV cache."""
    block_elements = kv_cache.stride(0)
    grid = (len(src), cdiv(block_elements, COPY_BLOCK))
    launch(
        copy_blocks_kernel,
        grid,
        (kv_cache, src, dst),
        (block_elements,),
        BLOCK=COPY_BLOCK,
        num_warps=8,
    )


def launch_gather_kv(
    kv: Tensor,
    block_tables: Tensor,
    table_row: Tensor,
    start: int,
    num_rows: int,
    dtype: torch.dtype,
) -> Tensor:
    """Does what reference.gather_kv does. start and num_rows must be multiples of block_size."""
    _, num_kv_heads, _, block_size, head_dim = kv.shape
    rows = min(block_size, GATHER_ROWS)
    gathered = torch.empty((2, num_rows, num_kv_heads, head_dim), dtype=dtype, device=kv.device)
    launch(
        gather_kv_kernel,
        (num_rows // rows, num_kv_heads),
        (kv, block_tables, table_row, gathered),
        (start, num_rows, block_size.bit_length() - 1, block_tables.stride(0), *kv.stride()[:3]),
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        ROWS=rows,
        num_warps=4,
    )
    return gathered


@triton.jit
def load_halves(pointers, mask, HALF: tl.constexpr):
    """Loads the two halves of heads whose first halves are at `pointers` [heads, BLOCK_HALF]."""
    first = tl.load(pointers, mask=mask, other=0.0)
    second = tl.load(pointers + HALF, mask=mask, other=0.0)
    return first, second


@triton.jit
def norm_halves(
    first,
    second,
    first_weight,  # float32 [BLOCK_HALF]
    second_weight,
    eps,
    HALF: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """Norms the halves [heads, BLOCK_HALF] of heads, which are padded with zeros. It rounds where
    rms_norm_kernel rounds."""
    dtype: tl.constexpr = first.dtype
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    scale = (1.0 / tl.sqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps))[:, None]
    first = weighted(a * scale, first_weight[None, :], dtype, PLUS_ONE)
    second = weighted(b * scale, second_weight[None, :], dtype, PLUS_ONE)
    return first, second


@triton.jit
def rotate(first, second, cos, sin):
    """Rotates heads [heads, BLOCK_HALF]; returns both halves."""
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    first = (a * cos[None, :] - b * sin[None, :]).to(first.dtype)
    second = (b * cos[None, :] + a * sin[None, :]).to(second.dtype)
    return first, second


@triton.jit
def store_halves(pointers, first, second, mask, HALF: tl.constexpr):
    """Stores heads [heads, BLOCK_HALF]; their first halves go to `pointers`."""
    tl.store(pointers, first, mask=mask)
    tl.store(pointers + HALF, second, mask=mask)


@triton.jit
def scaled(x, scale):
    """Multiplies rows x [heads, BLOCK_HALF] by the scales [heads] of their heads."""
    return (x.to(tl.float32) * scale[:, None]).to(x.dtype)


@triton.jit
def unscaled(x, scale_ptr, heads, in_range):
    """Divides float32 rows x [heads, BLOCK_HALF] by the scales of their heads. It multiplies by the
    inverse, which is exact for a power of two.

    scale_ptr: float32 [Hk], or None: all are 1.
    """
    x = x.to(tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + heads, mask=in_range, other=1.0)
        x *= tl.div_rn(1.0, scale)[:, None]
    return x


@triton.jit(do_not_specialize=["num_q_heads", "num_kv_heads", "q_tiles", "block_shift"])
def rope_write_kv_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [T, Hk, D]
    v_ptr,  # [T, Hk, D]
    cos_ptr,  # float32 [max_pos, HALF]
    sin_ptr,
    positions_ptr,  # [T]
    kv_ptr,  # [num_blocks, Hk, 2, block_size, D]
    slot_mapping_ptr,  # [T]
    q_norm_ptr,  # [D]; None, like k_norm_ptr, if heads have no norms
    k_norm_ptr,
    k_scale_ptr,  # float32 [Hk]; None, like v_scale_ptr, if all are 1 or kv is not in e4m3
    v_scale_ptr,
    num_q_heads,
    num_kv_heads,
    q_tiles,
    block_shift,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_block,
    stride_kv_head,
    stride_plane,
    q_eps,
    k_eps,
    Q_PLUS_ONE: tl.constexpr,
    K_PLUS_ONE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program handles (token, tile). The tiles of Q_HEADS heads of q come first, and then
    those of KV_HEADS heads of k and v."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    dims = tl.arange(0, BLOCK_HALF)
    if q_norm_ptr is not None:  # the weights do not depend on the kernel before
        weights = tl.where(tile < q_tiles, q_norm_ptr, k_norm_ptr) + dims
        first_weight = tl.load(weights, mask=dims < HALF, other=0.0).to(tl.float32)
        second_weight = tl.load(weights + HALF, mask=dims < HALF, other=0.0).to(tl.float32)

    wait(PDL)
    table_row = tl.load(positions_ptr + token).to(tl.int64) * HALF
    cos = tl.load(cos_ptr + table_row + dims, mask=dims < HALF, other=0.0)
    sin = tl.load(sin_ptr + table_row + dims, mask=dims < HALF, other=0.0)
    if tile < q_tiles:
        q_heads = tile * Q_HEADS + tl.arange(0, Q_HEADS)
        q_mask = (q_heads < num_q_heads)[:, None] & (dims < HALF)[None, :]
        q_rows = q_ptr + token * stride_q_token + (q_heads * stride_q_head)[:, None] + dims[None, :]
        q_first, q_second = load_halves(q_rows, q_mask, HALF)
        if q_norm_ptr is not None:
            q_first, q_second = norm_halves(
                q_first, q_second, first_weight, second_weight, q_eps, HALF, Q_PLUS_ONE
            )
        q_first, q_second = rotate(q_first, q_second, cos, sin)
        if k_scale_ptr is not None:
            kv_heads = q_heads // (num_q_heads // num_kv_heads)
            scale = tl.load(k_scale_ptr + kv_heads, mask=q_heads < num_q_heads, other=1.0)
            q_first, q_second = scaled(q_first, scale), scaled(q_second, scale)
        store_halves(q_rows, q_first, q_second, q_mask, HALF)
    else:
        heads = (tile - q_tiles) * KV_HEADS + tl.arange(0, KV_HEADS)
        in_range = heads < num_kv_heads
        mask = in_range[:, None] & (dims < HALF)[None, :]
        v_rows = v_ptr + token * stride_v_token + (heads * stride_v_head)[:, None] + dims[None, :]
        v_first = tl.load(v_rows, mask=mask)
        v_second = tl.load(v_rows + HALF, mask=mask)
        k_rows = k_ptr + token * stride_k_token + (heads * stride_k_head)[:, None] + dims[None, :]
        k_first, k_second = load_halves(k_rows, mask, HALF)
        if k_norm_ptr is not None:
            k_first, k_second = norm_halves(
                k_first, k_second, first_weight, second_weight, k_eps, HALF, K_PLUS_ONE
            )
        k_first, k_second = rotate(k_first, k_second, cos, sin)

        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        row = (
            kv_ptr
            + (slot >> block_shift) * stride_block
            + (slot & ((1 << block_shift) - 1)) * (2 * HALF)
        )
        kv_rows = row + (heads.to(tl.int64) * stride_kv_head)[:, None] + dims[None, :]
        if kv_ptr.dtype.element_ty == tl.float8e4nv:
            dtype: tl.constexpr = k_first.dtype
            k_first = unscaled(k_first, k_scale_ptr, heads, in_range)
            k_second = unscaled(k_second, k_scale_ptr, heads, in_range)
            v_first = unscaled(v_first, v_scale_ptr, heads, in_range)
            v_second = unscaled(v_second, v_scale_ptr, heads, in_range)
            store_halves(kv_rows, to_e4m3(k_first), to_e4m3(k_second), mask, HALF)
            store_halves(kv_rows + stride_plane, to_e4m3(v_first), to_e4m3(v_second), mask, HALF)
            k_first = rounded_to_e4m3(k_first, dtype)
            k_second = rounded_to_e4m3(k_second, dtype)
            v_first = rounded_to_e4m3(v_first, dtype)
            v_second = rounded_to_e4m3(v_second, dtype)
            store_halves(v_rows, v_first, v_second, mask, HALF)
        else:
            store_halves(kv_rows, k_first, k_second, mask, HALF)
            store_halves(kv_rows + stride_plane, v_first, v_second, mask, HALF)
        store_halves(k_rows, k_first, k_second, mask, HALF)


@triton.jit
def copy_blocks_kernel(
    kv_cache_ptr,  # [num_blocks, block_elements], contiguous
    src_ptr,  # int64 [N]
    dst_ptr,  # int64 [N]
    block_elements,
    BLOCK: tl.constexpr,
):
    """Each program copies one piece of a block of one (source, target) pair."""
    src = tl.load(src_ptr + tl.program_id(0)).to(tl.int64) * block_elements
    dst = tl.load(dst_ptr + tl.program_id(0)).to(tl.int64) * block_elements
    elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = elements < block_elements
    tl.store(
        kv_cache_ptr + dst + elements, tl.load(kv_cache_ptr + src + elements, mask=mask), mask=mask
    )


@triton.jit(
    do_not_specialize=["start", "num_rows", "block_shift", "stride_table"],
    do_not_specialize_on_alignment=["table_row_ptr"],  # it comes after those of the decodes
)
def gather_kv_kernel(
    kv_ptr,  # [num_blocks, Hk, 2, block_size, D]
    table_ptr,  # int32 [num_slots, max_blocks]
    table_row_ptr,  # int32 [1]
    gathered_ptr,  # [2, num_rows, Hk, D], in kv's dtype, or in a wider one for codes
    start,
    num_rows,
    block_shift,
    stride_table,
    stride_block,
    stride_kv_head,
    stride_plane,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each program gathers (ROWS rows of a block, KV head)."""
    first = tl.program_id(0) * ROWS
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    position = start + first
    table = table_ptr + tl.load(table_row_ptr).to(tl.int64) * stride_table
    block = tl.load(table + (position >> block_shift)).to(tl.int64)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    mask = (dims < HEAD_DIM)[None, :]
    in_block = (position & ((1 << block_shift) - 1)) + rows
    source = kv_ptr + block * stride_block + kv_head.to(tl.int64) * stride_kv_head
    source += in_block[:, None] * HEAD_DIM + dims[None, :]
    target = ((first + rows).to(tl.int64) * num_kv_heads + kv_head)[:, None] * HEAD_DIM + dims[
        None, :
    ]
    plane = num_rows.to(tl.int64) * num_kv_heads * HEAD_DIM
    dtype: tl.constexpr = gathered_ptr.dtype.element_ty
    k = in_dtype(tl.load(source, mask=mask), dtype)
    v = in_dtype(tl.load(source + stride_plane, mask=mask), dtype)
    tl.store(gathered_ptr + target, k, mask=mask)
    tl.store(gathered_ptr + plane + target, v, mask=mask)
