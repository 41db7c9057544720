"""Causal attention of prompts by cuDNN, through torch, on K and V rows that are contiguous in
memory. It is a quarter faster than a paged kernel, on the shapes that it is prepared for.

Fresh prompts have all their keys among the step's own rows. A chunk that continues a prompt attends
to its own rows and to the earlier rows. The earlier rows are gathered from their blocks piece by
piece, and the parts are joined by their log-sum-exps.

cuDNN makes a plan (tens of milliseconds) for each new shape, and torch keeps plans per thread. So
this file takes only shapes that warm_dense_prefill() has run on this thread. These are multiples of
512 rows, such as the chunks of a long prompt that has the device for itself, in batches of a power
of two. The number of rows before a chunk must be the rows of such a chunk or a multiple of it. The
paged kernel takes all other lengths: to pad them would cost in copies what cuDNN wins. This file
knows nothing of engines. triton_ops.py calls it.
"""

import threading
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from pdserve.kernels.attention import reference
from pdserve.kernels.attention.join import launch_join_attention
from pdserve.kernels.kv.cache_rows import launch_gather_kv

LENGTH_MULTIPLE = 512
MIN_LENGTH = 1024
CHUNK_MULTIPLE = 1024  # the paged kernel takes the rows of a chunk past a multiple of this
# Rows before a chunk. With shorter pieces, gathering and joining them costs what cuDNN wins.
MIN_PIECE = 4096


class PromptBatch(NamedTuple):
    """A batch of `batch` prompts of `length` rows each; the first begins at row `start`."""

    start: int
    batch: int
    length: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.batch * self.length)


class _Warm(threading.local):
    """The shapes for which torch has plans in this thread.

    shapes: values of _shape().
    pieces: for chunks of such shapes, how many of the rows before them are attended to at a time.
    """

    def __init__(self) -> None:
        self.shapes: set[tuple[object, ...]] = set()
        self.pieces: dict[tuple[object, ...], int] = {}


_warm = _Warm()


def warm_dense_prefill(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """Makes the plans for steps of up to len(q) rows that are laid out in memory like these.

    A plan takes 30 ms (8,192 rows need 33 plans), the first one 0.6 s. Call it on the thread that
    runs the model.
    """
    if not _is_supported(q, k, v):
        return
    for part in _parts_to_warm(len(q)):
        _causal(part, q, k, v, scale)
        _warm.shapes.add(_shape(part, q, k, v))
    if len(q) >= MIN_PIECE:
        keys, values = k.new_zeros(2, *k.shape)
        for num_rows in range(2 * CHUNK_MULTIPLE, len(q) + 1, CHUNK_MULTIPLE):
            attend_rows(1, q[:num_rows], keys, values, False, scale)
            _warm.pieces[_shape(PromptBatch(0, 1, num_rows), q, k, v)] = len(q)
    torch.cuda.synchronize(q.device)


def fresh_prefill_pays(q: Tensor, k: Tensor, v: Tensor, query_lens: tuple[int, ...]) -> bool:
    """True if fresh_prefill() is faster than paged_prefill() for such prompts and needs no new
    plan."""
    parts = deal(query_lens)
    return bool(parts) and all(_shape(part, q, k, v) in _warm.shapes for part in parts)


def fresh_prefill(
    q: Tensor, k: Tensor, v: Tensor, query_lens: tuple[int, ...], scale: float
) -> Tensor:
    """Does what reference.fresh_prefill does, for lengths that deal() takes."""
    parts = deal(query_lens)
    outs = [_causal(part, q, k, v, scale)[0] for part in parts]
    if parts[-1].rows.stop < len(q):
        outs.append(q.new_zeros(q[parts[-1].rows.stop :].shape))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


@lru_cache(maxsize=64)
def deal(query_lens: tuple[int, ...]) -> tuple[PromptBatch, ...]:
    """Returns the prompts in order, with neighbours of equal length batched together. Returns () if
    the length of any prompt does not pay."""
    parts: list[PromptBatch] = []
    start = 0
    for length, run in groupby(query_lens):
        left = len(list(run))
        if length < MIN_LENGTH or length % LENGTH_MULTIPLE:
            return ()
        while left:
            batch = 1 << (left.bit_length() - 1)
            parts.append(PromptBatch(start, batch, length))
            start += batch * length
            left -= batch
    return tuple(parts)


def chunk_rows(num_rows: int) -> int:
    """Number of a chunk's first rows that chunk_prefill() takes."""
    return num_rows - num_rows % CHUNK_MULTIPLE if num_rows >= 2 * CHUNK_MULTIPLE else 0


def chunk_prefill_pays(q: Tensor, k: Tensor, v: Tensor, prefix_len: int, block_size: int) -> bool:
    """True if chunk_prefill() is faster than paged_prefill() for such a chunk and needs no new
    plan."""
    piece = _piece(q, k, v)
    return piece > 0 and prefix_len > 0 and prefix_len % piece == 0 and piece % block_size == 0


def chunk_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    table_row: Tensor,
    prefix_len: int,
    scale: float,
    out: Tensor,
) -> int:
    """Writes the attention of a chunk's first rows to `out` (shaped like q, contiguous), and
    returns how many rows these are.

    q, k and v are as in fresh_prefill. prefix_len rows come before the chunk. They are in kv, in
    the blocks that row table_row (int32 [1]) of block_tables names.
    """
    length = chunk_rows(len(q))
    piece = _piece(q, k, v)
    q = q[:length]
    out = out[:length]
    own, lse = attend_rows(1, q, k[:length], v[:length], True, scale)
    for start in range(0, prefix_len, piece):
        keys, values = launch_gather_kv(kv, block_tables, table_row, start, piece, q.dtype)
        launch_join_attention(own, lse, *attend_rows(1, q, keys, values, False, scale), out)
        own = out
    return length


def _piece(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Number of rows before such a chunk that are attended to at a time; 0 if no plan is ready for
    it."""
    return _warm.pieces.get(_shape(PromptBatch(0, 1, chunk_rows(len(q))), q, k, v), 0)


def _is_supported(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if cuDNN can attend to such rows. It cannot in float32, for example."""
    heads = (x[None].transpose(1, 2) for x in (q, k, v))
    params = SDPAParams(*heads, None, 0.0, True, q.shape[1] != k.shape[1])  # type: ignore[call-arg,arg-type]
    return q.is_cuda and can_use_cudnn_attention(params)


def _parts_to_warm(num_rows: int) -> Iterator[PromptBatch]:
    for length in range(MIN_LENGTH, num_rows + 1, LENGTH_MULTIPLE):
        batch = 1
        while batch * length <= num_rows:
            yield PromptBatch(0, batch, length)
            batch *= 2


def _shape(part: PromptBatch, q: Tensor, k: Tensor, v: Tensor) -> tuple[object, ...]:
    """The properties by which torch tells plans apart, as far as they vary here."""
    strides = q.stride(), k.stride(), v.stride()
    return part.batch, part.length, strides, q.shape[1:], k.shape[1], q.dtype, q.device


def _causal(
    part: PromptBatch, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return attend_rows(part.batch, q[part.rows], k[part.rows], v[part.rows], True, scale)


def attend_rows(
    batch: int, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Does what reference.dense_attention does, by cuDNN. It calls torch's internal function,
    because the public one does not return the log-sum-exps."""
    if not q.is_cuda:
        return reference.dense_attention(batch, q, k, v, causal, scale)
    q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out.transpose(1, 2).flatten(0, 1).contiguous(), lse.flatten(2)
