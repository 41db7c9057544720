# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Paged attention over latents in Triton, in the latent's space. Decodes and prompts use one
kernel.

All heads share one row per key. It is read once for all heads in a tile, and its first RANK columns
are also the values. Rows are read in pieces of few columns. A row of a tile is one head of one
query, so a decode of 16 heads and a prompt fill tiles in the same way. The keys of a decode are
divided into equal parts for several programs, and a second kernel merges the results
(Flash-Decoding, Dao et al. 2023). triton_ops.py calls this file.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.attention.spec import AttentionSpec, Paged
from pdserve.kernels.attention.tiles import LOG2_E
from pdserve.kernels.launching.checks import num_sms
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.dot import dot
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2, power_of_2_below

MIN_PART = 256  # keys; a smaller part costs more in the merge than it wins
MAX_PARTS = 32
PARTED = [
    MIN_PART << i for i in range(MAX_PARTS.bit_length())
]  # one context length for every number of parts
# Columns of a load: as many as eight lanes read. Then a thread has few rows, whose addresses are
# most of the instructions of a step.
PIECE = 64
MERGE_WARPS = 4
MERGE_BLOCK = 128  # columns of a program


@dataclass(frozen=True)
class LatentTiles:
    """Constants of a launch. rows: rows (heads of queries) of a program; keys: keys of a step."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def latent_tiles(num_rows: int, dtype: torch.dtype) -> LatentTiles:
    """Returns the tiles for num_rows, the number of rows (heads of queries) of the longest
    sequence.

    The sums of a row are as wide as the latent, so they soon fill the registers of a program.
    Blocks are looked up two stages before their rows are needed; so with five stages or more, the
    rows of two steps are in flight.
    """
    if dtype == torch.float32:
        return LatentTiles(16, 16, 8, 1)
    if num_rows <= 16:
        return LatentTiles(16, 32, 4, 5)
    return LatentTiles(64, 32, 8, 5)


def launch_latent(
    q: Tensor,
    kv: Tensor,
    paged: Paged,
    spec: AttentionSpec,
    out: Tensor,
    query_starts: Tensor | None = None,
    max_query_len: int = 1,
    tiles: LatentTiles | None = None,
) -> None:
    """Runs LatentOps.decode, or prefill if query_starts is given.

    out: `[T, Hq, out_width]`, contiguous.
    tiles: instead of latent_tiles()'s choice.
    """
    num_tokens, num_heads, width = q.shape
    num_seqs = len(paged.context_lens)
    tiles = tiles or latent_tiles(max_query_len * num_heads, q.dtype)
    num_tiles = cdiv(max_query_len * num_heads, tiles.rows)
    parts = 1
    if query_starts is None:
        room = num_sms(q.device) // max(num_seqs * num_tiles, 1)
        parts = power_of_2_below(min(room, cdiv(paged.longest, MIN_PART), MAX_PARTS))
    partial = maxima = sums = None
    if parts > 1:
        shape = (parts, num_tokens, num_heads)
        partial = torch.empty(*shape, spec.out_width, dtype=torch.float32, device=q.device)
        maxima = torch.empty(shape, dtype=torch.float32, device=q.device)
        sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    launch(
        latent_kernel,
        (num_tiles, parts, num_seqs + (query_starts is not None)),
        (
            q,
            kv,
            paged.tables,
            paged.rows,
            paged.context_lens,
            query_starts,
            out,
            partial,
            maxima,
            sums,
        ),
        (
            spec.scale * LOG2_E,
            num_tokens,
            num_heads,
            num_seqs,
            kv.shape[3].bit_length() - 1,
            *q.stride()[:2],
            kv.stride(0) // width,
            paged.tables.stride(0),
        ),
        RANK=spec.out_width,
        BLOCK_RANK=next_power_of_2(spec.out_width),
        PIECE=min(PIECE, next_power_of_2(spec.out_width)),
        PARTS=parts,
        ROPE=width - spec.out_width,
        BLOCK_ROPE=max(next_power_of_2(width - spec.out_width), 16),
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(q.device),
    )
    if parts > 1:
        launch(
            latent_merge_kernel,
            (num_tokens, num_heads, cdiv(spec.out_width, MERGE_BLOCK)),
            (partial, maxima, sums, out),
            (spec.scale * LOG2_E,),
            RANK=spec.out_width,
            BLOCK=MERGE_BLOCK,
            PARTS=parts,
            num_warps=MERGE_WARPS,
            **launch_options(q.device),
        )


@triton.jit
def load_columns(rows, columns, WIDTH: tl.constexpr):
    """Loads these columns, with zeros from WIDTH on. rows: pointers `[N, 1]`."""
    if columns.shape[0] <= WIDTH:
        return tl.load(rows + columns[None, :])
    return tl.load(rows + columns[None, :], mask=(columns < WIDTH)[None, :], other=0.0)


@triton.jit
def store_pieces(rows, pieces, sums, is_row, RANK: tl.constexpr, PIECE: tl.constexpr):
    """Stores pieces of columns, divided by sums `[N]` if these are given. rows: pointers `[N]`."""
    for i in tl.static_range(len(pieces)):
        columns = i * PIECE + tl.arange(0, PIECE)
        piece = pieces[i]
        if sums is not None:
            piece /= sums[:, None]
        mask = is_row[:, None] & (columns < RANK)[None, :]
        pointers = rows[:, None] + columns[None, :]
        tl.store(pointers, piece.to(rows.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_tokens", "num_heads", "num_seqs", "block_shift", "stride_table"],
    # The tensors of prompts come after those of the decodes.
    do_not_specialize_on_alignment=["table_rows_ptr", "context_ptr", "starts_ptr"],
)
def latent_kernel(
    q_ptr,  # [T, H, RANK + ROPE]
    kv_ptr,  # [num_blocks, 1, 1, block_size, RANK + ROPE]
    table_ptr,  # int32 [num_slots, max_blocks]
    table_rows_ptr,  # int32 [S]
    context_ptr,  # int32 [S]
    starts_ptr,  # int32 [S + 1], or None: sequence s has row s
    out_ptr,  # [T, H, RANK], contiguous
    partial_ptr,  # float32 [PARTS, T, H, RANK], or None
    max_ptr,  # float32 [PARTS, T, H], or None: of unscaled scores
    sum_ptr,  # float32 [PARTS, T, H], or None
    scale_log2,
    num_tokens,
    num_heads,
    num_seqs,
    block_shift,
    stride_q_token,
    stride_q_head,
    block_rows,
    stride_table,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    PIECE: tl.constexpr,
    PARTS: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes a (tile of rows, part of the keys, sequence). Programs of one more
    sequence, after the last, write zeros to padding."""
    begin(PDL)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    seq = tl.program_id(2)
    columns = tl.arange(0, PIECE)
    ropes = tl.arange(0, BLOCK_ROPE)
    width: tl.constexpr = RANK + ROPE
    pieces: tl.constexpr = BLOCK_RANK // PIECE

    wait(PDL)
    if seq < num_seqs:
        context = tl.load(context_ptr + seq)
        first_token = seq
        num_queries = 1
        if starts_ptr is not None:
            first_token = tl.load(starts_ptr + seq)
            num_queries = tl.load(starts_ptr + seq + 1) - first_token
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = rows < num_queries * num_heads
        if tile * BLOCK_M < num_queries * num_heads:
            tokens = (first_token + rows // num_heads).to(tl.int64)
            heads = rows % num_heads
            # Rows past the last query may have any position.
            positions = context - num_queries + tl.minimum(rows // num_heads, num_queries - 1)
            q_rows = q_ptr + tokens * stride_q_token + heads.to(tl.int64) * stride_q_head
            q = ()
            acc = ()
            for piece in tl.static_range(pieces):
                ranks = piece * PIECE + columns
                mask = is_row[:, None] & (ranks < RANK)[None, :]
                q += (tl.load(q_rows[:, None] + ranks[None, :], mask=mask, other=0.0),)
                acc += (tl.zeros([BLOCK_M, PIECE], tl.float32),)
            is_rope = is_row[:, None] & (ropes < ROPE)[None, :]
            q_rope = tl.load(q_rows[:, None] + RANK + ropes[None, :], mask=is_rope, other=0.0)
            table = table_ptr + tl.load(table_rows_ptr + seq).to(tl.int64) * stride_table
            end = tl.max(positions, 0) + 1
            share = tl.cdiv(tl.cdiv(end, BLOCK_N), PARTS) * BLOCK_N
            start = part * share
            stop = tl.minimum(start + share, end)
            last = tl.maximum(stop - 1, 0)
            row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            row_sum = tl.zeros([BLOCK_M], tl.float32)
            for at in range(start, stop, BLOCK_N):
                keys = at + tl.arange(0, BLOCK_N)
                # After the last key, that key is read again: without masks a load is one
                # instruction.
                stored = tl.minimum(keys, last)
                blocks = tl.load(table + (stored >> block_shift))
                stored = blocks * block_rows + (stored & ((1 << block_shift) - 1))
                rows_at = kv_ptr + stored.to(tl.int64)[:, None] * width
                k = ()
                for piece in tl.static_range(pieces):
                    k += (load_columns(rows_at + piece * PIECE, columns, RANK - piece * PIECE),)
                k_rope = load_columns(rows_at + RANK, ropes, ROPE)
                scores = dot(q_rope, tl.trans(k_rope), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
                for piece in tl.static_range(pieces):
                    scores = dot(q[piece], tl.trans(k[piece]), scores)
                visible = keys[None, :] <= tl.minimum(positions, last)[:, None]
                scores = tl.where(visible, scores, float("-inf"))
                new_max = tl.maximum(row_max, tl.max(scores, 1))
                probs = tl.exp2((scores - new_max[:, None]) * scale_log2)
                keep = tl.exp2((row_max - new_max) * scale_log2)
                weights = probs.to(kv_ptr.dtype.element_ty)
                sums = ()
                for piece in tl.static_range(pieces):
                    sums += (dot(weights, k[piece], acc[piece] * keep[:, None]),)
                acc = sums
                row_sum = row_sum * keep + tl.sum(probs, 1)
                row_max = new_max
            if PARTS == 1:
                out = out_ptr + (tokens * num_heads + heads) * RANK
                store_pieces(out, acc, tl.where(row_sum > 0, row_sum, 1.0), is_row, RANK, PIECE)
            else:
                left = (part.to(tl.int64) * num_tokens + tokens) * num_heads + heads
                if start < stop:  # the merge reads only the maximum of a part without keys
                    store_pieces(partial_ptr + left * RANK, acc, None, is_row, RANK, PIECE)
                tl.store(max_ptr + left, row_max, mask=is_row)
                tl.store(sum_ptr + left, row_sum, mask=is_row)
    else:
        if starts_ptr is not None:
            padding = tl.load(starts_ptr + num_seqs)
            for token in range(padding + tile, num_tokens, tl.num_programs(0)):
                row = (tl.zeros([], tl.int64) + token) * num_heads
                for at in range(0, num_heads * RANK, PIECE):
                    behind = at + columns
                    zeros = tl.zeros([PIECE], out_ptr.dtype.element_ty)
                    tl.store(out_ptr + row * RANK + behind, zeros, mask=behind < num_heads * RANK)


@triton.jit
def latent_merge_kernel(
    partial_ptr,  # float32 [PARTS, T, H, RANK]: not divided by their sums
    max_ptr,  # float32 [PARTS, T, H], of unscaled scores
    sum_ptr,  # float32 [PARTS, T, H]
    out_ptr,  # [T, H, RANK]
    scale_log2,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program merges a (token, head, piece of the columns). Parts without keys have a maximum
    of -inf."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    stride = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    ranks = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = ranks < RANK

    wait(PDL)
    parts = tl.arange(0, PARTS)
    at = parts * stride + row
    maxima = tl.load(max_ptr + at)
    is_there = maxima > float("-inf")
    best = tl.max(maxima, 0)
    best = tl.where(best == float("-inf"), 0.0, best)
    shares = tl.exp2((maxima - best) * scale_log2)
    weight = tl.sum(tl.load(sum_ptr + at) * shares, 0)
    mask = is_there[:, None] & inside[None, :]
    partial = tl.load(partial_ptr + at[:, None] * RANK + ranks[None, :], mask=mask, other=0.0)
    y = tl.sum(partial * shares[:, None], 0) / tl.where(weight > 0, weight, 1.0)
    tl.store(out_ptr + row * RANK + ranks, y.to(out_ptr.dtype.element_ty), mask=inside)
