"""Causal attention of fresh prompts, all of whose keys are rows of the same step: cuDNN, through torch, on the rows as
they lie, which is a quarter faster than a paged kernel.

cuDNN makes a plan (tens of milliseconds) for each new shape, and torch keeps plans by thread. So only shapes that
warm_fresh_prefill() has run on this thread are taken: multiples of 512 rows, such as the first chunk of a long prompt,
in batches of a power of two. Other lengths are left to the paged kernel: padding them costs in copies what cuDNN wins.
Knows nothing of blocks. Called through triton_ops.py.
"""

import threading
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

LENGTH_MULTIPLE = 512
MIN_LENGTH = 1024


class Part(NamedTuple):
    """`batch` prompts of `length` rows each, from row `start` on."""

    start: int
    batch: int
    length: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.batch * self.length)


class _WarmShapes(threading.local):
    """What _shape() gives for the plans that torch has in this thread."""

    def __init__(self) -> None:
        self.shapes: set[tuple[object, ...]] = set()


_warm = _WarmShapes()


def warm_fresh_prefill(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """Makes the plans for steps of up to len(q) rows that lie in memory like these; 30 ms each (26 plans for
    8,192 rows) and 0.6 s the first time. Call it on the thread that runs the model.
    """
    if not q.is_cuda or q.dtype == torch.float32:
        return
    for part in _parts_to_warm(len(q)):
        _attend(part, q, k, v, scale)
        _warm.shapes.add(_shape(part, q, k, v))
    torch.cuda.synchronize(q.device)


def fresh_prefill_pays(q: Tensor, k: Tensor, v: Tensor, query_lens: tuple[int, ...]) -> bool:
    """Whether fresh_prefill() is faster for such prompts than paged_prefill(), and needs no new plan."""
    parts = deal(query_lens)
    return bool(parts) and all(_shape(part, q, k, v) in _warm.shapes for part in parts)


def fresh_prefill(q: Tensor, k: Tensor, v: Tensor, query_lens: tuple[int, ...], scale: float) -> Tensor:
    """reference.fresh_prefill, for lengths that deal() takes."""
    parts = deal(query_lens)
    outs = [_attend(part, q, k, v, scale) for part in parts]
    if parts[-1].rows.stop < len(q):
        outs.append(q.new_zeros(q[parts[-1].rows.stop :].shape))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


@lru_cache(maxsize=64)
def deal(query_lens: tuple[int, ...]) -> tuple[Part, ...]:
    """The prompts in order, neighbours of equal length together; () if one has a length that does not pay."""
    parts: list[Part] = []
    start = 0
    for length, run in groupby(query_lens):
        left = len(list(run))
        if length < MIN_LENGTH or length % LENGTH_MULTIPLE:
            return ()
        while left:
            batch = 1 << (left.bit_length() - 1)
            parts.append(Part(start, batch, length))
            start += batch * length
            left -= batch
    return tuple(parts)


def _parts_to_warm(num_rows: int) -> Iterator[Part]:
    for length in range(MIN_LENGTH, num_rows + 1, LENGTH_MULTIPLE):
        batch = 1
        while batch * length <= num_rows:
            yield Part(0, batch, length)
            batch *= 2


def _shape(part: Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[object, ...]:
    """What torch tells plans apart by, as far as it varies here."""
    strides = q.stride(), k.stride(), v.stride()
    return part.batch, part.length, strides, q.shape[1:], k.shape[1], q.dtype, q.device


def _attend(part: Part, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[batch * length, Hq, D]."""
    prompts = (part.batch, part.length)
    q, k, v = (x[part.rows].unflatten(0, prompts).transpose(1, 2) for x in (q, k, v))
    backend = SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)
