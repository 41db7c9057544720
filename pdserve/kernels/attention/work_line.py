# mypy: allow-untyped-defs
"""The line of work that decode attention divides into shares: chunks of keys, ordered by sequence
and then by KV head. An item is one KV head of one sequence. decode.py calls this file.
"""

import triton
import triton.language as tl

MIN_SHARE = tl.constexpr(2)  # chunks; a smaller share costs more in the merge than it wins
ITEM_COST = tl.constexpr(2)  # chunks that a program could read while it begins and ends an item


@triton.jit
def line_of_work(
    context_ptr,
    window,
    num_seqs,
    num_kv_heads,
    num_programs,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Returns (context_lens and ends of the sequences on the line, both [BLOCK_S]; length of the
    line; share of a program)."""
    seqs = tl.arange(0, BLOCK_S)
    lens = tl.load(context_ptr + seqs, mask=seqs < num_seqs, other=0)
    chunks = num_chunks(lens, window, BLOCK_N, WINDOW)
    lengths = tl.where(seqs < num_seqs, (chunks + ITEM_COST) * num_kv_heads, 0)
    total = tl.sum(lengths, 0)
    return lens, tl.cumsum(lengths, 0), total, tl.maximum(tl.cdiv(total, num_programs), MIN_SHARE)


@triton.jit
def first_chunk(context_len, window, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """The chunk in which a sequence's window begins."""
    if WINDOW:
        return tl.maximum(context_len - window, 0) // BLOCK_N
    return context_len * 0


@triton.jit
def num_chunks(context_len, window, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Number of chunks: at least one, because an empty context also writes its zeros."""
    chunks = tl.cdiv(context_len, BLOCK_N) - first_chunk(context_len, window, BLOCK_N, WINDOW)
    return tl.maximum(chunks, 1)


@triton.jit
def item_at(
    at,
    lens,
    ends,
    window,
    num_kv_heads,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Returns (sequence, its context, KV head, start and end of its chunks) of the item at position
    `at` of the line."""
    seq = tl.sum((ends <= at).to(tl.int32), 0)
    num_keys, seq_start, first_end = item_of(
        seq, 0, lens, ends, window, num_kv_heads, BLOCK_N, BLOCK_S, WINDOW
    )
    chunks = first_end - seq_start
    kv_head = (at - seq_start) // (chunks + ITEM_COST)
    item_start = seq_start + kv_head * (chunks + ITEM_COST)
    return seq, num_keys, kv_head, item_start, item_start + chunks


@triton.jit
def item_of(
    seq,
    kv_head,
    lens,
    ends,
    window,
    num_kv_heads,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Returns (context, start and end of its chunks) of a sequence's KV head."""
    is_seq = tl.arange(0, BLOCK_S) == seq
    num_keys = tl.sum(tl.where(is_seq, lens, 0), 0)
    chunks = num_chunks(num_keys, window, BLOCK_N, WINDOW)
    item_length = chunks + ITEM_COST
    seq_start = tl.sum(tl.where(is_seq, ends, 0), 0) - item_length * num_kv_heads
    item_start = seq_start + kv_head * item_length
    return num_keys, item_start, item_start + chunks
