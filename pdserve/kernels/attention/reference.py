"""Attention over a paged KV cache in plain torch.

Batch-invariant bit for bit on CPU: what a (sequence, query position) gets does not depend on the
other sequences, on chunking, on cached prefixes, or on whether paged_decode or paged_prefill
computes it. These facts carry this: a float32 product gives equal rows for every number of rows
that is a multiple of `_exact_rows` (found by a probe), and equal columns for every multiple of
KV_CHUNK; softmax gives the same for a row with MASKED keys appended; values are summed in chunks at
fixed absolute positions, where one that a row must not see adds exactly 0. The tests hold it for
one torch thread, which workers use; `LLM` leaves torch its threads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.linear.reference import ROW_MULTIPLE

KV_CHUNK = 64
TILE_ROWS = 128
BATCH_SCORES = 2**16
# Finite, so that a context of 0 yields zeros and not NaN. exp(MASKED - max) is exactly 0 after any
# score.
MASKED = -1e30


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
    lens = _Ints.of(context_lens)
    starts = _Ints.of(query_starts)
    tables = _rows_in_use(block_tables, table_rows, lens, kv.shape[3])
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out.zero_()
    for batch in _plan(tables, lens, starts, q.shape[1], kv.shape, kv.stride(), q.device):
        out[batch.rows] = _attend(q[batch.rows], kv, batch, scale).to(q.dtype)
    return out


class _Ints(NamedTuple):
    """An int32 tensor by value, to key a cache with."""

    data: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor | np.ndarray) -> "_Ints":
        array = x if isinstance(x, np.ndarray) else x.to("cpu", torch.int32).numpy()
        return cls(array.tobytes(), array.shape)

    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, np.int32).reshape(self.shape)


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


def _rows_in_use(block_tables: Tensor, table_rows: Tensor, lens: _Ints, block_size: int) -> _Ints:
    """The sequences' rows of a table of all slots, no wider than the longest context."""
    width = -(-int(lens.array().max(initial=0)) // block_size)
    return _Ints.of(block_tables[:, :width].cpu().numpy()[table_rows.cpu().numpy()])


class _Tile(NamedTuple):
    """Neighbouring queries of one sequence, the first in row `row` of q and at `position` of the
    sequence."""

    seq: int
    row: int
    num_queries: int
    position: int

    def num_scores(self, group: int, head_dim: int) -> int:
        """Scores that the tile computes in each KV head when it is a batch of its own."""
        rows = _round_up(self.num_queries * group, _exact_rows(head_dim))
        return rows * _round_up(self.position + self.num_queries, KV_CHUNK)


@dataclass(frozen=True)
class _Batch:
    """Where the inputs of n tiles lie, each padded to P queries and L keys (G = query heads per KV
    head).

    rows: rows of q, int64 [n * P]; a shorter tile has its last query several times. kv_rows: rows
    of _rows_of(kv), int64 [2 * n * Hk * L / block_size]. Every query of the batch sees the keys
    before `tail`. Of those from there on, `written` [n, 1, L - tail, 1] has -1 (all bits) for those
    in the context, else 0, and `bias` [n, 1, P * G, L - tail] 0 for those that a query sees, else
    MASKED.
    """

    num_tiles: int
    rows: Tensor
    kv_rows: Tensor
    tail: int
    written: Tensor
    bias: Tensor


@lru_cache(maxsize=4)
def _plan(
    block_tables: _Ints,
    context_lens: _Ints,
    query_starts: _Ints,
    num_heads: int,
    kv_shape: torch.Size,
    kv_strides: tuple[int, ...],
    device: torch.device,
) -> list[_Batch]:
    """The batches of one call of paged_prefill. Cached, since the layers of a step all need the
    same."""
    group = num_heads // kv_shape[1]
    lens = context_lens.array().tolist()
    starts = query_starts.array().tolist()
    tile_len = max(TILE_ROWS // group, 1)
    tiles = [
        _Tile(seq, row, min(tile_len, end - row), lens[seq] - end + row)
        for seq, (start, end) in enumerate(pairwise(starts))
        for row in range(start, end, tile_len)
    ]
    tables = block_tables.array().astype(np.int64)
    batches = _similar(tiles, group, kv_shape[4])
    return [_make_batch(some, tables, group, kv_shape, kv_strides, device) for some in batches]


def _similar(tiles: list[_Tile], group: int, head_dim: int) -> Iterator[list[_Tile]]:
    """Tiles to compute together: few enough for the CPU's cache, and not much smaller than the
    largest of them."""

    def size(tile: _Tile) -> int:
        return tile.num_scores(group, head_dim)

    tiles = sorted(tiles, key=size, reverse=True)
    while tiles:
        largest = size(tiles[0])
        padding = 0
        count = 1
        for tile in tiles[1:]:
            padding += largest - size(tile)
            if (count + 1) * largest > BATCH_SCORES or padding > BATCH_SCORES // 4:
                break
            count += 1
        yield tiles[:count]
        tiles = tiles[count:]


def _make_batch(
    tiles: list[_Tile],
    tables: np.ndarray,
    group: int,
    kv_shape: torch.Size,
    kv_strides: tuple[int, ...],
    device: torch.device,
) -> _Batch:
    """tables: int64 [S, max_blocks]."""
    seqs, first_rows, num_queries, first_positions = np.array(tiles).T[:, :, None]  # each [n, 1]
    offsets = np.minimum(np.arange(num_queries.max()), num_queries - 1)  # [n, P]
    lens = first_positions + num_queries
    block_size = kv_shape[3]
    num_keys = _round_up(int(lens.max()), max(KV_CHUNK, block_size))
    # Keys past a context come from the null block 0: their table entries may be anything.
    first_keys = np.arange(0, num_keys, block_size)
    blocks = np.zeros((len(tiles), len(first_keys)), dtype=np.int64)
    known = tables[seqs[:, 0], : len(first_keys)]
    blocks[:, : known.shape[1]] = known
    blocks[first_keys >= lens] = 0
    tail = int(first_positions.min()) + 1
    keys = np.arange(tail, num_keys)
    last_seen = np.repeat(first_positions + offsets, group, axis=1)  # [n, P * G]
    arrays = {
        "rows": (first_rows + offsets).ravel(),
        "kv_rows": _kv_rows(blocks, kv_shape, kv_strides),
        "written": -(keys < lens).astype(np.int32)[:, None, :, None],
        "bias": np.where(keys <= last_seen[:, :, None], 0, MASKED).astype(np.float32)[:, None],
    }
    tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    return _Batch(num_tiles=len(tiles), tail=tail, **tensors)


def _attend(q: Tensor, kv: Tensor, batch: _Batch, scale: float) -> Tensor:
    """Attention of the batch's queries q [n * P, Hq, D]; returns the same shape in float32."""
    (_, num_heads, head_dim) = q.shape
    num_kv_heads = kv.shape[1]
    n = batch.num_tiles
    group = num_heads // num_kv_heads
    rows_kv = (
        _rows_of(kv).index_select(0, batch.kv_rows).float().view(2, n, num_kv_heads, -1, head_dim)
    )
    # Unwritten rows may hold NaN, which neither a bias nor a probability of 0 removes. Clearing
    # their bits is several times faster than masked_fill_ or where.
    rows_kv[:, :, :, batch.tail :].view(torch.int32).bitwise_and_(batch.written)
    keys, values = rows_kv.flatten(1, 2)  # each [n * Hk, L, D]

    queries = (q.float() * scale).view(n, -1, num_kv_heads, group, head_dim).transpose(1, 2)
    queries = queries.reshape(n * num_kv_heads, -1, head_dim)  # [n * Hk, P * G, D]
    num_rows = queries.shape[1]
    exact_rows = _exact_rows(head_dim)
    scores = torch.bmm(_pad_rows(queries, exact_rows), keys.transpose(1, 2))[:, :num_rows]
    scores.view(n, num_kv_heads, num_rows, -1)[..., batch.tail :].add_(batch.bias)
    probs = _pad_rows(torch.softmax(scores, dim=-1), exact_rows)
    out = torch.zeros_like(queries)
    for chunk_probs, chunk_values in zip(
        probs.split(KV_CHUNK, dim=2), values.split(KV_CHUNK, dim=1), strict=True
    ):
        out += torch.bmm(chunk_probs, chunk_values)[:, :num_rows]
    return out.view(n, num_kv_heads, -1, group, head_dim).transpose(1, 2).reshape(q.shape)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _pad_rows(x: Tensor, multiple: int) -> Tensor:
    """x [n, rows, width] with zero rows appended up to a multiple of so many."""
    return functional.pad(x, (0, 0, 0, -x.shape[1] % multiple))


@lru_cache
def _exact_rows(head_dim: int) -> int:
    """The fewest rows, of 4, 8 and 16, whose float32 bmm gives every row the bits it has among
    many, on this CPU.

    Decoding has few rows a KV head, so padding them to 16 is most of its arithmetic; but some CPUs'
    libraries compute small products in another order, which small ones depends on the head's size.
    (Xeons with AVX-512 and AMX: 4 rows agree up to heads of 80, 8 up to 160, 16 always.) Tried once
    per size, in a millisecond.
    """
    generator = torch.Generator().manual_seed(0)
    for rows in (4, 8):
        if all(_rows_agree(rows, head_dim, num_keys, generator) for num_keys in (64, 192, 320)):
            return rows
    return ROW_MULTIPLE


def _rows_agree(rows: int, head_dim: int, num_keys: int, generator: torch.Generator) -> bool:
    many = torch.randn(3, 64, head_dim, generator=generator)
    keys = torch.randn(3, num_keys, head_dim, generator=generator)
    probs = torch.randn(3, 64, KV_CHUNK, generator=generator)
    scores = torch.bmm(many, keys.transpose(1, 2))
    values = torch.bmm(probs, keys[:, :KV_CHUNK])
    return all(
        torch.equal(
            torch.bmm(many[:, at : at + rows].contiguous(), keys.transpose(1, 2)),
            scores[:, at : at + rows],
        )
        and torch.equal(
            torch.bmm(probs[:, at : at + rows].contiguous(), keys[:, :KV_CHUNK]),
            values[:, at : at + rows],
        )
        for at in (0, 5, 48)
    )


def _rows_of(kv: Tensor) -> Tensor:
    """The memory of `kv`, a layer of a KV cache, as a matrix with one row a (block, head, layer,
    plane).

    index_select of such rows is three times faster than indexing `kv` by (block, head).
    """
    num_blocks, num_kv_heads, _, block_size, head_dim = kv.shape
    width = block_size * head_dim
    num_rows = ((num_blocks - 1) * kv.stride(0) + (num_kv_heads - 1) * kv.stride(1)) // width + 2
    return kv.as_strided((num_rows, width), (width, 1))


def _kv_rows(blocks: np.ndarray, kv_shape: torch.Size, kv_strides: tuple[int, ...]) -> np.ndarray:
    """Rows of _rows_of(kv) that hold K, then V, of `blocks` [n, b], head by head: int64 [2 * n * Hk
    * b]."""
    _, num_kv_heads, _, block_size, head_dim = kv_shape
    width = block_size * head_dim
    if kv_strides[2:] != (width, head_dim, 1) or kv_strides[0] % width or kv_strides[1] % width:
        raise ValueError(
            f"kv must be a layer of a contiguous KV cache, not a view with strides {kv_strides}: "
            "pass kv_cache[:, :, i]"
        )
    if KV_CHUNK % block_size and block_size % KV_CHUNK:
        raise ValueError(
            f"block_size must be 16, 32, 64 or 128 for the CPU attention, not {block_size}"
        )
    heads = np.arange(num_kv_heads)[:, None] * (kv_strides[1] // width)
    planes = np.arange(2)[:, None, None, None]
    return ((blocks * (kv_strides[0] // width))[:, None] + heads + planes).ravel()
