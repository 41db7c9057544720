# mypy: allow-untyped-defs
"""Paged decode attention in Triton: one query per sequence, with the KV of the whole batch divided
into equal shares. The method is Flash-Decoding (Dao et al. 2023) with the work division of Stream-K
(Osama et al. 2023). The query heads of one KV head share a tile.

The work is a line of chunks of BLOCK_N keys, ordered by sequence and then by KV head. An item is
one KV head of one sequence. Program p takes chunks p * share up to (p + 1) * share, whatever items
they belong to. If one program holds a whole item, it writes the result at once; a second kernel
merges the parts of the other items. The grid follows from shapes, and the shares follow from
context_lens on the device. So one captured CUDA graph is balanced for any contexts, and padding
rows are free. This file knows nothing of batching policy. triton_ops.py calls it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.attention.spec import AttentionSpec, Paged
from pdserve.kernels.attention.tiles import (
    LOG2_E,
    AttentionTiles,
    attend,
    begin_with_sinks,
    float32_tiles,
    in_even_and_odd,
    in_halves,
    load_rows,
    unscaled_cap,
)
from pdserve.kernels.attention.work_line import (
    ITEM_COST,
    MIN_SHARE,
    first_chunk,
    item_at,
    item_of,
    line_of_work,
)
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.launching.notes import scratch

PROGRAMS_PER_SM = 2  # as many as shared memory holds
PROGRAMS_OF_CODES = 3  # as many as registers allow, where K and V are in e4m3
MERGE_STEP = tl.constexpr(32)


def decode_tiles(group: int, head_dim: int, dtype: torch.dtype) -> AttentionTiles:
    """Returns the tiles for `group` query heads per KV head.

    Five stages keep two tiles of K and V in flight, because table entries are loaded ahead of them.
    Hopper's shared memory holds that twice.
    """
    block_m = max(next_power_of_2(group), 16)
    if dtype == torch.float32:
        return float32_tiles(block_m, head_dim)
    block_d = next_power_of_2(head_dim)
    return AttentionTiles(block_m, 64 if block_d <= 128 else 32, block_d, 4, 5)


def num_decode_programs(
    num_items: int, max_context_len: int, block_n: int, num_sms: int, has_codes: bool = False
) -> int:
    """Number of programs: all are resident at once, and no more than `num_items` contexts of
    max_context_len could use."""
    most = num_items * (max(cdiv(max_context_len, block_n), 1) + ITEM_COST.value)
    per_sm = PROGRAMS_OF_CODES if has_codes else PROGRAMS_PER_SM
    return min(per_sm * num_sms, cdiv(most, MIN_SHARE.value))


def launch_decode(
    q: Tensor,
    kv: Tensor,
    paged: Paged,
    spec: AttentionSpec,
    tiles: AttentionTiles,
    num_programs: int,
    out: Tensor,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Runs AttentionOps.decode on tensors whose rows are contiguous.

    out [S, Hq, D], v_scales and sinks must be contiguous as a whole.
    """
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[1], kv.shape[3]
    group = num_heads // num_kv_heads
    # Two classes of sizes keep the number of compiled kernels small.
    block_s = 32 if num_seqs <= 32 else max(next_power_of_2(num_seqs), 256)
    partial = scratch(2 * num_programs, group, head_dim, like=q)
    maxima, sums = (scratch(2 * num_programs, group, like=q) for _ in range(2))
    scale_log2 = spec.scale * LOG2_E
    window = spec.window or 0
    launch(
        decode_kernel,
        (num_programs,),
        (
            q,
            kv,
            paged.tables,
            paged.rows,
            paged.context_lens,
            v_scales,
            sinks,
            out,
            partial,
            maxima,
            sums,
        ),
        (
            scale_log2,
            unscaled_cap(spec),
            window,
            num_seqs,
            num_kv_heads,
            group,
            block_size.bit_length() - 1,
            *q.stride()[:2],
            *kv.stride()[:3],
            paged.tables.stride(0),
        ),
        HEAD_DIM=head_dim,
        BLOCK_D=tiles.block_d,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_S=block_s,
        CAPPED=spec.soft_cap is not None,
        WINDOW=window > 0,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(q.device),
    )
    if num_programs > 1:
        num_items = num_seqs * num_kv_heads
        launch(
            merge_kernel,
            (min(num_items, num_programs - 1), group),
            (partial, maxima, sums, paged.context_lens, v_scales, out),
            (scale_log2, window, num_seqs, num_kv_heads, num_programs),
            HEAD_DIM=head_dim,
            BLOCK_D=tiles.block_d,
            BLOCK_N=tiles.block_n,
            BLOCK_S=block_s,
            WINDOW=window > 0,
            BY_ITEM=num_items < num_programs,
            num_warps=4,
            **launch_options(q.device),
        )


@triton.jit(
    do_not_specialize=[
        "cap",
        "window",
        "num_seqs",
        "num_kv_heads",
        "group",
        "block_shift",
        "stride_table",
    ]
)
def decode_kernel(
    q_ptr,  # [S, Hq, D]
    kv_ptr,  # [num_blocks, Hk, 2, block_size, D]
    table_ptr,  # int32 [num_slots, max_blocks]
    table_rows_ptr,  # int32 [S]
    context_ptr,  # int32 [S]
    v_scale_ptr,  # float32 [Hk], or None: all are 1
    sink_ptr,  # float32 [Hq], or None: there are no sinks
    out_ptr,  # [S, Hq, D], contiguous
    partial_ptr,  # float32 [2 * programs, group, D]: not divided by their sums
    max_ptr,  # float32 [2 * programs, group], of unscaled scores
    sum_ptr,  # float32 [2 * programs, group]
    scale_log2,
    cap,
    window,
    num_seqs,
    num_kv_heads,
    group,
    block_shift,
    stride_q_seq,
    stride_q_head,
    stride_block,
    stride_kv_head,
    stride_plane,
    stride_table,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p computes its share of the line.

    Whole items go to out. If an item began in an earlier share, the program leaves its part in slot
    2p. If an item continues into the next share, the program leaves its part in slot 2p + 1.
    """
    begin(PDL)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    lens, ends, total, share = line_of_work(
        context_ptr, window, num_seqs, num_kv_heads, num_programs, BLOCK_N, BLOCK_S, WINDOW
    )
    seqs = tl.arange(0, BLOCK_S)
    table_rows = tl.load(table_rows_ptr + seqs, mask=seqs < num_seqs, other=0)
    group_heads = tl.arange(0, BLOCK_M)
    in_group = group_heads < group
    dims = tl.arange(0, BLOCK_D)
    mask = in_group[:, None] & (dims < HEAD_DIM)[None, :]
    has_codes: tl.constexpr = kv_ptr.dtype.element_ty == tl.float8e4nv
    HALVES: tl.constexpr = has_codes and q_ptr.dtype.element_ty != tl.float32
    PAIRS: tl.constexpr = HALVES and BLOCK_D >= 32  # tensor cores take no less than 16 columns
    WIDTH: tl.constexpr = BLOCK_D // 2 if PAIRS else BLOCK_D

    wait(PDL)
    at = program * share
    stop = tl.minimum(at + share, total)
    while at < stop:
        seq, num_keys, kv_head, item_start, item_end = item_at(
            at, lens, ends, window, num_kv_heads, BLOCK_N, BLOCK_S, WINDOW
        )
        part_end = tl.minimum(item_end, stop)
        if at < part_end:
            first = first_chunk(num_keys, window, BLOCK_N, WINDOW)
            end = tl.minimum((first + part_end - item_start) * BLOCK_N, num_keys)
            heads = kv_head * group + group_heads
            q_rows = seq.to(tl.int64) * stride_q_seq + heads.to(tl.int64) * stride_q_head
            given = load_rows(q_ptr, q_rows, in_group, HEAD_DIM, BLOCK_D)
            scaled, power = in_halves(given) if HALVES else (given, None)
            q = in_even_and_odd(scaled) if PAIRS else (scaled,)
            none = tl.zeros([BLOCK_M, WIDTH], tl.float32)
            table_row = tl.sum(tl.where(seqs == seq, table_rows, 0), 0)
            row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            row_sum = tl.zeros([BLOCK_M], tl.float32)
            if sink_ptr is not None:  # only the first part of an item counts the sinks
                row_max, row_sum = begin_with_sinks(
                    sink_ptr + heads, in_group & (at == item_start), scale_log2
                )
            acc, row_max, row_sum = attend(
                (none, none) if PAIRS else (none,),
                row_max,
                row_sum,
                q,
                power,
                None,
                0,
                kv_ptr + kv_head.to(tl.int64) * stride_kv_head,
                table_ptr + table_row.to(tl.int64) * stride_table,
                (first + at - item_start) * BLOCK_N,
                end,
                tl.zeros([BLOCK_M], tl.int32) + num_keys - 1,
                end,
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
                PAIRS,
            )
            sums = tl.reshape(tl.join(acc[0], acc[1]), (BLOCK_M, BLOCK_D)) if PAIRS else acc[0]
            if (at == item_start) & (part_end == item_end):
                out = sums / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
                if v_scale_ptr is not None:
                    out *= tl.load(v_scale_ptr + kv_head)
                out_rows = (seq.to(tl.int64) * num_kv_heads * group + heads) * HEAD_DIM
                tl.store(
                    out_ptr + out_rows[:, None] + dims[None, :],
                    out.to(out_ptr.dtype.element_ty),
                    mask=mask,
                )
            else:
                rows = (2 * program + (at == item_start).to(tl.int32)) * group + group_heads
                tl.store(partial_ptr + rows[:, None] * HEAD_DIM + dims[None, :], sums, mask=mask)
                # Maximum and sum are stored apart, not as one log-sum: added to a large maximum,
                # the logarithm of the sum would be rounded away.
                tl.store(max_ptr + rows, row_max, mask=in_group)
                tl.store(sum_ptr + rows, row_sum, mask=in_group)
        at = item_end + ITEM_COST


@triton.jit(do_not_specialize=["window", "num_seqs", "num_kv_heads", "num_programs"])
def merge_kernel(
    partial_ptr,  # float32 [2 * programs, group, D]
    max_ptr,  # float32 [2 * programs, group], of unscaled scores
    sum_ptr,  # float32 [2 * programs, group]
    context_ptr,  # int32 [S]
    v_scale_ptr,  # float32 [Hk], or None: all are 1
    out_ptr,  # [S, Hq, D]
    scale_log2,
    window,
    num_seqs,
    num_kv_heads,
    num_programs,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr,
    BY_ITEM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merges the parts of items that continue past the share in which they begin.

    With BY_ITEM, a program handles (item, head of the group). Without it, a program handles (p,
    head of the group): it merges the item that continues past the share of program p of
    decode_kernel. The host chooses whichever needs fewer programs. The parts are weighted by
    exp(scaled max), added up, and divided by the sum of their sums, weighted likewise.
    """
    begin(PDL)
    group_head = tl.program_id(1)
    group = tl.num_programs(1)
    lens, ends, total, share = line_of_work(
        context_ptr, window, num_seqs, num_kv_heads, num_programs, BLOCK_N, BLOCK_S, WINDOW
    )
    if BY_ITEM:
        seq = tl.program_id(0) // num_kv_heads
        kv_head = tl.program_id(0) % num_kv_heads
        _, item_start, item_end = item_of(
            seq, kv_head, lens, ends, window, num_kv_heads, BLOCK_N, BLOCK_S, WINDOW
        )
        first = item_start // share
        is_ours = True
    else:
        first = tl.program_id(0)
        border = tl.minimum((first + 1) * share, total) - 1
        seq, _, kv_head, item_start, item_end = item_at(
            border, lens, ends, window, num_kv_heads, BLOCK_N, BLOCK_S, WINDOW
        )
        is_ours = item_start >= first * share
    # Waits even if there is nothing to do: the next kernel relies on all that ran before this one.
    wait(PDL)
    if is_ours & (item_end > (first + 1) * share):
        last = (item_end - 1) // share
        dims = tl.arange(0, BLOCK_D)
        acc = tl.zeros([BLOCK_D], tl.float32)
        weight = tl.zeros([], tl.float32)
        row_max = tl.full([], float("-inf"), tl.float32)
        for start in range(first, last + 1, MERGE_STEP):
            programs = start + tl.arange(0, MERGE_STEP)
            valid = programs <= last
            rows = (2 * programs + (programs == first).to(tl.int32)) * group + group_head
            part_max = tl.load(max_ptr + rows, mask=valid, other=float("-inf"))
            part_sum = tl.load(sum_ptr + rows, mask=valid, other=0.0)
            mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
            part = tl.load(
                partial_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0
            )
            new_max = tl.maximum(row_max, tl.max(part_max, 0))
            weights = tl.exp2((part_max - new_max) * scale_log2)
            keep = tl.exp2((row_max - new_max) * scale_log2)
            acc = acc * keep + tl.sum(part * weights[:, None], 0)
            weight = weight * keep + tl.sum(part_sum * weights, 0)
            row_max = new_max
        head = (seq.to(tl.int64) * num_kv_heads + kv_head) * group + group_head
        out = acc / weight
        if v_scale_ptr is not None:
            out *= tl.load(v_scale_ptr + kv_head)
        tl.store(
            out_ptr + head * HEAD_DIM + dims,
            out.to(out_ptr.dtype.element_ty),
            mask=dims < HEAD_DIM,
        )
