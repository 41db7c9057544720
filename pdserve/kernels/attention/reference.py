"""Attention over a paged KV cache in plain torch.

Batch-invariant bit for bit on CPU: what a (sequence, query position) gets does not depend on the
other sequences, on chunking, on cached prefixes, or on whether paged_decode or paged_prefill
computes it. These facts carry this: a float32 product gives equal rows for every number of rows
that is a multiple of `_exact_rows` (found by a probe), and equal columns for every multiple of
KV_CHUNK; softmax gives the same for a row with MASKED keys appended; values are summed in chunks at
fixed absolute positions, where one that a row must not see adds exactly 0. The tests hold it for
one torch thread, which workers use; `LLM` leaves torch its threads.
"""

import torch
from torch import Tensor

from pdserve.kernels.attention.reference_tiles import Ints, attend, plan_tiles, rows_in_use


def paged_decode(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    context_lens: Tensor,
    scale: float,
    max_context_len: int,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one query per sequence over its paged KV; returns [S, Hq, D] in q's dtype: `out`
    if given.

    q [S, Hq, D]; kv [num_blocks, Hk, 2, block_size, D]; block_tables [num_slots, max_blocks] int32,
    of which sequence s has row table_rows[s] (int32 [S]); context_lens [S] int32: KV rows including
    the query's own. A context of 0 yields zeros. max_context_len is an upper bound of context_lens;
    table entries past a context may be anything.
    """
    query_starts = torch.arange(len(q) + 1, dtype=torch.int32)
    return paged_prefill(q, kv, block_tables, table_rows, context_lens, query_starts, 1, scale, out)


def paged_prefill(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    max_query_len: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of several queries per sequence over its paged KV; returns [T, Hq, D] in q's
    dtype: `out` if given, which is contiguous.

    q [T, Hq, D] holds the sequences one after another, s at rows query_starts[s] : query_starts[s +
    1] (int32, S + 1 of them). They are the last positions of its context_lens[s], so a cached
    prefix or earlier chunks come first in its row of block_tables, which is table_rows[s] as in
    paged_decode. Rows of q after query_starts[-1] are padding and yield zeros. max_query_len bounds
    the queries of one sequence.
    """
    lens = Ints.of(context_lens)
    starts = Ints.of(query_starts)
    tables = rows_in_use(block_tables, table_rows, lens, kv.shape[3])
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out.zero_()
    for batch in plan_tiles(tables, lens, starts, q.shape[1], kv.shape, kv.stride(), q.device):
        out[batch.rows] = attend(q[batch.rows], kv, batch, scale).to(q.dtype)
    return out


def warm_dense_prefill(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """Nothing to prepare."""


def fresh_prefill_pays(q: Tensor, k: Tensor, v: Tensor, query_lens: tuple[int, ...]) -> bool:
    """Never: paged_prefill is what carries batch invariance."""
    return False


def fresh_prefill(
    q: Tensor, k: Tensor, v: Tensor, query_lens: tuple[int, ...], scale: float
) -> Tensor:
    """Causal attention of whole prompts, one after another, over their own rows; returns [T, Hq, D]
    in q's dtype.

    q [T, Hq, D]; k and v [T, Hk, D]. Rows of q after the prompts are padding and yield zeros.
    """
    num_rows = sum(query_lens)
    prompts = zip(*(x[:num_rows].split(query_lens) for x in (q, k, v)), strict=True)
    outs = [
        dense_attention(1, queries, keys, values, True, scale)[0]
        for queries, keys, values in prompts
    ]
    return torch.cat([*outs, torch.zeros_like(q[num_rows:])])


def chunk_prefill_pays(q: Tensor, k: Tensor, v: Tensor, prefix_len: int, block_size: int) -> bool:
    """Never, as with fresh prompts."""
    return False


def chunk_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    prefix_len: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """paged_prefill of one sequence, prefix_len of whose rows stand before this step's: rows of q,
    k [T, Hk, D] and v, the latter two in kv already.
    """
    return paged_prefill(
        q, kv, block_tables, table_rows, context_lens, query_starts, len(q), scale, out
    )


def dense_attention(
    batch: int, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of `batch` sequences of one length over keys of one length (the same, if causal): q
    [batch * queries, Hq, D], k and v [batch * keys, Hk, D] -> [batch * queries, Hq, D] in q's
    dtype, and the log-sum-exps of the scaled scores, float32 [batch, Hq, queries].
    """
    group = q.shape[1] // k.shape[1]
    wide_q, wide_k, wide_v = (
        x.unflatten(0, (batch, -1)).transpose(1, 2).float() for x in (q, k, v)
    )
    wide_k, wide_v = (x.repeat_interleave(group, dim=1) for x in (wide_k, wide_v))
    scores = wide_q @ wide_k.mT * scale
    if causal:
        scores = scores.masked_fill(
            torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf")
        )
    out = scores.softmax(-1) @ wide_v
    return out.transpose(1, 2).flatten(0, 1).to(q.dtype).contiguous(), scores.logsumexp(-1)


def join_attention(
    out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the keys of two: outputs [T, Hq, D] and log-sum-exps [1, Hq, T] of both -> of
    all keys."""
    joined_lse = torch.logaddexp(lse, other_lse)
    weight, other_weight = ((x - joined_lse).exp()[0].T[..., None] for x in (lse, other_lse))
    return (out.float() * weight + other.float() * other_weight).to(out.dtype), joined_lse
