"""AttentionOps in plain torch.

On CPU it is batch-invariant bit for bit. The result of a (sequence, query position) does not depend
on the other sequences, on chunking or on cached prefixes. It is also the same from decode and from
prefill. These facts make it so:

- A float32 product gives equal rows for every number of rows that is a multiple of `_exact_rows`,
  which a probe finds. It gives equal columns for every multiple of KV_CHUNK.
- Softmax gives a row the same results when MASKED keys are appended.
- Values are summed in chunks at fixed absolute positions. A chunk that a row must not see adds
  exactly 0.

The tests prove it for one torch thread, which workers use; `LLM` leaves torch its threads.
"""

import torch
from torch import Tensor

from pdserve.kernels.attention.reference_tiles import Ints, attend, plan_tiles, rows_in_use
from pdserve.kernels.attention.spec import AttentionSpec, Paged, Prefills


def decode(
    q: Tensor,
    kv: Tensor,
    paged: Paged,
    spec: AttentionSpec,
    out: Tensor | None = None,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    query_starts = torch.arange(len(q) + 1, dtype=torch.int32)
    return paged_prefill(q, kv, Prefills(paged, query_starts, 1), spec, out, v_scales, sinks)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    prefills: Prefills,
    spec: AttentionSpec,
    out: Tensor | None = None,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Always reads the paged KV, because batch invariance rests on that."""
    return paged_prefill(q, kv, prefills, spec, out, v_scales, sinks)


def paged_prefill(
    q: Tensor,
    kv: Tensor,
    prefills: Prefills,
    spec: AttentionSpec,
    out: Tensor | None = None,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Runs prefill with all keys and values taken from kv."""
    paged = prefills.paged
    lens = Ints.of(paged.context_lens)
    starts = Ints.of(prefills.query_starts)
    tables = rows_in_use(paged.tables, paged.rows, lens, kv.shape[3])
    if out is None:
        out = q.new_empty(*q.shape[:2], spec.out_width)
    out.zero_()
    batches = plan_tiles(
        tables, lens, starts, q.shape[1], kv.shape, kv.stride(), q.device, spec.window
    )
    for batch in batches:
        made = attend(q[batch.rows], kv, batch, spec, sinks)
        if v_scales is not None:
            made *= scales_of_heads(v_scales, q.shape[1])
        out[batch.rows] = made.to(q.dtype)
    return out


def scales_of_heads(v_scales: Tensor, num_heads: int) -> Tensor:
    """Repeats the scales [Hk] of KV heads for their query heads: [Hq, 1]."""
    return v_scales.repeat_interleave(num_heads // len(v_scales))[:, None]


def warm_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    tables: Tensor,
    spec: AttentionSpec,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Does nothing: there is nothing to prepare."""


def fresh_prefill(
    q: Tensor, k: Tensor, v: Tensor, query_lens: tuple[int, ...], scale: float
) -> Tensor:
    """Causal attention of whole prompts, one after another, over their own rows. Returns [T, Hq, D]
    in q's dtype. It is the twin of dense.fresh_prefill.

    q [T, Hq, D]; k and v [T, Hk, D]. Rows of q after the prompts are padding and yield zeros.
    """
    num_rows = sum(query_lens)
    prompts = zip(*(x[:num_rows].split(query_lens) for x in (q, k, v)), strict=True)
    outs = [
        dense_attention(1, queries, keys, values, True, scale)[0]
        for queries, keys, values in prompts
    ]
    return torch.cat([*outs, torch.zeros_like(q[num_rows:])])


def dense_attention(
    batch: int, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of `batch` sequences of one length over keys of one length. If causal, the two
    lengths are the same.

    q: [batch * queries, Hq, D]
    k, v: [batch * keys, Hk, D]
    Returns [batch * queries, Hq, D] in q's dtype, and the log-sum-exps of the scaled scores,
    float32 [batch, Hq, queries].
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
    """Joins two attentions over different keys into the attention over all keys. Both have outputs
    [T, Hq, D] and log-sum-exps [1, Hq, T], and so has the result."""
    joined_lse = torch.logaddexp(lse, other_lse)
    weight, other_weight = ((x - joined_lse).exp()[0].T[..., None] for x in (lse, other_lse))
    return (out.float() * weight + other.float() * other_weight).to(out.dtype), joined_lse
