# mypy: allow-untyped-defs
"""Triton kernel that adds up few rows over ranks, in float32 and in the order of the ranks. It adds
them up alone, or with the residual stream and the norm that follow.

Rows travel as words that show by themselves whether they have arrived. That is the fastest way for
few rows; peer_many_sums.py adds up many rows. The file peer_waits.py explains how ranks wait for
each other.
"""

import triton
import triton.language as tl

from pdserve.kernels.collective.peer_waits import received, words_at
from pdserve.kernels.launching.dependent_launch import begin, wait

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # KIND: the dtype of the 4 bytes of payload


@triton.jit
def _halves(word, KIND: tl.constexpr):
    """Returns the one or two numbers of a payload as float32."""
    if KIND == 0:
        return word.to(tl.float32, bitcast=True), tl.zeros_like(word).to(tl.float32)
    elif KIND == 1:
        low = (word << 16).to(tl.float32, bitcast=True)
        return low, (word & -65536).to(tl.float32, bitcast=True)
    else:
        low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return low, (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _joined(low, high, KIND: tl.constexpr):
    """Packs one or two float32 numbers into a payload, rounded."""
    if KIND == 0:
        return low.to(tl.int32, bitcast=True)
    elif KIND == 1:
        first = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return first | (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        first = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return first | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _rounded(number, KIND: tl.constexpr):
    if KIND == 1:
        return number.to(tl.bfloat16).to(tl.float32)
    elif KIND == 2:
        return number.to(tl.float16).to(tl.float32)
    else:
        return number


@triton.jit
def few_rows_kernel(
    partial_ptr,  # int32 [rows, WORDS]
    stream_ptr,  # int32 [rows, WORDS]; with NORM the sum is added to it
    weight_ptr,  # int32 [WORDS]; with NORM
    out_ptr,  # int32 [rows, WORDS]: the sum; with NORM the norm of the stream
    regions_ptr,  # int64 [SIZE], addresses
    epochs_ptr,  # int32 [SLOTS]
    faults_ptr,  # int32 [1]
    host_ptr,  # int32 [1], in host memory
    eps,
    inbox,
    limit,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    LOOKS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if NORM:  # the weight does not depend on the kernel before
        weight = tl.load(weight_ptr + lanes, mask=lanes < WORDS, other=0)
    wait(PDL)
    epoch = tl.load(epochs_ptr + row) + 1
    is_whole = (tl.load(faults_ptr) == 0).to(tl.int32)
    places = row.to(tl.int64) * WORDS + lanes
    own = tl.load(partial_ptr + places, mask=lanes < WORDS, other=0)
    if NORM:
        stream = tl.load(stream_ptr + places, mask=lanes < WORDS, other=0)
    sent = (epoch.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    pair = inbox + (epoch & 1).to(tl.int64) * (SIZE * SLOTS * BLOCK) + row.to(tl.int64) * BLOCK
    for other in tl.static_range(SIZE):
        if other != RANK:
            words = words_at(regions_ptr, other, pair + RANK * SLOTS * BLOCK)
            tl.store(words + lanes, sent, mask=lanes < is_whole * BLOCK, cache_modifier=".wt")
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(SIZE):
        if source == RANK:
            first, second = _halves(own, KIND)
        else:
            words = words_at(regions_ptr, RANK, pair + source * SLOTS * BLOCK)
            got = received(words + lanes, epoch, faults_ptr, host_ptr, limit * is_whole, LOOKS)
            first, second = _halves(got, KIND)
        low += first
        high += second
    if NORM:
        stream_low, stream_high = _halves(stream, KIND)
        low = _rounded(_rounded(low, KIND) + stream_low, KIND)
        high = _rounded(_rounded(high, KIND) + stream_high, KIND)
        tl.store(stream_ptr + places, _joined(low, high, KIND), mask=lanes < WORDS)
        width: tl.constexpr = WORDS if KIND == 0 else 2 * WORDS
        scale = 1.0 / tl.sqrt(tl.sum(low * low + high * high, 0) / width + eps)
        weight_low, weight_high = _halves(weight, KIND)
        if PLUS_ONE:
            low = low * scale * (1.0 + weight_low)
            high = high * scale * (1.0 + weight_high)
        else:  # rounded here too, as in norm/elementwise.py
            low = _rounded(low * scale, KIND) * weight_low
            high = _rounded(high * scale, KIND) * weight_high
    tl.store(out_ptr + places, _joined(low, high, KIND), mask=lanes < WORDS)
    tl.store(epochs_ptr + row, epoch)


@triton.jit
def finish(
    total,  # a row's sum, rounded
    before,  # the row of the stream; any row without NORM
    weight,
    places,
    mask,
    stream_ptr,
    out_ptr,
    eps,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """Stores the sum. With NORM, stores the stream with the sum added, and the norm of that."""
    result = total
    if NORM:
        stream = (total.to(tl.float32) + before.to(tl.float32)).to(total.dtype)
        tl.store(stream_ptr + places, stream, mask=mask)
        wide = stream.to(tl.float32)
        scaled = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps))
        if PLUS_ONE:
            result = (scaled * (1.0 + weight.to(tl.float32))).to(total.dtype)
        else:  # rounded here too, as in norm/elementwise.py
            scaled = scaled.to(total.dtype).to(tl.float32)
            result = (scaled * weight.to(tl.float32)).to(total.dtype)
    tl.store(out_ptr + places, result, mask=mask)
