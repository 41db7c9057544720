# mypy: allow-untyped-defs
"""Paged causal prefill attention in Triton: queries of many sequences in one launch, each over its
own paged KV. The method is FlashAttention-2 (Dao 2023). Here the query heads of one KV head share a
tile, so short chunks fill it too.

A short chunk deep in a prompt has few tiles, and each of them has many keys. Then several programs
share the keys of a tile (shares.py).

Tiles and shares follow from shapes alone. This file knows nothing of chunking policy. triton_ops.py
calls it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pdserve.kernels.attention.shares import LEAST_SHARE, Parts
from pdserve.kernels.attention.spec import AttentionSpec, Prefills
from pdserve.kernels.attention.tiles import (
    LOG2_E,
    AttentionTiles,
    attend,
    begin_with_sinks,
    float32_tiles,
    in_halves,
    load_rows,
    unscaled_cap,
)
from pdserve.kernels.launching.launch import cdiv, is_hopper, launch, next_power_of_2


def prefill_tiles(
    group: int, num_rows: int, head_dim: int, block_size: int, dtype: torch.dtype, num_sms: int
) -> AttentionTiles:
    """Returns the tiles for Hopper and num_rows = tokens * query heads.

    With pointers, 4 warps would spill the addresses of the KV rows. With TMA 4 warps suffice, and
    two programs fit a multiprocessor. A small amount of work is cut finer, for a shorter tail.
    """
    if dtype == torch.float32:
        return float32_tiles(max(next_power_of_2(group), 32), head_dim)
    block_d = next_power_of_2(head_dim)
    if block_d > 128:
        return AttentionTiles(128, 64, block_d, 8, 2)
    if block_size < 64:
        return AttentionTiles(128, 64, block_d, 8, 5)
    if is_cut_finely(num_rows, num_sms):
        return AttentionTiles(64, 64, block_d, 4, 5)
    return AttentionTiles(128, 64, block_d, 4, 3)


def is_cut_finely(num_rows: int, num_sms: int) -> bool:
    """True if so little work has finer tiles, where there are such, and may share the keys of a
    tile. warm_prefill() compiles shared keys for no other tiles."""
    return num_rows <= 4 * num_sms * 128


def kv_matrix(kv: Tensor, tiles: AttentionTiles) -> TensorDescriptor | None:
    """Returns one layer `[num_blocks, Hk, 2, block_size, D]` of a KV cache as a matrix [rows, D],
    in tiles that TMA loads. The matrix begins at the layer's first row.

    Returns None if TMA cannot load it: no tile may span two blocks, rows must be 16-byte aligned,
    and their numbers must fit int32.
    """
    num_blocks, num_kv_heads, _, block_size, head_dim = kv.shape
    num_rows = (
        (num_blocks - 1) * kv.stride(0) + (num_kv_heads - 1) * kv.stride(1)
    ) // head_dim + 2 * block_size
    aligned = head_dim * kv.element_size() % 16 == 0 and kv.data_ptr() % 16 == 0
    if (
        block_size % tiles.block_n
        or not aligned
        or num_rows >= 2**31
        or (kv.is_cuda and not is_hopper(kv.device))
    ):
        return None
    rows = kv.as_strided((num_rows, head_dim), (head_dim, 1))
    return TensorDescriptor.from_tensor(rows, [tiles.block_n, tiles.block_d])


def launch_prefill(
    q: Tensor,
    kv: Tensor,
    prefills: Prefills,
    spec: AttentionSpec,
    tiles: AttentionTiles,
    out: Tensor,
    max_query_len: int,
    skip: int = 0,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
    splits: int = 1,
) -> None:
    """Runs AttentionOps.prefill on tensors whose rows are contiguous.

    out [T, Hq, D], v_scales, sinks: contiguous as a whole.
    skip: the first rows of each sequence, which another kernel has written.
    splits: number of programs that share the keys of a tile, 1 with a window or with skip.
    """
    paged = prefills.paged
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[1]
    block_size = kv.shape[3]
    group = num_heads // num_kv_heads
    tile_len = tiles.block_m // group
    num_seqs = len(paged.context_lens)
    grid = (cdiv(max_query_len - skip, tile_len), num_kv_heads, num_seqs * splits + 1)
    parts = Parts.of(q, splits) if splits > 1 else None
    scale_log2 = spec.scale * LOG2_E
    launch(
        prefill_kernel,
        grid,
        (
            q,
            kv,
            kv_matrix(kv, tiles),
            paged.tables,
            paged.rows,
            paged.context_lens,
            prefills.query_starts,
            v_scales,
            sinks,
            out,
            parts and parts.sums,
            parts and parts.maxima,
            parts and parts.totals,
        ),
        (
            scale_log2,
            unscaled_cap(spec),
            spec.window or 0,
            num_tokens,
            splits,
            skip,
            group,
            tile_len,
            block_size.bit_length() - 1,
            *q.stride()[:2],
            *kv.stride()[:3],
            paged.tables.stride(0),
        ),
        HEAD_DIM=head_dim,
        BLOCK_D=tiles.block_d,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        CAPPED=spec.soft_cap is not None,
        WINDOW=spec.window is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if parts is not None:
        parts.merge(prefills.query_starts, group, v_scales, scale_log2, out)


@triton.jit(
    do_not_specialize=[
        "cap",
        "window",
        "num_tokens",
        "num_splits",
        "skip",
        "group",
        "tile_len",
        "block_shift",
        "stride_table",
    ],
    # These tensors of the prefills begin after those of the decodes, so their alignment changes
    # from step to step.
    do_not_specialize_on_alignment=["table_rows_ptr", "context_ptr", "starts_ptr"],
)
def prefill_kernel(
    q_ptr,  # [T, Hq, D]
    kv_ptr,  # [num_blocks, Hk, 2, block_size, D]
    kv_matrix,  # None, or kv as [rows, D] in tiles [BLOCK_N, BLOCK_D]
    table_ptr,  # int32 [num_slots, max_blocks]
    table_rows_ptr,  # int32 [S]
    context_ptr,  # int32 [S]
    starts_ptr,  # int32 [S + 1]
    v_scale_ptr,  # float32 [Hk], or None: all are 1
    sink_ptr,  # float32 [Hq], or None: there are no sinks
    out_ptr,  # [T, Hq, D], contiguous
    partial_ptr,  # float32 [num_splits, T, Hq, D], or None: a tile is one program's
    max_ptr,  # float32 [num_splits, T, Hq], of unscaled scores
    sum_ptr,  # float32 [num_splits, T, Hq]
    scale_log2,
    cap,
    window,
    num_tokens,
    num_splits,
    skip,
    group,
    tile_len,
    block_shift,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_kv_head,
    stride_plane,
    stride_table,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Each program computes a (tile of tile_len positions, KV head, sequence), or with partial_ptr
    one of num_splits shares of its keys. Sequence S, past the last, zeroes the padding rows."""
    # The longest tiles of a head start first, and its short ones fill the tail. Heads are the outer
    # axis, so programs that run at the same time share one head's KV in L2.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    num_seqs = tl.num_programs(2) - 1
    after = 0  # shares of the keys that come after this one
    if partial_ptr is not None:
        after = num_splits - 1 - tl.program_id(2) % num_splits
        seq = seq // num_splits
        num_seqs = num_seqs // num_splits
    num_heads = tl.num_programs(1) * group

    # Row r of the tile is query head r % group of the tile's position r // group.
    row = tl.arange(0, BLOCK_M)
    row_offset = row // group
    heads = kv_head * group + row % group
    in_tile = row_offset < tile_len
    dims = tl.arange(0, BLOCK_D)
    in_head = (dims < HEAD_DIM)[None, :]

    seq_start = tl.load(starts_ptr + seq)
    if seq == num_seqs:
        zeros = tl.zeros([BLOCK_M, BLOCK_D], out_ptr.dtype.element_ty)
        for start in range(seq_start + tile * tile_len, num_tokens, tl.num_programs(0) * tile_len):
            tokens = start + row_offset
            rows = (tokens.to(tl.int64) * num_heads + heads) * HEAD_DIM
            mask = (in_tile & (tokens < num_tokens))[:, None] & in_head
            tl.store(out_ptr + rows[:, None] + dims[None, :], zeros, mask=mask)
    else:
        first = skip + tile * tile_len
        query_len = tl.load(starts_ptr + seq + 1) - seq_start
        if first < query_len:
            num_keys = tl.load(context_ptr + seq)
            tokens = (seq_start + first + row_offset).to(tl.int64)
            in_seq = in_tile & (first + row_offset < query_len)
            q = load_rows(
                q_ptr, tokens * stride_q_token + heads * stride_q_head, in_seq, HEAD_DIM, BLOCK_D
            )
            power = None
            has_codes: tl.constexpr = kv_ptr.dtype.element_ty == tl.float8e4nv
            if has_codes and q_ptr.dtype.element_ty != tl.float32:
                q, power = in_halves(q)

            first_position = num_keys - query_len + first
            row_positions = first_position + row_offset
            acc = (tl.zeros([BLOCK_M, BLOCK_D], tl.float32),)
            row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            row_sum = tl.zeros([BLOCK_M], tl.float32)
            if sink_ptr is not None:
                counts = in_seq & (after == 0)  # only one share counts the sinks
                row_max, row_sum = begin_with_sinks(sink_ptr + heads, counts, scale_log2)
            table = table_ptr + tl.load(table_rows_ptr + seq).to(tl.int64) * stride_table
            kv_head_ptr = kv_ptr + kv_head.to(tl.int64) * stride_kv_head
            first_row = kv_head * (stride_kv_head // HEAD_DIM).to(tl.int32)
            end = tl.minimum(first_position + tile_len, num_keys)
            if WINDOW:  # all keys need a mask, from the first key that the tile's first row sees on
                seen_by_all = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
            else:
                seen_by_all = (first_position + 1) // BLOCK_N * BLOCK_N
                begin = 0
                stop = seen_by_all
                if partial_ptr is not None:
                    # Cut from the end: the last share has a key that every row sees, if there are
                    # any, and it has the masked keys. The first shares may have none.
                    share = tl.cdiv(seen_by_all, num_splits * BLOCK_N) * BLOCK_N
                    share = tl.maximum(share, LEAST_SHARE)
                    stop = tl.maximum(seen_by_all - after * share, 0)
                    begin = tl.maximum(stop - share, 0)
                    end = tl.where(after == 0, end, seen_by_all)
                acc, row_max, row_sum = attend(
                    acc,
                    row_max,
                    row_sum,
                    (q,),
                    power,
                    kv_matrix,
                    first_row,
                    kv_head_ptr,
                    table,
                    begin,
                    stop,
                    row_positions,
                    num_keys,
                    scale_log2,
                    cap,
                    window,
                    block_shift,
                    stride_block,
                    stride_plane,
                    HEAD_DIM,
                    BLOCK_D,
                    BLOCK_N,
                    False,
                    CAPPED,
                    False,
                    False,
                )
            acc, row_max, row_sum = attend(
                acc,
                row_max,
                row_sum,
                (q,),
                power,
                None,
                first_row,
                kv_head_ptr,
                table,
                seen_by_all,
                end,
                row_positions,
                num_keys,
                scale_log2,
                cap,
                window,
                block_shift,
                stride_block,
                stride_plane,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_N,
                True,
                CAPPED,
                WINDOW,
                False,
            )
            # The rows are computed again, from a value that the compiler cannot know to be 0. If
            # they were kept over the loops, they would take the registers of acc.
            row += tl.minimum(num_keys, 0)
            row_offset = row // group
            in_seq = (row_offset < tile_len) & (first + row_offset < query_len)
            tokens = (seq_start + first + row_offset).to(tl.int64)
            rows = tokens * num_heads + kv_head * group + row % group
            mask = in_seq[:, None] & in_head
            if partial_ptr is not None:
                rows += (num_splits - 1 - after) * num_tokens * num_heads
                mask = mask & ((after == 0) | (begin < stop))
                tl.store(partial_ptr + rows[:, None] * HEAD_DIM + dims[None, :], acc[0], mask=mask)
                tl.store(max_ptr + rows, row_max, mask=in_seq)
                tl.store(sum_ptr + rows, row_sum, mask=in_seq)
            else:
                out = acc[0] / row_sum[:, None]
                if v_scale_ptr is not None:
                    out *= tl.load(v_scale_ptr + kv_head)
                out = out.to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + rows[:, None] * HEAD_DIM + dims[None, :], out, mask=mask)
