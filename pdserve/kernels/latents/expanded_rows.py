# mypy: allow-untyped-defs
"""Triton kernels that copy a step's sequences (queries and latents) to a new layout, and copy the
results of the queries back. expanded.py calls them."""

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.attention.spec import Prefills
from pdserve.kernels.attention.tiles import kv_rows
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2

ROWS = 8  # rows of a program
COLUMNS = 1024  # columns of a step


def launch_lay_out(
    q: Tensor | None,
    kv: Tensor,
    prefills: Prefills,
    where: Tensor,
    length: int,
    latents: Tensor,
    keys: Tensor,
    queries: Tensor,
) -> None:
    """Lays out `length` rows of each sequence.

    where: int32 `[2, batch]`: the sequences, and the first row of each.
    latents: `[batch * length, rank]`.
    keys: `[batch * length, H, width]`; the rotated columns of all heads' keys are written.
    queries: shaped like keys. Queries are put at the end of their sequences. None are written if q
        is None.
    Rows past a sequence's end, and rows without a query, become 0.
    """
    paged = prefills.paged
    num_heads, width = keys.shape[1:]
    rank = latents.shape[1]
    rope = kv.shape[4] - rank
    if q is not None and q.stride(1) != width:
        q = q.contiguous()
    launch(
        lay_out_kernel,
        (cdiv(length, ROWS), where.shape[1]),
        (
            kv,
            q,
            paged.tables,
            paged.rows,
            paged.context_lens,
            prefills.query_starts,
            where,
            latents,
            keys,
            queries,
        ),
        (
            length,
            num_heads,
            kv.shape[3].bit_length() - 1,
            0 if q is None else q.stride(0),
            kv.stride(0),
            paged.tables.stride(0),
        ),
        RANK=rank,
        BLOCK_RANK=next_power_of_2(rank),
        ROPE=rope,
        BLOCK_ROPE=next_power_of_2(rope),
        WIDTH=width,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )


def launch_take_back(
    made: Tensor, prefills: Prefills, where: Tensor, length: int, out: Tensor
) -> None:
    """Copies the results of the queries from made `[batch * length, H, v_dim]` to their rows of out
    `[T, H, v_dim]`. Both are contiguous."""
    launch(
        take_back_kernel,
        (cdiv(length, ROWS), where.shape[1]),
        (made, prefills.paged.context_lens, prefills.query_starts, where, out),
        (length, out.stride(0)),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )


@triton.jit
def _queries(context_ptr, starts_ptr, where_ptr, rows):
    """Returns facts of the program's sequence: its number, its first row that is laid out, and its
    number of rows from there on. Also returns which of `rows` are queries, and where the query of
    the first row would be."""
    member = tl.program_id(1)
    sequence = tl.load(where_ptr + member)
    begin = tl.load(where_ptr + tl.num_programs(1) + member)
    first = tl.load(starts_ptr + sequence)
    num_queries = tl.load(starts_ptr + sequence + 1) - first
    num_rows = tl.load(context_ptr + sequence) - begin
    is_query = (rows < num_rows) & (rows >= num_rows - num_queries)
    return sequence, begin, num_rows, is_query, first - (num_rows - num_queries)


@triton.jit(
    do_not_specialize=["length", "num_heads", "block_shift", "stride_table"],
    # These tensors come after those of the decodes.
    do_not_specialize_on_alignment=["table_rows_ptr", "context_ptr", "starts_ptr"],
)
def lay_out_kernel(
    kv_ptr,  # [num_blocks, 1, 1, block_size, RANK + ROPE]
    q_ptr,  # [T, H, WIDTH], heads contiguous; or None
    table_ptr,  # int32 [num_slots, max_blocks]
    table_rows_ptr,  # int32 [S]
    context_ptr,  # int32 [S]
    starts_ptr,  # int32 [S + 1]
    where_ptr,  # int32 [2, batch]
    latents_ptr,  # [batch * length, RANK]
    keys_ptr,  # [batch * length, H, WIDTH]
    queries_ptr,  # shaped like keys
    length,
    num_heads,
    block_shift,
    stride_q,
    stride_block,
    stride_table,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each program lays out a (tile of rows, member of the group)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sequence, begin, num_rows, is_query, first = _queries(context_ptr, starts_ptr, where_ptr, rows)
    table = table_ptr + tl.load(table_rows_ptr + sequence).to(tl.int64) * stride_table
    is_row = rows < num_rows
    offsets = kv_rows(table, begin + rows, is_row, block_shift, stride_block, RANK + ROPE)
    stored = kv_ptr + offsets[:, None]
    laid = (tl.program_id(1).to(tl.int64) * length + rows)[:, None]
    inside = (rows < length)[:, None]
    ranks = tl.arange(0, BLOCK_RANK)[None, :]
    latent = tl.load(stored + ranks, mask=is_row[:, None] & (ranks < RANK), other=0.0)
    tl.store(latents_ptr + laid * RANK + ranks, latent, mask=inside & (ranks < RANK))
    ropes = tl.arange(0, BLOCK_ROPE)[None, :]
    rotated = tl.load(stored + RANK + ropes, mask=is_row[:, None] & (ropes < ROPE), other=0.0)
    key = keys_ptr + laid * num_heads * WIDTH + (WIDTH - ROPE) + ropes
    for head in range(num_heads):
        tl.store(key + head * WIDTH, rotated, mask=inside & (ropes < ROPE))
    if q_ptr is not None:
        size = num_heads * WIDTH
        source = q_ptr + ((first + rows).to(tl.int64) * stride_q)[:, None]
        target = queries_ptr + laid * size
        for start in range(0, size, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)[None, :]
            q = tl.load(source + columns, mask=is_query[:, None] & (columns < size), other=0.0)
            tl.store(target + columns, q, mask=inside & (columns < size))


@triton.jit(
    do_not_specialize=["length"],
    do_not_specialize_on_alignment=["context_ptr", "starts_ptr"],
)
def take_back_kernel(
    made_ptr,  # [batch * length, size]
    context_ptr,  # int32 [S]
    starts_ptr,  # int32 [S + 1]
    where_ptr,  # int32 [2, batch]
    out_ptr,  # [T, size]
    length,
    size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each program copies a (tile of rows, member of the group)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _, _, _, is_query, first = _queries(context_ptr, starts_ptr, where_ptr, rows)
    source = made_ptr + ((tl.program_id(1).to(tl.int64) * length + rows) * size)[:, None]
    target = out_ptr + ((first + rows).to(tl.int64) * size)[:, None]
    for start in range(0, size, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)[None, :]
        mask = is_query[:, None] & (columns < size)
        tl.store(target + columns, tl.load(source + columns, mask=mask), mask=mask)
