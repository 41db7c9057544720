# mypy: allow-untyped-defs
"""The line of work that decode attention divides among its programs. decode.py calls this file.

    chunk: BLOCK_N keys of one KV head of one sequence.
    item:  one KV head of one sequence, with all its chunks; one result row per query head.
    line:  all items one after another, by sequence and then by KV head. Its unit is a chunk.
    share: the equal stretch of the line that one program computes.

An item is as long as its chunks (c) and ITEM_COST more positions (+), which stand for the time to
begin and end it. Here are two KV heads (h0, h1), contexts of 3 and 1 chunks, and 3 programs:

    item:      seq 0, h0    seq 0, h1    seq 1, h0    seq 1, h1
    line:      c c c + +    c c c + +    c  +  +      c  +  +
    position:  0 1 2 3 4    5 6 7 8 9    10 11 12     13 14 15
    program:   0 0 0 0 0    0 1 1 1 1    1  1  2      2  2  2

The line has 16 positions, so a share has 6. Nothing is computed at a +. Program 0 computes one item
whole and the first chunk of the next. Program 1 computes the other two chunks of that item, and a
third item whole. decode.py merges the parts of an item that several programs share.
"""

import triton
import triton.language as tl

MIN_SHARE = tl.constexpr(2)  # positions; a smaller share costs more in the merge than it wins
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
    """Returns the line as four values:

    - int32 [BLOCK_S]: context length of each sequence; 0 past the last one.
    - int32 [BLOCK_S]: position at which each sequence's last item ends (its ITEM_COST included).
    - length of the line, in positions.
    - positions of one share: the line cut into num_programs equal parts, at least MIN_SHARE.
    """
    seqs = tl.arange(0, BLOCK_S)
    lens = tl.load(context_ptr + seqs, mask=seqs < num_seqs, other=0)
    chunks = num_chunks(lens, window, BLOCK_N, WINDOW)
    lengths = tl.where(seqs < num_seqs, (chunks + ITEM_COST) * num_kv_heads, 0)
    total = tl.sum(lengths, 0)
    return lens, tl.cumsum(lengths, 0), total, tl.maximum(tl.cdiv(total, num_programs), MIN_SHARE)


@triton.jit
def first_chunk(context_len, window, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Returns the number of the chunk in which a sequence's window begins; 0 without a window."""
    if WINDOW:
        return tl.maximum(context_len - window, 0) // BLOCK_N
    return context_len * 0


@triton.jit
def num_chunks(context_len, window, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Returns the number of chunks of each item of a sequence, from its window on. It is at least
    one, because an empty context also writes its zeros."""
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
    """Returns the item at position `at` of the line as five values:

    - number of its sequence.
    - context length of that sequence.
    - number of its KV head.
    - position of its first chunk.
    - position after its last chunk, where its ITEM_COST positions begin.
    """
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
    """Returns the item of one KV head of one sequence as three values:

    - context length of the sequence.
    - position of its first chunk.
    - position after its last chunk, where its ITEM_COST positions begin.
    """
    is_seq = tl.arange(0, BLOCK_S) == seq
    num_keys = tl.sum(tl.where(is_seq, lens, 0), 0)
    chunks = num_chunks(num_keys, window, BLOCK_N, WINDOW)
    item_length = chunks + ITEM_COST
    seq_start = tl.sum(tl.where(is_seq, ends, 0), 0) - item_length * num_kv_heads
    item_start = seq_start + kv_head * item_length
    return num_keys, item_start, item_start + chunks
