# mypy: allow-untyped-defs
"""Paged decode attention in Triton: one query per sequence, its KV split over programs, a second kernel to merge the
splits (Flash-Decoding, Dao et al. 2023; here with paged KV and the query heads of one KV head packed into a tile).

Split count and tiles follow from shapes alone, so a launch can be captured in a CUDA graph. Knows nothing of batching
policy. Called through triton_ops.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.dependent_launch import begin, launch_options, wait
from pdserve.kernels.tiles import LOG2_E, AttentionTiles, attend, float32_tiles, load_rows

MIN_SPAN = tl.constexpr(256)  # tokens; a shorter split costs more in the merge than it wins
PROGRAMS_PER_SM = 8
MERGE_STEP = tl.constexpr(8)


def decode_tiles(group: int, head_dim: int, dtype: torch.dtype) -> AttentionTiles:
    """Tiles for `group` query heads per KV head; the stages of K and V fit Hopper's shared memory several times."""
    block_m = max(triton.next_power_of_2(group), 16)
    if dtype == torch.float32:
        return float32_tiles(block_m, head_dim)
    block_d = triton.next_power_of_2(head_dim)
    return AttentionTiles(block_m, 64 if block_d <= 128 else 32, block_d, 4, 3)


def num_decode_splits(num_programs: int, max_context_len: int, num_sms: int) -> int:
    """Splits of each context: enough programs to fill the device several times over, none below MIN_SPAN tokens."""
    wanted = triton.cdiv(PROGRAMS_PER_SM * num_sms, num_programs)
    return max(min(wanted, triton.cdiv(max_context_len, MIN_SPAN.value)), 1)


def launch_decode(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    context_lens: Tensor,
    scale: float,
    tiles: AttentionTiles,
    num_splits: int,
) -> Tensor:
    """reference.paged_decode on tensors whose rows are contiguous; returns [S, Hq, D]."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[1], kv.shape[3]
    out = torch.empty((num_seqs, num_heads, head_dim), dtype=q.dtype, device=q.device)
    maxima = torch.empty((num_seqs, num_heads, num_splits), dtype=torch.float32, device=q.device)
    sums = torch.empty_like(maxima)
    partial = out[:, :, None]
    if num_splits > 1:
        partial = torch.empty((num_seqs, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
    decode_kernel[(num_kv_heads, num_seqs, num_splits)](
        q,
        kv,
        block_tables,
        table_rows,
        context_lens,
        partial,
        maxima,
        sums,
        scale * LOG2_E,
        num_heads // num_kv_heads,
        block_size.bit_length() - 1,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        block_tables.stride(0),
        HEAD_DIM=head_dim,
        BLOCK_D=tiles.block_d,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(q.device),
    )
    if num_splits > 1:
        merge_kernel[(num_heads, num_seqs)](
            partial,
            maxima,
            sums,
            out,
            num_splits,
            scale * LOG2_E,
            HEAD_DIM=head_dim,
            BLOCK_D=tiles.block_d,
            BLOCK_SPLITS=max(triton.next_power_of_2(num_splits), MERGE_STEP.value),
            num_warps=2,
            **launch_options(q.device),
        )
    return out


@triton.jit(do_not_specialize=["group", "block_shift", "stride_table"])
def decode_kernel(
    q_ptr,  # [S, Hq, D]
    kv_ptr,  # [num_blocks, Hk, 2, block_size, D]
    table_ptr,  # int32 [num_slots, max_blocks]
    table_rows_ptr,  # int32 [S]
    context_ptr,  # int32 [S]
    out_ptr,  # [S, Hq, num_splits, D], contiguous
    max_ptr,  # float32 [S, Hq, num_splits], base 2
    sum_ptr,  # float32 [S, Hq, num_splits]
    scale_log2,
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
    PDL: tl.constexpr,
):
    """Program (KV head, sequence, split): normalised attention over the split, its largest score and its sum."""
    begin(PDL)
    wait(PDL)
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    num_heads = tl.num_programs(0) * group

    # Each sequence divides its own context, so the grid may be sized for a longer one (a captured graph).
    num_keys = tl.load(context_ptr + seq)
    span = tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_splits), BLOCK_N) * BLOCK_N, MIN_SPAN)
    first = split * span
    end = tl.minimum(first + span, num_keys)

    group_heads = tl.arange(0, BLOCK_M)
    heads = kv_head * group + group_heads
    in_group = group_heads < group
    q = load_rows(q_ptr + seq * stride_q_seq, heads.to(tl.int64) * stride_q_head, in_group, HEAD_DIM, BLOCK_D)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_positions = tl.zeros([BLOCK_M], tl.int32) + num_keys
    table = table_ptr + tl.load(table_rows_ptr + seq).to(tl.int64) * stride_table
    kv_head_ptr = kv_ptr + kv_head.to(tl.int64) * stride_kv_head
    acc, row_max, row_sum = attend(
        acc,
        row_max,
        row_sum,
        q,
        kv_head_ptr,
        table,
        first,
        end,
        row_positions,
        end,
        scale_log2,
        block_shift,
        stride_block,
        stride_plane,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        True,
    )

    out_rows = (seq * num_heads + heads) * num_splits + split
    dims = tl.arange(0, BLOCK_D)
    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    mask = in_group[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptr + out_rows[:, None] * HEAD_DIM + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    # Not as one log-sum: added to a large maximum, the logarithm of the sum would be rounded away.
    tl.store(max_ptr + out_rows, row_max, mask=in_group)
    tl.store(sum_ptr + out_rows, row_sum, mask=in_group)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    partial_ptr,  # float32 [S, Hq, num_splits, D]
    max_ptr,  # float32 [S, Hq, num_splits], of unscaled scores
    sum_ptr,  # float32 [S, Hq, num_splits]
    out_ptr,  # [S, Hq, D]
    num_splits,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (query head, sequence): the splits' outputs weighted by sum * exp(scaled max); zeros if every split is
    empty.
    """
    begin(PDL)
    wait(PDL)
    row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    first = row * num_splits
    splits = tl.arange(0, BLOCK_SPLITS)
    largest = tl.max(tl.load(max_ptr + first + splits, mask=splits < num_splits, other=float("-inf")), 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)

    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    total = tl.zeros([MERGE_STEP], tl.float32)
    for start in range(0, num_splits, MERGE_STEP):
        step = start + tl.arange(0, MERGE_STEP)
        in_range = step < num_splits
        split_max = tl.load(max_ptr + first + step, mask=in_range, other=float("-inf"))
        weights = tl.load(sum_ptr + first + step, mask=in_range, other=0.0) * tl.exp2(
            (split_max - largest) * scale_log2
        )
        mask = in_range[:, None] & (dims < HEAD_DIM)[None, :]
        part = tl.load(partial_ptr + ((first + step) * HEAD_DIM)[:, None] + dims[None, :], mask=mask, other=0.0)
        acc += tl.sum(part * weights[:, None], 0)
        total += weights
    weight = tl.sum(total, 0)
    out = acc / tl.where(weight > 0, weight, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
