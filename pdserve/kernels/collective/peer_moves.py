# mypy: allow-untyped-defs
"""Triton kernels that move data of one rank to another's memory: rank 0's tokens to all ranks, the
other ranks' logits to rank 0. The kernels for logits also move a stage's rows to the next stage
(peer_pipe.py). peer_waits.py explains how ranks wait for each other.
"""

import triton
import triton.language as tl

from pdserve.kernels.collective.peer_waits import await_flag, raise_flag, received, words_at
from pdserve.kernels.launching.dependent_launch import begin, wait


@triton.jit(do_not_specialize=["count"])
def broadcast_kernel(
    numbers_ptr,  # int32 [count]: sent by rank 0, overwritten on the others
    regions_ptr,
    epochs_ptr,
    faults_ptr,
    host_ptr,
    count,
    inbox,
    limit,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sends rank 0's numbers to all other ranks.

    Between two broadcasts there is a call in which rank 0 hears from all ranks (a sum, or columns
    that come to it). So rank 0 knows that the earlier broadcast was read.
    """
    begin(PDL)
    wait(PDL)
    slot = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    places = slot * BLOCK + lanes
    epoch = tl.load(epochs_ptr + slot) + 1
    is_whole = (tl.load(faults_ptr) == 0).to(tl.int32)
    place = inbox + (epoch & 1).to(tl.int64) * (SLOTS * BLOCK) + slot.to(tl.int64) * BLOCK
    if RANK == 0:
        own = tl.load(numbers_ptr + places, mask=places < count, other=0)
        sent = (epoch.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
        for other in tl.static_range(1, SIZE):
            words = words_at(regions_ptr, other, place)
            tl.store(words + lanes, sent, mask=lanes < is_whole * BLOCK, cache_modifier=".wt")
    else:
        words = words_at(regions_ptr, RANK, place)
        got = received(words + lanes, epoch, faults_ptr, host_ptr, limit * is_whole, LOOKS)
        tl.store(numbers_ptr + places, got, mask=places < count)
    tl.store(epochs_ptr + slot, epoch)


@triton.jit(do_not_specialize=["count"])
def send_columns_kernel(
    columns_ptr,  # [count], 2 or 4 bytes each
    regions_ptr,
    epochs_ptr,  # int32 [chunks]
    faults_ptr,
    host_ptr,
    count,
    data,  # words of 8 bytes: where this rank's part begins in rank 0's region
    flags,  # one int64 per chunk, also in rank 0's region
    credits,  # in this rank's region: the last call of each chunk that rank 0 has read
    limit,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOKS: tl.constexpr,
    NAPS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    chunk = tl.program_id(0)
    epoch = tl.load(epochs_ptr + chunk) + 1
    is_whole = (tl.load(faults_ptr) == 0).to(tl.int32)
    credit = words_at(regions_ptr, RANK, credits + chunk)
    before = (epoch - 1).to(tl.int64)
    await_flag(credit, before, faults_ptr, host_ptr, limit * is_whole, LOOKS, NAPS)
    is_whole = (tl.load(faults_ptr, volatile=True) == 0).to(tl.int32)
    places = chunk.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (places < count) & (is_whole != 0)
    own = tl.load(columns_ptr + places, mask=mask, other=0.0)
    there = words_at(regions_ptr, 0, data).to(columns_ptr.dtype, bitcast=True)
    tl.store(there + places, own, mask=mask)
    tl.debug_barrier()
    flag = words_at(regions_ptr, 0, flags + chunk)
    raise_flag(flag, epoch, is_whole)
    tl.store(epochs_ptr + chunk, epoch)


@triton.jit(do_not_specialize=["count"])
def take_columns_kernel(
    logits_ptr,  # [rows, width]: columns [first, first + columns) are written
    regions_ptr,
    epochs_ptr,
    faults_ptr,
    host_ptr,
    count,  # rows * columns
    columns,
    first,
    width,
    data,
    flags,
    credits,
    limit,
    SOURCE: tl.constexpr,
    WHOLE: tl.constexpr,  # logits have no other columns: target and source have one layout
    BLOCK: tl.constexpr,
    LOOKS: tl.constexpr,
    NAPS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    chunk = tl.program_id(0)
    epoch = tl.load(epochs_ptr + chunk) + 1
    is_whole = (tl.load(faults_ptr) == 0).to(tl.int32)
    flag = words_at(regions_ptr, 0, flags + chunk)
    await_flag(flag, epoch.to(tl.int64), faults_ptr, host_ptr, limit * is_whole, LOOKS, NAPS)
    places = chunk.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < count
    here = words_at(regions_ptr, 0, data).to(logits_ptr.dtype, bitcast=True)
    got = tl.load(here + places, mask=mask, other=0.0, volatile=True)
    target = places
    if not WHOLE:
        target = places // columns * width + first + places % columns
    tl.store(logits_ptr + target, got, mask=mask)
    tl.debug_barrier()
    is_whole = (tl.load(faults_ptr, volatile=True) == 0).to(tl.int32)
    credit = words_at(regions_ptr, SOURCE, credits + chunk)
    raise_flag(credit, epoch, is_whole)
    tl.store(epochs_ptr + chunk, epoch)
