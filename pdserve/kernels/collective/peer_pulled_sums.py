# mypy: allow-untyped-defs
"""Triton kernel that adds up rows that each rank reads from the others' memory, in float32 and in
the order of the ranks. It adds them up alone, or with the residual stream and the norm that follow.

A product writes this rank's partial rows to a place of its own region. So nothing is copied before
other ranks can read it, and one kernel does it all. It tells the others that the rows are made,
waits until they say so too, and reads theirs. peer_many_sums.py sends more rows than that, while
others are made.

Each rank has two flags from every other rank, for even and odd calls. Program 0 raises the flags of
this rank at all others, and every program waits for the flags of all others. Raising a flag takes
long, so there is no flag for each program. There are several places for rows (region.py). They take
turns so that a place is only written again after another call of this kind. That call has told this
rank that the others have read what the place held. peer_waits.py says how waits are bounded.

Each program counts the calls for itself, because none may change a count that others still have to
read. Program 0 also counts for programs that do not run in a call with fewer rows. So all counts
are equal after each call.
"""

import triton
import triton.language as tl

from pdserve.kernels.collective.peer_sums import finish
from pdserve.kernels.collective.peer_waits import await_flags, raise_flag, words_at
from pdserve.kernels.launching.dependent_launch import begin, wait


@triton.jit(do_not_specialize=["num_rows"])
def pull_rows_kernel(
    stream_ptr,  # [num_rows, WIDTH]; with NORM the sum is added to it
    weight_ptr,  # [WIDTH]; with NORM
    out_ptr,  # [num_rows, WIDTH]: the sum; with NORM the norm of the stream
    regions_ptr,  # int64 [SIZE], addresses
    epochs_ptr,  # int32 [PROGRAMS]
    faults_ptr,  # int32 [1]
    host_ptr,  # int32 [1], in host memory
    num_rows,
    eps,
    place,  # of the partial rows in each region
    flags,  # [2, SIZE] in each region: by call and by the rank that raises them
    limit,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,  # SIZE or more, a power of two
    PROGRAMS: tl.constexpr,  # the most that run, a power of two
    WIDTH: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    LOOKS: tl.constexpr,
    NAPS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < WIDTH
    weight = tl.load(weight_ptr + lanes, mask=mask, other=0.0) if NORM else lanes
    ranks = tl.arange(0, RANKS)
    is_other = (ranks < SIZE) & (ranks != RANK)
    others = tl.load(regions_ptr + ranks, mask=is_other, other=0)
    wait(PDL)
    epoch = tl.load(epochs_ptr + row) + 1
    is_whole = (tl.load(faults_ptr) == 0).to(tl.int32)
    pair = flags + (epoch & 1).to(tl.int64) * SIZE
    if row == 0:
        raised = others.to(tl.pointer_type(tl.int64), bitcast=True) + (pair + RANK)
        raise_flag(raised, epoch, is_other.to(tl.int32) * is_whole)
    places = row * WIDTH + lanes
    row_at = place + row.to(tl.int64) * ROW_WORDS
    mine = words_at(regions_ptr, RANK, row_at).to(out_ptr.dtype, bitcast=True)
    own = tl.load(tl.multiple_of(mine, 16) + lanes, mask=mask, other=0.0)
    before = tl.load(stream_ptr + places, mask=mask, other=0.0) if NORM else own
    awaited = words_at(regions_ptr, RANK, pair) + ranks
    bound = limit * is_whole
    await_flags(awaited, is_other, epoch.to(tl.int64), faults_ptr, host_ptr, bound, LOOKS, NAPS)
    total = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(SIZE):
        if source == RANK:
            total += own.to(tl.float32)
        else:
            there = words_at(regions_ptr, source, row_at).to(out_ptr.dtype, bitcast=True)
            there = tl.multiple_of(there, 16)
            got = tl.load(there + lanes, mask=mask, other=0.0, cache_modifier=".cg")
            total += got.to(tl.float32)
    summed = total.to(own.dtype)
    finish(summed, before, weight, places, mask, stream_ptr, out_ptr, eps, WIDTH, NORM, PLUS_ONE)
    if row == 0:
        programs = tl.arange(0, PROGRAMS)
        epochs = tl.full([PROGRAMS], 0, tl.int32) + epoch
        tl.store(epochs_ptr + programs, epochs, mask=(programs == 0) | (programs >= num_rows))
    else:
        tl.store(epochs_ptr + row, epoch)
