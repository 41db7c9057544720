# mypy: allow-untyped-defs
"""Finds where values come in the order of a row without sorting it, by a search over the bits of
float32s in any memory.

`cut_of` answers for top-k and top-p together; the other functions are its steps. The values of one
row are ptr[:length]. All functions run in one program, which reads the values BLOCK at a time, as
often as a search needs. They know no vocabulary and no requests. The kernels of sampling/cut.py
call them.
"""

import triton
import triton.language as tl

from pdserve.kernels.sampling.rows import NEG_INF

PIVOTS = tl.constexpr(16)


@triton.jit
def key_of(x, SPARE: tl.constexpr):
    """Returns an int32 that sorts like float32 x, without its SPARE low bits. -0 counts as 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SPARE


@triton.jit
def lowest_key(
    ptr,
    length,
    low,
    high,
    target,
    top,
    scale,
    BY_MASS: tl.constexpr,
    SPARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns the lowest key in low..high above which there is less than `target` of ptr[:length].
    That is the number of values, or with BY_MASS the sum of their masses exp((x - top) * scale).
    Nothing is above `high`. Each pass tries PIVOTS keys, and so finds 4 bits.
    """
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    order = tl.arange(0, PIVOTS).to(tl.int64)
    while low < high:
        pivots = low + (high - low) * order // PIVOTS  # from low to below high
        above = tl.zeros([PIVOTS, BLOCK], tl.float32)
        for first in range(0, length, BLOCK):
            at = first + lanes
            x = tl.load(ptr + at, mask=at < length, other=NEG_INF).to(tl.float32)
            weight = tl.exp((x - top) * scale) if BY_MASS else (at < length).to(tl.float32)
            is_above = key_of(x, SPARE)[None, :] > pivots.to(tl.int32)[:, None]
            above += tl.where(is_above, weight[None, :], 0.0)
        enough = tl.sum(above, 1) >= target
        low = tl.maximum(low, tl.max(tl.where(enough, pivots + 1, low), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, pivots), 0))
    return low.to(tl.int32)


@triton.jit
def stats_at(ptr, length, key, top, scale, SPARE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns (number above key, their mass, number at key, the value there)."""
    lanes = tl.arange(0, BLOCK)
    above = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    ties = tl.zeros([BLOCK], tl.int32)
    value = tl.full([BLOCK], NEG_INF, tl.float32)
    for first in range(0, length, BLOCK):
        at = first + lanes
        x = tl.load(ptr + at, mask=at < length, other=NEG_INF).to(tl.float32)
        keys = key_of(x, SPARE)
        is_above = keys > key
        is_tie = (keys == key) & (at < length)
        above += is_above.to(tl.int32)
        mass += tl.where(is_above, tl.exp((x - top) * scale), 0.0)
        ties += is_tie.to(tl.int32)
        value = tl.where(is_tie, x, value)
    return tl.sum(above, 0), tl.sum(mass, 0), tl.sum(ties, 0), tl.max(value, 0)


@triton.jit
def index_of_tie(ptr, length, value, number, BLOCK: tl.constexpr):
    """Returns the index of the number-th (from 1) of the values equal to `value`."""
    lanes = tl.arange(0, BLOCK)
    seen = 0
    index = length
    for first in range(0, length, BLOCK):
        at = first + lanes
        x = tl.load(ptr + at, mask=at < length, other=NEG_INF).to(tl.float32)
        is_tie = (x == value) & (at < length)
        count = tl.sum(is_tie.to(tl.int32), 0)
        if (seen < number) & (number <= seen + count):
            order = tl.cumsum(is_tie.to(tl.int32), 0) + seen
            index = tl.min(tl.where(is_tie & (order == number), at, length), 0)
        seen += count
    return index


@triton.jit
def mass_of(ptr, length, top, scale, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, length, BLOCK):
        at = first + lanes
        x = tl.load(ptr + at, mask=at < length, other=NEG_INF)
        mass += tl.exp((x - top) * scale)
    return tl.sum(mass, 0)


@triton.jit
def cut_of(
    ptr,
    length,
    low,
    high,
    k,
    p,
    by_rank,
    by_mass,
    top,
    scale,
    total,
    SPARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cuts ptr[:length]. Returns (value, how many of the values equal to it stay, how many there
    are).

    by_rank: cuts after the k best.
    by_mass: cuts at the share p of the mass of what is left, or of `total`.
    """
    value = NEG_INF
    kept = 0
    ties = 0
    above_k = length
    if by_rank:
        key = lowest_key(ptr, length, low, high, k.to(tl.float32), top, scale, False, SPARE, BLOCK)
        above, mass, ties, value = stats_at(ptr, length, key, top, scale, SPARE, BLOCK)
        kept = k - above
        above_k = k
        total = mass + kept.to(tl.float32) * tl.exp((value - top) * scale)
    if by_mass:
        key = lowest_key(ptr, length, low, high, p * total, top, scale, True, SPARE, BLOCK)
        above, mass, num_ties, at_cut = stats_at(ptr, length, key, top, scale, SPARE, BLOCK)
        needed = tl.ceil((p * total - mass) / tl.exp((at_cut - top) * scale))
        needed = tl.minimum(tl.maximum(needed, 1.0), num_ties.to(tl.float32)).to(tl.int32)
        if above + needed <= above_k:
            value = at_cut
            kept = needed
            ties = num_ties
    return value, kept, ties
