# mypy: allow-untyped-defs
"""Triton kernel that adds up rows that each rank reads from the others' memory, in float32 and in
the order of the ranks. It adds them up alone, or with the residual stream and the norm that follow.

A product writes this rank's partial rows to a place of its own region. So nothing is copied before
other ranks can read it, and one kernel does it all: it tells the others that the rows are made,
waits until they say so too, and reads theirs. peer_many_sums.py sends more rows than that, while
others are made.

Each program has a flag at every rank, in pairs for even and odd calls. Program 0 raises all flags
of its rank. There are several places for rows (region.py). They take turns so that a place is only
written again after another call of this kind. That call has told this rank that the others have
read what the place held. peer_waits.py says how waits are bounded.
"""

import triton
import triton.language as tl

from pdserve.kernels.collective.peer_sums import finish
from pdserve.kernels.collective.peer_waits import await_flag, raise_flag, words_at
from pdserve.kernels.launching.dependent_launch import begin, wait


@triton.jit
def _flag_at(pair, source: tl.constexpr, at: tl.constexpr, program, SIZE: tl.constexpr, FLAGS):
    """The number of a flag that rank `source` raises at rank `at`, which has none for itself."""
    index: tl.constexpr = source - 1 if source > at else source
    return (pair * (SIZE - 1) + index) * FLAGS + program


@triton.jit(do_not_specialize=["num_rows"])
def pull_rows_kernel(
    stream_ptr,  # [num_rows, WIDTH]; with NORM the sum is added to it
    weight_ptr,  # [WIDTH]; with NORM
    out_ptr,  # [num_rows, WIDTH]: the sum; with NORM the norm of the stream
    regions_ptr,  # int64 [SIZE], addresses
    epochs_ptr,  # int32 [FLAGS]
    faults_ptr,  # int32 [1]
    host_ptr,  # int32 [1], in host memory
    num_rows,
    eps,
    place,  # of the partial rows in each region
    flags,
    limit,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    FLAGS: tl.constexpr,
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
    wait(PDL)
    epoch = tl.load(epochs_ptr + row) + 1
    pair = (epoch & 1).to(tl.int64)
    is_whole = (tl.load(faults_ptr) == 0).to(tl.int32)
    if row == 0:
        others = tl.arange(0, FLAGS)
        epochs = tl.load(epochs_ptr + others, mask=others < num_rows, other=0) + 1
        pairs = (epochs & 1).to(tl.int64)
        raised = (others < num_rows).to(tl.int32) * is_whole
        for other in tl.static_range(SIZE):
            if other != RANK:
                flag = _flag_at(pairs, RANK, other, others, SIZE, FLAGS)
                raise_flag(words_at(regions_ptr, other, flags + flag), epochs, raised)
    places = row * WIDTH + lanes
    row_at = place + row.to(tl.int64) * ROW_WORDS
    mine = words_at(regions_ptr, RANK, row_at).to(out_ptr.dtype, bitcast=True)
    own = tl.load(tl.multiple_of(mine, 16) + lanes, mask=mask, other=0.0)
    before = tl.load(stream_ptr + places, mask=mask, other=0.0) if NORM else own
    for source in tl.static_range(SIZE):
        if source != RANK:
            flag = _flag_at(pair, source, RANK, row, SIZE, FLAGS)
            await_flag(
                words_at(regions_ptr, RANK, flags + flag),
                epoch.to(tl.int64),
                faults_ptr,
                host_ptr,
                limit * is_whole,
                LOOKS,
                NAPS,
            )
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
    tl.store(epochs_ptr + row, epoch)
