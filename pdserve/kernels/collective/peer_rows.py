# mypy: allow-untyped-defs
"""Triton kernels that exchange rows between the homes of a stage, which have different numbers of
rows. One pair of kernels gathers the rows of all homes. Another pair adds up partial rows, each
home its own. The first kernel of a pair sends and waits for nobody; the second waits
(peer_many_sums.py says why).

A call runs as many programs as the largest home has tiles of rows, at most AREAS. Every rank knows
all counts, so program p runs on all ranks or on none, and its count of calls (its epoch) is the
same everywhere. Program p moves tiles p, p + AREAS, p + 2 * AREAS and so on of every home. For each
rank it writes an area that only (its rank, p, even or odd epoch) writes. Then it writes one flag
with its epoch, even if it had no rows for that rank. The second kernel of a pair ends the call.

An area is free when it is written again. In call n + 1, program p of rank A waits for the flag of
program p of rank B. B raised it after its call n had ended, because kernels of a rank run one after
another. So B had read what A wrote in call n before A begins call n + 2. This requires that A waits
in every call for each rank that it writes to. That holds in both pairs, but for different ranks.
Therefore each pair has areas, flags and epochs of its own. peer_waits.py says how waits are
bounded.
"""

import triton
import triton.language as tl

from pdserve.kernels.collective.peer_sums import finish
from pdserve.kernels.collective.peer_waits import await_flag, raise_flag, words_at
from pdserve.kernels.launching.dependent_launch import begin, wait

MAX_HOMES = 8
ENDS = [f"end{home}" for home in range(MAX_HOMES)]


@triton.jit
def _slot(
    epoch,
    program,
    source: tl.constexpr,
    at: tl.constexpr,
    SOURCES: tl.constexpr,
    AREAS: tl.constexpr,
):
    """The number of an area, and of its flag, at rank or home `at`, which has none for itself."""
    index: tl.constexpr = source - 1 if source > at else source
    return ((epoch & 1).to(tl.int64) * (SOURCES - 1) + index) * AREAS + program


@triton.jit
def _area(like_ptr, regions_ptr, rank, inbox, slot, AREA_WORDS: tl.constexpr):
    """Returns where an area begins in a rank's region. Rows cross in pieces of 16 bytes."""
    words = words_at(regions_ptr, rank, inbox + slot * AREA_WORDS)
    return tl.multiple_of(words.to(like_ptr.dtype, bitcast=True), 16)


@triton.jit
def _rows_of(first, end, start, HELD: tl.constexpr):
    """Number of rows that a home, whose rows are [first, end), has in the piece from `start` on."""

    return tl.minimum(tl.maximum(end - first - start, 0), HELD)


@triton.jit(do_not_specialize=[*ENDS, "start"])
def send_gathered_kernel(
    rows_ptr,  # [rows of this home, WIDTH]
    out_ptr,  # [rows of all homes, WIDTH]: this home's are written
    regions_ptr,  # int64 [SIZE], addresses
    epochs_ptr,  # int32 [AREAS]
    faults_ptr,  # int32 [1]
    end0,  # where each home's rows end in out
    end1,
    end2,
    end3,
    end4,
    end5,
    end6,
    end7,
    start,  # the first row of this piece in each home's rows
    inbox,
    flags,
    RANK: tl.constexpr,
    HOMES: tl.constexpr,
    HOME_SIZE: tl.constexpr,
    AREAS: tl.constexpr,
    AREA_WORDS: tl.constexpr,
    HELD: tl.constexpr,  # rows of a home in a piece
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,  # from one row of an area to the next
    TILE: tl.constexpr,  # rows
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sends this home's rows to the ranks of the same place in the other homes."""
    begin(PDL)
    wait(PDL)
    program = tl.program_id(0)
    epoch = tl.load(epochs_ptr + program) + 1
    is_whole = (tl.load(faults_ptr) == 0).to(tl.int32)
    ends = (0, end0, end1, end2, end3, end4, end5, end6, end7)
    home: tl.constexpr = RANK // HOME_SIZE
    tile = tl.arange(0, TILE)[:, None]
    lanes = tl.arange(0, BLOCK)[None, :]
    num_rows = _rows_of(ends[home], ends[home + 1], start, HELD)
    for first in range(program * TILE, num_rows, AREAS * TILE):
        rows = start + first + tile
        mask = (first + tile < num_rows) & (lanes < WIDTH)
        own = tl.load(rows_ptr + rows.to(tl.int64) * WIDTH + lanes, mask=mask, other=0)
        places = (ends[home] + rows).to(tl.int64) * WIDTH + lanes
        tl.store(out_ptr + places, own, mask=mask)
        held = first // (AREAS * TILE) * TILE + tile
        for other in tl.static_range(HOMES):
            if other != home:
                rank = other * HOME_SIZE + RANK % HOME_SIZE
                slot = _slot(epoch, program, home, other, HOMES, AREAS)
                there = _area(rows_ptr, regions_ptr, rank, inbox, slot, AREA_WORDS)
                tl.store(there + held * STRIDE + lanes, own, mask=mask & (is_whole != 0))
    tl.debug_barrier()
    for other in tl.static_range(HOMES):
        if other != home:
            rank = other * HOME_SIZE + RANK % HOME_SIZE
            slot = _slot(epoch, program, home, other, HOMES, AREAS)
            raise_flag(words_at(regions_ptr, rank, flags + slot), epoch, is_whole)


@triton.jit(do_not_specialize=[*ENDS, "start"])
def take_gathered_kernel(
    out_ptr,  # [rows of all homes, WIDTH]: the rows of other homes are written
    regions_ptr,
    epochs_ptr,
    faults_ptr,
    host_ptr,  # int32 [1], in host memory
    end0,  # where each home's rows end in out
    end1,
    end2,
    end3,
    end4,
    end5,
    end6,
    end7,
    start,
    inbox,
    flags,
    limit,
    RANK: tl.constexpr,
    HOMES: tl.constexpr,
    HOME_SIZE: tl.constexpr,
    AREAS: tl.constexpr,
    AREA_WORDS: tl.constexpr,
    HELD: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOKS: tl.constexpr,
    NAPS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    program = tl.program_id(0)
    epoch = tl.load(epochs_ptr + program) + 1
    bound = limit * (tl.load(faults_ptr) == 0).to(tl.int32)
    ends = (0, end0, end1, end2, end3, end4, end5, end6, end7)
    home: tl.constexpr = RANK // HOME_SIZE
    tile = tl.arange(0, TILE)[:, None]
    lanes = tl.arange(0, BLOCK)[None, :]
    for source in tl.static_range(HOMES):
        if source != home:
            slot = _slot(epoch, program, source, home, HOMES, AREAS)
            flag = words_at(regions_ptr, RANK, flags + slot)
            await_flag(flag, epoch.to(tl.int64), faults_ptr, host_ptr, bound, LOOKS, NAPS)
            here = _area(out_ptr, regions_ptr, RANK, inbox, slot, AREA_WORDS)
            num_rows = _rows_of(ends[source], ends[source + 1], start, HELD)
            for first in range(program * TILE, num_rows, AREAS * TILE):
                mask = (first + tile < num_rows) & (lanes < WIDTH)
                held = first // (AREAS * TILE) * TILE + tile
                got = tl.load(
                    here + held * STRIDE + lanes, mask=mask, other=0, cache_modifier=".cg"
                )
                places = (ends[source] + start + first + tile).to(tl.int64) * WIDTH + lanes
                tl.store(out_ptr + places, got, mask=mask)
    tl.store(epochs_ptr + program, epoch)


@triton.jit(do_not_specialize=[*ENDS, "start"])
def send_partial_kernel(
    partial_ptr,  # [rows of all homes, WIDTH]
    regions_ptr,
    epochs_ptr,
    faults_ptr,
    end0,  # where each home's rows end in partial
    end1,
    end2,
    end3,
    end4,
    end5,
    end6,
    end7,
    start,
    inbox,
    flags,
    RANK: tl.constexpr,
    HOMES: tl.constexpr,
    HOME_SIZE: tl.constexpr,
    AREAS: tl.constexpr,
    AREA_WORDS: tl.constexpr,
    HELD: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sends every home's rows to all ranks of that home. A tile is one row."""
    begin(PDL)
    wait(PDL)
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < WIDTH
    epoch = tl.load(epochs_ptr + program) + 1
    is_whole = (tl.load(faults_ptr) == 0).to(tl.int32)
    ends = (0, end0, end1, end2, end3, end4, end5, end6, end7)
    SIZE: tl.constexpr = HOMES * HOME_SIZE
    for target in tl.static_range(HOMES):
        num_rows = _rows_of(ends[target], ends[target + 1], start, HELD)
        for row in range(program, num_rows, AREAS):
            places = (ends[target] + start + row).to(tl.int64) * WIDTH + lanes
            part = tl.load(partial_ptr + places, mask=mask, other=0.0)
            held = row // AREAS
            for place in tl.static_range(HOME_SIZE):
                if target * HOME_SIZE + place != RANK:
                    slot = _slot(epoch, program, RANK, target * HOME_SIZE + place, SIZE, AREAS)
                    rank = target * HOME_SIZE + place
                    there = _area(partial_ptr, regions_ptr, rank, inbox, slot, AREA_WORDS)
                    tl.store(there + held * STRIDE + lanes, part, mask=lanes < is_whole * WIDTH)
    tl.debug_barrier()
    for other in tl.static_range(SIZE):
        if other != RANK:
            slot = _slot(epoch, program, RANK, other, SIZE, AREAS)
            raise_flag(words_at(regions_ptr, other, flags + slot), epoch, is_whole)


@triton.jit(do_not_specialize=[*ENDS, "start"])
def add_rows_kernel(
    partial_ptr,  # [rows of all homes, WIDTH]
    stream_ptr,  # [rows of this home, WIDTH]; with NORM the sum is added to it
    weight_ptr,  # [WIDTH]; with NORM
    out_ptr,  # [rows of this home, WIDTH]: the sum; with NORM the norm of the stream
    regions_ptr,
    epochs_ptr,
    faults_ptr,
    host_ptr,
    end0,  # where each home's rows end in partial
    end1,
    end2,
    end3,
    end4,
    end5,
    end6,
    end7,
    start,
    eps,
    inbox,
    flags,
    limit,
    RANK: tl.constexpr,
    HOMES: tl.constexpr,
    HOME_SIZE: tl.constexpr,
    AREAS: tl.constexpr,
    AREA_WORDS: tl.constexpr,
    HELD: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    LOOKS: tl.constexpr,
    NAPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adds up the partial rows of this home that all ranks have sent."""
    begin(PDL)
    wait(PDL)
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < WIDTH
    epoch = tl.load(epochs_ptr + program) + 1
    bound = limit * (tl.load(faults_ptr) == 0).to(tl.int32)
    ends = (0, end0, end1, end2, end3, end4, end5, end6, end7)
    home: tl.constexpr = RANK // HOME_SIZE
    SIZE: tl.constexpr = HOMES * HOME_SIZE
    for source in tl.static_range(SIZE):
        if source != RANK:
            slot = _slot(epoch, program, source, RANK, SIZE, AREAS)
            flag = words_at(regions_ptr, RANK, flags + slot)
            await_flag(flag, epoch.to(tl.int64), faults_ptr, host_ptr, bound, LOOKS, NAPS)
    weight = tl.load(weight_ptr + lanes, mask=mask, other=0.0) if NORM else lanes
    num_rows = _rows_of(ends[home], ends[home + 1], start, HELD)
    for row in range(program, num_rows, AREAS):
        own_places = (ends[home] + start + row).to(tl.int64) * WIDTH + lanes
        own = tl.load(partial_ptr + own_places, mask=mask, other=0.0)
        total = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(SIZE):
            if source == RANK:
                total += own.to(tl.float32)
            else:
                slot = _slot(epoch, program, source, RANK, SIZE, AREAS)
                here = _area(partial_ptr, regions_ptr, RANK, inbox, slot, AREA_WORDS)
                got = tl.load(
                    here + row // AREAS * STRIDE + lanes, mask=mask, other=0.0, cache_modifier=".cg"
                )
                total += got.to(tl.float32)
        summed = total.to(own.dtype)
        places = (start + row).to(tl.int64) * WIDTH + lanes
        before = tl.load(stream_ptr + places, mask=mask, other=0.0) if NORM else own
        finish(
            summed, before, weight, places, mask, stream_ptr, out_ptr, eps, WIDTH, NORM, PLUS_ONE
        )
    tl.store(epochs_ptr + program, epoch)
