"""Attention of prompts over latents by cuDNN. Every head gets keys and values of its own, which are
made of the latents when they are needed.

In the latent's space (attention.py) a prompt costs three times the arithmetic, on tiles that fill
the registers. Here a step's sequences are copied to a new layout. Sequences of about the same
length are put together, each with all of its context before its queries. Rows before the queries
are computed too, and thrown away. Rows past a sequence's end are zeros; no query sees them, because
they come last. A context longer than two steps is attended to in pieces, which are joined by their
log-sum-exps.

Only warmed shapes are taken, as in attention/dense.py. This file knows nothing of engines.
triton_ops.py calls it.
"""

import logging
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pdserve.kernels.attention.dense import attend_rows
from pdserve.kernels.attention.join import launch_join_attention
from pdserve.kernels.attention.spec import Paged, Prefills
from pdserve.kernels.latents.expanded_rows import launch_lay_out, launch_take_back
from pdserve.kernels.latents.spec import LatentAttentionSpec, LatentHeads
from pdserve.kernels.launching.launch import cdiv, next_power_of_2, power_of_2_below

logger = logging.getLogger(__name__)

MIN_LENGTH = 256
LENGTH_MULTIPLE = 512  # lengths above 512 are multiples of this
LONG_MULTIPLE = 1024  # the same for lengths above a step's rows, and for queries after pieces
WIDTH_MULTIPLE = 8  # of the columns of a head; with others cuDNN has crashed the process
# Costs, measured on an H200. The unit is one pair of a query and a key that are expanded.
LATENT_PAIR = 11  # one pair in the latent's space
ROW = 1000  # one row that is laid out
GROUP = 1 << 20  # the launches of one group


class Group(NamedTuple):
    """Sequences that are laid out with `length` rows each. The first `begins` rows of each are left
    out."""

    length: int
    sequences: tuple[int, ...]
    begins: tuple[int, ...]


class Layout(NamedTuple):
    """The groups of all sequences, and their cost in pairs."""

    groups: tuple[Group, ...]
    cost: int


class _Warm(threading.local):
    """Holds the largest number of rows of a step, by what plans depend on beside its shape."""

    def __init__(self) -> None:
        self.max_rows: dict[tuple[object, ...], int] = {}


_warm = _Warm()


def expansion_pays(prefills: Prefills, spec: LatentAttentionSpec, like: Tensor) -> bool:
    """True if expanded_prefill() is faster than prompts in the latent's space and needs no new
    plan. like: a tensor with the dtype and device of the queries."""
    max_rows = _warm.max_rows.get(_key(spec, like), 0)
    chunks = prefills.chunks
    if not max_rows or not chunks or max(rows for _, rows in chunks) > max_rows:
        return False
    in_latent = sum(rows * (before + rows // 2) for before, rows in chunks)
    return LATENT_PAIR * in_latent > lay_out(chunks, max_rows).cost


def warm_expansion(spec: LatentAttentionSpec, num_rows: int, like: Tensor) -> None:
    """Makes cuDNN's plans for steps of up to num_rows rows, if cuDNN can attend to such heads. A
    plan takes 30 ms. Call it on the thread that runs the model."""

    def attend(batch: int, num_queries: int, num_keys: int, causal: bool) -> None:
        heads, width = spec.attends.num_heads, spec.nope_dim + spec.rope_dim
        q, k = (like.new_zeros(rows, heads, width) for rows in (num_queries, num_keys))
        v = like.new_zeros(num_keys, heads, spec.v_dim)
        attend_rows(batch, q, k, v, causal, spec.attends.scale)

    widths = spec.nope_dim + spec.rope_dim, spec.v_dim
    if any(width % WIDTH_MULTIPLE for width in widths):
        logger.info("prompts stay in the latent's space: cuDNN takes no heads of %s", widths)
        return
    try:  # torch's own check does not cover values of another width
        attend(1, MIN_LENGTH, MIN_LENGTH, True)
    except RuntimeError as error:
        logger.info(
            "prompts stay in the latent's space: cuDNN cannot attend to %s: %s", spec, error
        )
        return
    for batch, length in _shapes(num_rows):
        attend(batch, batch * length, batch * length, True)
    for length in range(LONG_MULTIPLE, num_rows + LONG_MULTIPLE, LONG_MULTIPLE):
        attend(1, length, num_rows, False)
    _warm.max_rows[_key(spec, like)] = num_rows


def warm_pieces(kv: Tensor, tables: Tensor, spec: LatentAttentionSpec, heads: LatentHeads) -> None:
    """Launches the kernels that join pieces, if plans exist and a context can be that long."""
    max_rows = _warm.max_rows.get(_key(spec, kv), 0)
    before = 2 * max_rows
    if not max_rows or tables.shape[1] * kv.shape[3] <= before:
        return
    row, context_lens = torch.tensor([[0], [before + 1]], dtype=torch.int32, device=kv.device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=kv.device)
    paged = Paged(tables, row, context_lens, before + 1)
    num_heads = spec.attends.num_heads
    q = kv.new_zeros(1, num_heads, spec.nope_dim + spec.rope_dim)
    out = kv.new_empty(1, num_heads, spec.v_dim)
    expanded_prefill(q, kv, Prefills(paged, starts, 1, ((before, 1),)), spec, heads, out)


def expanded_prefill(
    q: Tensor,
    kv: Tensor,
    prefills: Prefills,
    spec: LatentAttentionSpec,
    heads: LatentHeads,
    out: Tensor,
) -> None:
    """Runs `LatentOps.expanded_prefill`; expansion_pays() must be true."""
    max_rows = _warm.max_rows[_key(spec, q)]
    layout = lay_out(prefills.chunks, max_rows)
    num_queries = sum(rows for _, rows in prefills.chunks)
    out[num_queries:] = 0
    for group in layout.groups:
        where = _on_device(group, q.device)
        queries, keys, values = _expanded(q, kv, prefills, spec, heads, where, group.length)
        batch = len(group.sequences)
        made, lse = attend_rows(batch, queries, keys, values, True, spec.attends.scale)
        if group.begins[0]:
            before, rows = prefills.chunks[group.sequences[0]]
            own = slice(before - group.begins[0], before - group.begins[0] + rows)
            parts = made[own], lse[:, :, own].contiguous()
            _join_pieces(queries[own], kv, prefills, spec, heads, group, parts, max_rows)
        launch_take_back(made, prefills, where, group.length, out)


@lru_cache(maxsize=64)
def lay_out(chunks: tuple[tuple[int, int], ...], max_rows: int) -> Layout:
    """Decides how the chunks of a step are laid out. No chunk may have more than max_rows rows."""
    lengths: dict[int, list[tuple[int, int]]] = {}
    cost = 0
    for sequence, (before, rows) in enumerate(chunks):
        begin = before // max_rows * max_rows if before + rows > 2 * max_rows else 0
        cost += begin * (cdiv(rows, LONG_MULTIPLE) * LONG_MULTIPLE + ROW)
        length = _padded(before - begin + rows, max_rows)
        lengths.setdefault(length if not begin else -length, []).append((sequence, begin))
    groups = []
    for length, members in sorted(lengths.items()):
        most = 1 if length < 0 else power_of_2_below(max_rows // length)
        first = 0
        while first < len(members):
            batch = min(power_of_2_below(len(members) - first), most)
            sequences, begins = zip(*members[first : first + batch], strict=True)
            groups.append(Group(abs(length), sequences, begins))
            first += batch
    for length, sequences, _ in groups:
        cost += len(sequences) * length * (length // 2 + ROW) + GROUP
    return Layout(tuple(groups), cost)


def _padded(rows: int, max_rows: int) -> int:
    if rows <= LENGTH_MULTIPLE:
        return max(next_power_of_2(rows), MIN_LENGTH)
    multiple = LENGTH_MULTIPLE if rows <= max_rows else LONG_MULTIPLE
    return cdiv(rows, multiple) * multiple


def _shapes(max_rows: int) -> Iterator[tuple[int, int]]:
    """Yields batch and length of all groups that steps of max_rows rows may have."""
    lengths = {_padded(rows, max_rows) for rows in range(1, 2 * max_rows + 1, MIN_LENGTH)}
    lengths.add(_padded(2 * max_rows, max_rows))
    for length in sorted(lengths):
        batch = 1
        while batch == 1 or batch * length <= max_rows:
            yield batch, length
            batch *= 2


def _key(spec: LatentAttentionSpec, like: Tensor) -> tuple[object, ...]:
    return spec, like.dtype, like.device


@lru_cache(maxsize=64)
def _on_device(group: Group, device: torch.device) -> Tensor:
    """Returns int32 `[2, batch]`: sequences and begins."""
    numbers = torch.tensor([group.sequences, group.begins], dtype=torch.int32)
    if device.type == "cuda":  # a copy from pageable memory would wait for the device
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def _expanded(
    q: Tensor | None,
    kv: Tensor,
    prefills: Prefills,
    spec: LatentAttentionSpec,
    heads: LatentHeads,
    where: Tensor,
    length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries and keys `[batch * length, H, nope_dim + rope_dim]`, and values `[batch *
    length, H, v_dim]`. Without q the queries are meaningless."""
    num_rows = where.shape[1] * length
    num_heads = spec.attends.num_heads
    width = spec.nope_dim + spec.rope_dim
    latents = kv.new_empty(num_rows, spec.rank)
    keys = kv.new_empty(num_rows, num_heads, width)
    queries = keys if q is None else torch.empty_like(keys)
    launch_lay_out(q, kv, prefills, where, length, latents, keys, queries)
    values = kv.new_empty(num_rows, num_heads, spec.v_dim)
    each = latents.expand(num_heads, *latents.shape)
    torch.bmm(each, heads.keys.mT, out=keys[:, :, : spec.nope_dim].transpose(0, 1))
    torch.bmm(each, heads.values.mT, out=values.transpose(0, 1))
    return queries, keys, values


def _join_pieces(
    queries: Tensor,
    kv: Tensor,
    prefills: Prefills,
    spec: LatentAttentionSpec,
    heads: LatentHeads,
    group: Group,
    own: tuple[Tensor, Tensor],
    piece: int,
) -> None:
    """Joins the attention to earlier pieces into `own`, which has the attention of the queries to
    their own part. The group must have one sequence."""
    made, lse = own
    rows = len(queries)
    padded = queries.new_zeros(cdiv(rows, LONG_MULTIPLE) * LONG_MULTIPLE, *queries.shape[1:])
    padded[:rows] = queries
    for begin in range(0, group.begins[0], piece):
        where = _on_device(Group(piece, group.sequences, (begin,)), queries.device)
        _, keys, values = _expanded(None, kv, prefills, spec, heads, where, piece)
        more, more_lse = attend_rows(1, padded, keys, values, False, spec.attends.scale)
        other = more[:rows], more_lse[:, :, :rows].contiguous()
        launch_join_attention(made, lse, *other, made)
