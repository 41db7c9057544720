"""Attention in plain torch, tile by tile: this file decides which queries are computed together,
and with which keys.

Every tile's arithmetic has the same shape however a batch is composed; reference.py, the only
caller, says why.
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

from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.linear.reference import ROW_MULTIPLE

KV_CHUNK = 64
TILE_ROWS = 128
BATCH_SCORES = 2**16
# Finite, so that a context of 0 yields zeros and not NaN. After any score, exp(MASKED - max) is
# exactly 0.
MASKED = -1e30


class Ints(NamedTuple):
    """An int32 tensor by value, to use as the key of a cache."""

    data: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor | np.ndarray) -> "Ints":
        array = x if isinstance(x, np.ndarray) else x.to("cpu", torch.int32).numpy()
        return cls(array.tobytes(), array.shape)

    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, np.int32).reshape(self.shape)


def rows_in_use(block_tables: Tensor, table_rows: Tensor, lens: Ints, block_size: int) -> Ints:
    """Takes the sequences' rows from a table of all slots, cut to the width of the longest
    context."""
    width = -(-int(lens.array().max(initial=0)) // block_size)
    return Ints.of(block_tables[:, :width].cpu().numpy()[table_rows.cpu().numpy()])


class _Tile(NamedTuple):
    """Neighbouring queries of one sequence. The first is row `row` of q and has position `position`
    in the sequence."""

    seq: int
    row: int
    num_queries: int
    position: int

    def num_scores(self, group: int, head_dim: int) -> int:
        """Number of scores that the tile computes in each KV head when it is a batch of its own."""
        rows = _round_up(self.num_queries * group, _exact_rows(head_dim, head_dim))
        return rows * _round_up(self.position + self.num_queries, KV_CHUNK)


@dataclass(frozen=True)
class _Batch:
    """Locations of the inputs of n tiles, each padded to P queries and L keys. G is the number of
    query heads per KV head.

    rows: int64 [n * P], rows of q. A shorter tile repeats its last query.
    kv_rows: int64 [planes * n * Hk * L / block_size], rows of _rows_of(kv).
    tail: every query sees all keys before it.
    written: [n, 1, L - tail, 1], for the keys from `tail` on: -1 (all bits) for those in the
        context and in some query's window, else 0.
    bias: [n, 1, P * G, L - tail], for the same keys: 0 for those that a query sees, else MASKED.
    """

    num_tiles: int
    rows: Tensor
    kv_rows: Tensor
    tail: int
    written: Tensor
    bias: Tensor


@lru_cache(maxsize=4)
def plan_tiles(
    block_tables: Ints,
    context_lens: Ints,
    query_starts: Ints,
    num_heads: int,
    kv_shape: torch.Size,
    kv_strides: tuple[int, ...],
    device: torch.device,
    window: int | None,
) -> list[_Batch]:
    """Plans the batches of one call of paged_prefill. They are cached, since all layers of a step
    need the same ones."""
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
    return [
        _make_batch(some, tables, group, kv_shape, kv_strides, device, window) for some in batches
    ]


def _similar(tiles: list[_Tile], group: int, head_dim: int) -> Iterator[list[_Tile]]:
    """Yields groups of tiles to compute together. A group is small enough for the CPU's cache, and
    its tiles are not much smaller than its largest."""

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
    window: int | None,
) -> _Batch:
    """Makes the batch of these tiles; tables is int64 [S, max_blocks]."""
    seqs, first_rows, num_queries, first_positions = np.array(tiles).T[:, :, None]  # each [n, 1]
    offsets = np.minimum(np.arange(num_queries.max()), num_queries - 1)  # [n, P]
    lens = first_positions + num_queries
    block_size = kv_shape[3]
    num_keys = _round_up(int(lens.max()), max(KV_CHUNK, block_size))
    # Keys past a context come from the null block 0, because their table entries may be anything.
    first_keys = np.arange(0, num_keys, block_size)
    blocks = np.zeros((len(tiles), len(first_keys)), dtype=np.int64)
    known = tables[seqs[:, 0], : len(first_keys)]
    blocks[:, : known.shape[1]] = known
    blocks[first_keys >= lens] = 0
    tail = int(first_positions.min()) + 1 if window is None else 0
    keys = np.arange(tail, num_keys)
    last_seen = np.repeat(first_positions + offsets, group, axis=1)  # [n, P * G]
    written = keys < lens
    is_seen = keys <= last_seen[:, :, None]
    if window is not None:
        first_seen = np.maximum(last_seen - window + 1, 0)
        # Blocks that are before the windows of all queries may have been given to other sequences.
        written &= keys >= first_seen.min(axis=1, keepdims=True)
        is_seen &= keys >= first_seen[:, :, None]
    arrays = {
        "rows": (first_rows + offsets).ravel(),
        "kv_rows": _kv_rows(blocks, kv_shape, kv_strides),
        "written": -written.astype(np.int32)[:, None, :, None],
        "bias": np.where(is_seen, 0, MASKED).astype(np.float32)[:, None],
    }
    tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    return _Batch(num_tiles=len(tiles), tail=tail, **tensors)


def attend(
    q: Tensor, kv: Tensor, batch: _Batch, spec: AttentionSpec, sinks: Tensor | None = None
) -> Tensor:
    """Attention of the batch's queries q [n * P, Hq, D]. Returns [n * P, Hq, out_width] in
    float32."""
    assert (sinks is not None) == spec.has_sinks, "sinks of a layer that has none, or none given"
    (_, num_heads, head_dim) = q.shape
    num_kv_heads, planes = kv.shape[1:3]
    n = batch.num_tiles
    group = num_heads // num_kv_heads
    rows_kv = _rows_of(kv).index_select(0, batch.kv_rows).float()
    rows_kv = rows_kv.view(planes, n, num_kv_heads, -1, head_dim)
    # Unwritten rows may hold NaN, which neither a bias nor a probability of 0 removes. To clear
    # their bits is several times faster than masked_fill_ or where.
    rows_kv[:, :, :, batch.tail :].view(torch.int32).bitwise_and_(batch.written)
    stored = rows_kv.flatten(1, 2)  # each plane [n * Hk, L, D]
    keys, values = stored[0], stored[-1, :, :, : spec.out_width]

    queries = (q.float() * spec.scale).view(n, -1, num_kv_heads, group, head_dim).transpose(1, 2)
    queries = queries.reshape(n * num_kv_heads, -1, head_dim)  # [n * Hk, P * G, D]
    num_rows = queries.shape[1]
    exact_rows = _exact_rows(head_dim, spec.out_width)
    scores = torch.bmm(_pad_rows(queries, exact_rows), keys.transpose(1, 2))[:, :num_rows]
    if spec.soft_cap is not None:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    scores.view(n, num_kv_heads, num_rows, -1)[..., batch.tail :].add_(batch.bias)
    if sinks is not None:
        scores = torch.cat((_sink_scores(sinks, n, num_kv_heads, num_rows), scores), dim=-1)
    probs = torch.softmax(scores, dim=-1)
    if sinks is not None:
        probs = probs[..., KV_CHUNK:]
    probs = _pad_rows(probs, exact_rows)
    out = queries.new_zeros(*queries.shape[:2], spec.out_width)
    for chunk_probs, chunk_values in zip(
        probs.split(KV_CHUNK, dim=2), values.split(KV_CHUNK, dim=1), strict=True
    ):
        out += torch.bmm(chunk_probs, chunk_values)[:, :num_rows]
    heads = out.view(n, num_kv_heads, -1, group, spec.out_width).transpose(1, 2)
    return heads.reshape(*q.shape[:2], spec.out_width)


def _sink_scores(sinks: Tensor, num_tiles: int, num_kv_heads: int, num_rows: int) -> Tensor:
    """Returns [n * Hk, P * G, KV_CHUNK]: the scores of one chunk that is put before all keys. Its
    first score is the sink of the row's head."""
    of_rows = sinks.float().view(num_kv_heads, 1, -1)  # [Hk, 1, G]
    group = of_rows.shape[2]
    of_rows = of_rows.expand(num_tiles, num_kv_heads, num_rows // group, group).reshape(
        -1, num_rows
    )
    return functional.pad(of_rows[..., None], (0, KV_CHUNK - 1), value=MASKED)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _pad_rows(x: Tensor, multiple: int) -> Tensor:
    """Appends zero rows to x [n, rows, width], up to a multiple of `multiple`."""
    return functional.pad(x, (0, 0, 0, -x.shape[1] % multiple))


@lru_cache
def _exact_rows(head_dim: int, value_width: int) -> int:
    """The fewest rows (4, 8 or 16) whose float32 bmm gives every row the same bits as a bmm of many
    rows, on this CPU.

    Decoding has few rows per KV head, so padding them to 16 is most of its arithmetic. But the
    libraries of some CPUs compute small products in another order; the head's size decides which
    products count as small. (On Xeons with AVX-512 and AMX, 4 rows agree up to heads of 80, 8 up to
    160, 16 always.) The probe runs once per size and takes a millisecond.
    """
    generator = torch.Generator().manual_seed(0)
    for rows in (4, 8):
        if all(
            _rows_agree(rows, head_dim, value_width, num_keys, generator)
            for num_keys in (64, 192, 320)
        ):
            return rows
    return ROW_MULTIPLE


def _rows_agree(
    rows: int, head_dim: int, value_width: int, num_keys: int, generator: torch.Generator
) -> bool:
    many = torch.randn(3, 64, head_dim, generator=generator)
    keys = torch.randn(3, num_keys, head_dim, generator=generator)
    probs = torch.randn(3, 64, KV_CHUNK, generator=generator)
    scores = torch.bmm(many, keys.transpose(1, 2))
    kept = keys[:, :KV_CHUNK, :value_width]
    values = torch.bmm(probs, kept)
    return all(
        torch.equal(
            torch.bmm(many[:, at : at + rows].contiguous(), keys.transpose(1, 2)),
            scores[:, at : at + rows],
        )
        and torch.equal(
            torch.bmm(probs[:, at : at + rows].contiguous(), kept),
            values[:, at : at + rows],
        )
        for at in (0, 5, 48)
    )


def _rows_of(kv: Tensor) -> Tensor:
    """The memory of `kv`, a layer of a KV cache, as a matrix with one row per (block, head, layer,
    plane).

    index_select of such rows is three times faster than indexing `kv` by (block, head).
    """
    num_blocks, num_kv_heads, planes, block_size, head_dim = kv.shape
    width = block_size * head_dim
    before = (num_blocks - 1) * kv.stride(0) + (num_kv_heads - 1) * kv.stride(1)
    num_rows = before // width + planes
    return kv.as_strided((num_rows, width), (width, 1))


def _kv_rows(blocks: np.ndarray, kv_shape: torch.Size, kv_strides: tuple[int, ...]) -> np.ndarray:
    """Rows of _rows_of(kv) that hold K, and then V if it has a plane, of `blocks` [n, b], head by
    head: int64 [planes * n * Hk * b]."""
    _, num_kv_heads, num_planes, block_size, head_dim = kv_shape
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
    planes = np.arange(num_planes)[:, None, None, None]
    return ((blocks * (kv_strides[0] // width))[:, None] + heads + planes).ravel()
