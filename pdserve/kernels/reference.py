"""Every op of ops.py in plain torch: the oracle of the Triton kernels and the production path on CPU.

On CPU the results are batch-invariant bit for bit: what a (sequence, query position) gets does not depend on the other
sequences, on chunking, on cached prefixes, or on whether paged_decode or paged_prefill computes it. Three facts carry
this: a float32 GEMM gives equal rows for every number of rows that is a multiple of ROW_MULTIPLE; KV is reduced in
chunks at fixed absolute positions; merging a chunk that a row must not see leaves that row's bits alone. It assumes
one torch thread, as the engine uses on CPU. Knows nothing of models, schedulers or block managers. Called by models
through ops_for().
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

KV_CHUNK = 128
ROW_MULTIPLE = 16
TILE_ROWS = 256
# Finite, so that a row which sees nothing in a chunk yields weight exp(MASKED - max) = 0 and not NaN.
MASKED = -1e30


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dim of `x` [..., width], in float32, rounded to x's dtype before `weight`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual), x + residual)`; shapes [..., width]."""
    new_residual = x + residual
    return rms_norm(new_residual, weight, eps), new_residual


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates halves (the Hugging Face Llama convention) of q [T, Hq, D] and k [T, Hk, D] by their positions [T].

    cos, sin: float32 [max_pos, D // 2]. Computed in float32. Use the returned tensors: an implementation may work in
    place.
    """
    cos_rows, sin_rows = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, D // 2]
    first, second = torch.cat((q, k), dim=1).float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos_rows - second * sin_rows, second * cos_rows + first * sin_rows), dim=-1)
    q_rotated, k_rotated = rotated.to(q.dtype).split((q.shape[1], k.shape[1]), dim=1)
    return q_rotated, k_rotated


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of gate_up [T, 2 * I], gate first; returns [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`; x [T, in], weight [out, in]. Batch-invariant on CPU when T is a multiple of
    ROW_MULTIPLE.
    """
    return functional.linear(x, weight, bias)


def write_kv(k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Writes rows k, v [T, Hk, D] into one layer's `kv` [num_blocks, Hk, 2, block_size, D] at `slots` [T] int64.

    A slot is block * block_size + offset. Several padding rows may share a slot of the null block.
    """
    block_size = kv.shape[3]
    kv[slots // block_size, :, :, slots % block_size] = torch.stack((k, v), dim=2)


def copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copies whole blocks of `pool` [num_blocks, ...] from `src` to `dst` (int64 [N]); no block may be in both."""
    pool[dst] = pool[src]


def paged_decode(
    q: Tensor, kv: Tensor, block_tables: Tensor, context_lens: Tensor, scale: float, max_context_len: int
) -> Tensor:
    """Attention of one query per sequence over its paged KV; returns [S, Hq, D] in q's dtype.

    q [S, Hq, D]; kv [num_blocks, Hk, 2, block_size, D]; block_tables [S, max_blocks] int32; context_lens [S] int32: KV
    rows including the query's own. A context of 0 yields zeros. max_context_len bounds context_lens.
    """
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[1]
    # Longest first, so that the sequences which reach a chunk are always a prefix of the batch.
    context_lens, order = context_lens.sort(descending=True, stable=True)
    tables = _chunked_tables(block_tables[order], context_lens, max_context_len, kv.shape[3])
    rows = _pad_rows(q[order].float().reshape(num_seqs, num_kv_heads, -1, head_dim))
    total = _RunningSoftmax(rows)
    lens = context_lens.tolist()
    for chunk, start in enumerate(range(0, lens[0] if lens else 0, KV_CHUNK)):
        active = sum(length > start for length in lens)
        keys = torch.arange(start, start + KV_CHUNK, device=q.device)
        seen = keys < context_lens[:active, None]  # [active, KV_CHUNK]
        rows_kv = _gather_kv(kv, tables[:active, chunk])
        _zero_unseen(rows_kv, seen)
        bias = torch.zeros(seen.shape, device=q.device).masked_fill_(~seen, MASKED)
        bias = bias[:, None, None, :].expand(-1, num_kv_heads, -1, -1)
        total.add(rows[:active], rows_kv, bias, scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out[order] = total.result()[:, :, : num_heads // num_kv_heads].reshape(q.shape).to(q.dtype)
    return out


def paged_prefill(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    max_query_len: int,
    scale: float,
) -> Tensor:
    """Causal attention of several queries per sequence over its paged KV; returns [T, Hq, D] in q's dtype.

    q [T, Hq, D] holds the sequences one after another, s at rows query_starts[s] : query_starts[s + 1] (int32, S + 1 of
    them). They are the last positions of its context_lens[s], so a cached prefix or earlier chunks come first in the
    block table. Rows of q after query_starts[-1] are padding and yield zeros. max_query_len bounds the queries of one
    sequence.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts, lens = query_starts.tolist(), context_lens.tolist()
    query_lens = [end - start for start, end in pairwise(starts)]
    decoding = [seq for seq, query_len in enumerate(query_lens) if query_len == 1]
    if decoding:
        queries = [starts[seq] for seq in decoding]
        longest = max(lens[seq] for seq in decoding)
        out[queries] = paged_decode(q[queries], kv, block_tables[decoding], context_lens[decoding], scale, longest)
    for seq, query_len in enumerate(query_lens):
        if query_len > 1:
            own = slice(starts[seq], starts[seq + 1])
            out[own] = _prefill_one(q[own], kv, block_tables[seq : seq + 1], context_lens[seq : seq + 1], scale)
    return out


def _prefill_one(q: Tensor, kv: Tensor, block_table: Tensor, context_len: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence: q [query_len, Hq, D] are the last of `context_len` [1] positions."""
    query_len, num_heads, head_dim = q.shape
    num_kv_heads, num_keys = kv.shape[1], int(context_len)
    group = num_heads // num_kv_heads
    tables = _chunked_tables(block_table, context_len, num_keys, kv.shape[3])[0]
    chunks = [_gather_kv(kv, table[None]) for table in tables]  # each [2, 1, Hk, KV_CHUNK, D]
    last_seen = torch.arange((len(chunks) - 1) * KV_CHUNK, len(chunks) * KV_CHUNK, device=q.device) < num_keys
    _zero_unseen(chunks[-1], last_seen[None])

    tile_len = max(TILE_ROWS // group, 1)
    outs = []
    for first in range(0, query_len, tile_len):
        tile = q[first : first + tile_len].float().unflatten(1, (num_kv_heads, group))  # [P, Hk, group, D]
        rows = _pad_rows(tile.transpose(0, 1).reshape(1, num_kv_heads, -1, head_dim))
        row_positions = torch.arange(rows.shape[2], device=q.device) // group + (num_keys - query_len + first)
        total = _RunningSoftmax(rows)
        for start in range(0, num_keys - query_len + first + len(tile), KV_CHUNK):
            keys = torch.arange(start, start + KV_CHUNK, device=q.device)
            bias = torch.zeros(rows.shape[2], KV_CHUNK, device=q.device)
            bias.masked_fill_(keys > row_positions[:, None], MASKED)
            total.add(rows, chunks[start // KV_CHUNK], bias.expand(1, num_kv_heads, -1, -1), scale)
        tile_out = total.result()[0, :, : len(tile) * group]  # [Hk, P * group, D]
        outs.append(tile_out.unflatten(1, (len(tile), group)).transpose(0, 1).flatten(1, 2))
    return torch.cat(outs).to(q.dtype)


class _RunningSoftmax:
    """Attention of fixed rows over KV chunks added one by one (the online softmax, Milakov and Gimelshein 2018).

    Adding a chunk whose bias masks a row entirely multiplies that row's sums by exactly 1 and adds exactly 0.
    """

    def __init__(self, rows: Tensor) -> None:
        """rows: float32 queries [n, Hk, R, D], R a multiple of ROW_MULTIPLE."""
        self._weighted = torch.zeros_like(rows)  # sum of weight * value
        self._weights = rows.new_zeros((*rows.shape[:-1], 1))
        self._max = rows.new_full((*rows.shape[:-1], 1), MASKED)

    def add(self, rows: Tensor, rows_kv: Tensor, bias: Tensor, scale: float) -> None:
        """Adds a chunk [2, n, Hk, KV_CHUNK, D] for the first n sequences; bias broadcasts to [n, Hk, R, KV_CHUNK]."""
        num_seqs = rows.shape[0]
        queries, keys, values = (x.flatten(0, 1) for x in (rows, rows_kv[0], rows_kv[1]))
        scores = torch.baddbmm(bias.flatten(0, 1), queries, keys.transpose(1, 2), alpha=scale)
        # softmax() is several times faster than exp() and sum() of masked scores; 1 / its largest value is their sum.
        probs = torch.softmax(scores, dim=-1)
        shape = (*rows.shape[:-1], 1)
        chunk_max = scores.amax(dim=-1).view(shape)
        chunk_weights = probs.amax(dim=-1).reciprocal_().view(shape)
        chunk_out = torch.bmm(probs, values).view(rows.shape)

        running_max, weighted, weights = self._max[:num_seqs], self._weighted[:num_seqs], self._weights[:num_seqs]
        new_max = torch.maximum(running_max, chunk_max)
        keep = torch.exp(running_max - new_max)
        chunk_weights.mul_(torch.exp(chunk_max - new_max))
        # No fused multiply-add: whether torch contracts one may depend on a row's place in the tensor.
        weighted.mul_(keep).add_(chunk_out.mul_(chunk_weights))
        weights.mul_(keep).add_(chunk_weights)
        running_max.copy_(new_max)

    def result(self) -> Tensor:
        """[n, Hk, R, D]. The weights of a row that saw a key sum to at least 1; of one that saw none, to 0."""
        return self._weighted / self._weights.clamp(min=1.0)


def _pad_rows(rows: Tensor) -> Tensor:
    """[n, Hk, rows, D] with zero rows appended up to a multiple of ROW_MULTIPLE."""
    return functional.pad(rows, (0, 0, 0, -rows.shape[2] % ROW_MULTIPLE))


def _chunked_tables(block_tables: Tensor, context_lens: Tensor, max_context_len: int, block_size: int) -> Tensor:
    """Block ids by chunk, int64 [S, chunks, KV_CHUNK / block_size]; entries past the context become the null block
    0.
    """
    if KV_CHUNK % block_size:
        raise ValueError(
            f"block_size must divide {KV_CHUNK} for the CPU attention, not {block_size}: use 16, 32, 64 or 128"
        )
    per_chunk = KV_CHUNK // block_size
    width = -(-max_context_len // KV_CHUNK) * per_chunk
    tables = block_tables[:, :width].long()
    tables = functional.pad(tables, (0, width - tables.shape[1]))
    first_positions = torch.arange(0, width * block_size, block_size, device=tables.device)
    return tables.masked_fill_(first_positions >= context_lens[:, None], 0).view(len(tables), -1, per_chunk)


def _gather_kv(kv: Tensor, blocks: Tensor) -> Tensor:
    """K and V rows of `blocks` [n, b] in float32: [2, n, Hk, b * block_size, D].

    Reads `kv` as a matrix with one row a (block, head, layer, plane), since index_select of rows is three times faster
    than indexing by (block, head).
    """
    num_blocks, num_kv_heads, _, block_size, head_dim = kv.shape
    width = block_size * head_dim
    if kv.stride()[2:] != (width, head_dim, 1) or kv.stride(0) % width or kv.stride(1) % width:
        raise ValueError(
            f"kv must be a layer of a contiguous pool, not a view with strides {kv.stride()}: pass pool[:, :, i]"
        )
    block_rows, head_rows = kv.stride(0) // width, kv.stride(1) // width
    num_rows = (num_blocks - 1) * block_rows + (num_kv_heads - 1) * head_rows + 2
    planes = torch.arange(2, device=kv.device).view(2, 1, 1, 1)
    heads = torch.arange(0, num_kv_heads * head_rows, head_rows, device=kv.device).view(-1, 1)
    rows = (blocks * block_rows).unsqueeze(1) + heads + planes  # [2, n, Hk, b]
    gathered = kv.as_strided((num_rows, width), (width, 1)).index_select(0, rows.view(-1))
    return gathered.float().view(2, len(blocks), num_kv_heads, -1, head_dim)


def _zero_unseen(rows_kv: Tensor, seen: Tensor) -> None:
    """Zeroes in place the rows of `rows_kv` [2, n, Hk, KV_CHUNK, D] where `seen` [n, KV_CHUNK] is false.

    A block's unwritten rows may hold NaN, which neither a bias nor a probability of 0 removes. Clearing their bits is
    several times faster than masked_fill_ or where.
    """
    keep = seen.to(torch.int32).neg_()
    rows_kv.view(torch.int32).bitwise_and_(keep[:, None, :, None])
