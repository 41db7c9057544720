# mypy: allow-untyped-defs
"""Triton kernels that add up many rows over ranks, in float32 and in the order of the ranks. They
add them up alone, or with the residual stream and the norm that follow.

Rows are written bare, and one flag follows the rows of a program. With two ranks, each row goes to
the other rank. With more ranks, each row goes to one rank, which adds it up and sends the sum to
all. Slot s is row s; with more than two ranks it is the s-th group of SIZE rows. It belongs to
program s % PROGRAMS in every call. So the program's count of calls (its epoch) says which of a
row's two inboxes to use.

Sending and waiting are separate kernels. The kernel that waits for a piece of rows starts after
this rank has sent its own. The reason: raising a flag takes long while other programs of the same
GPU poll theirs, and then both GPUs crawl. If fewer programs send than wait, each sends for several,
and raises their flags too. peer_waits.py explains how ranks wait for each other.
"""

import triton
import triton.language as tl

from pdserve.kernels.collective.peer_sums import finish
from pdserve.kernels.collective.peer_waits import await_flag, raise_flag, words_at
from pdserve.kernels.launching.dependent_launch import begin, wait


@triton.jit
def _place(pair, source: tl.constexpr, at: tl.constexpr, slot, SIZE: tl.constexpr, SLOTS):
    """Returns the place of a slot of rank `source` at rank `at`. No rank has a place for itself."""
    index: tl.constexpr = source - 1 if source > at else source
    return (pair * (SIZE - 1) + index) * SLOTS + slot


@triton.jit
def _row_at(like_ptr, regions_ptr, rank, inbox, place, ROW_WORDS: tl.constexpr):
    """Returns where a bare row begins in a rank's region. Rows cross in pieces of 16 bytes."""
    words = words_at(regions_ptr, rank, inbox + place * ROW_WORDS)
    return tl.multiple_of(words.to(like_ptr.dtype, bitcast=True), 16)


@triton.jit
def _raise_flags(
    regions_ptr,
    program,  # one or several, with the epoch of each
    epoch,
    is_whole,
    flags,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Tells all other ranks that the rows of these programs are there."""
    tl.debug_barrier()
    for other in tl.static_range(SIZE):
        if other != RANK:
            place = _place((epoch & 1).to(tl.int64), RANK, other, program, SIZE, SLOTS)
            raise_flag(words_at(regions_ptr, other, flags + place), epoch, is_whole)


@triton.jit
def _await_flags(
    regions_ptr,
    epoch,
    faults_ptr,
    host_ptr,
    limit,
    flags,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    LOOKS: tl.constexpr,
    NAPS: tl.constexpr,
):
    """Waits until the rows of all other ranks for this program are here."""
    program = tl.program_id(0)
    is_whole = (tl.load(faults_ptr) == 0).to(tl.int32)
    for source in tl.static_range(SIZE):
        if source != RANK:
            place = _place((epoch & 1).to(tl.int64), source, RANK, program, SIZE, SLOTS)
            flag = words_at(regions_ptr, RANK, flags + place)
            bound = limit * is_whole
            await_flag(flag, epoch.to(tl.int64), faults_ptr, host_ptr, bound, LOOKS, NAPS)


@triton.jit(do_not_specialize=["num_rows"])
def send_rows_kernel(
    partial_ptr,  # [num_rows, WIDTH]
    regions_ptr,  # int64 [SIZE], addresses
    epochs_ptr,  # int32 [PROGRAMS]
    faults_ptr,  # int32 [1]
    num_rows,
    inbox,
    flags,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    SENDERS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sends rows to the other of two ranks, or each row to the rank that adds it up. It waits for
    nobody.

    PROGRAMS programs wait elsewhere. Each of the SENDERS programs here sends for up to TILES times
    TILE of them, and moves a row for TILE of them at once.
    """
    begin(PDL)
    wait(PDL)
    sender = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    is_whole = (tl.load(faults_ptr) == 0).to(tl.int32)
    ROWS: tl.constexpr = SIZE if SIZE > 2 else 1  # rows of a slot
    slots = tl.cdiv(num_rows, ROWS)
    programs = tl.minimum(slots, PROGRAMS)
    for first in range(sender * TILE, programs, SENDERS * TILE):
        program = first + tl.arange(0, TILE)
        epoch = tl.load(epochs_ptr + program, mask=program < programs, other=0) + 1
        pair = (epoch & 1).to(tl.int64)
        for start in range(0, slots, PROGRAMS):
            slot = start + program
            for target in tl.static_range(SIZE):
                if target != RANK:
                    row = slot * ROWS + (target if SIZE > 2 else 0)
                    is_row = (program < programs) & (row < num_rows)
                    mask = is_row[:, None] & (lanes < WIDTH)[None, :]
                    own = partial_ptr + (row * WIDTH)[:, None] + lanes[None, :]
                    part = tl.load(own, mask=mask, other=0.0)
                    place = _place(pair, RANK, target, slot, SIZE, SLOTS)
                    there = _row_at(partial_ptr, regions_ptr, target, inbox, place, ROW_WORDS)
                    mask = is_row[:, None] & (lanes < is_whole * WIDTH)[None, :]
                    tl.store(there[:, None] + lanes[None, :], part, mask=mask)
    place = tl.arange(0, TILES * TILE)
    program = (sender + place // TILE * SENDERS) * TILE + place % TILE
    is_sent = program < programs
    epoch = tl.load(epochs_ptr + program, mask=is_sent, other=0) + 1
    _raise_flags(
        regions_ptr, program, epoch, is_sent.to(tl.int32) * is_whole, flags, RANK, SIZE, SLOTS
    )


@triton.jit(do_not_specialize=["num_rows"])
def sum_rows_kernel(
    partial_ptr,  # [num_rows, WIDTH]
    stream_ptr,  # [num_rows, WIDTH]; with NORM the sum is added to it
    weight_ptr,  # [WIDTH]; with NORM
    out_ptr,  # [num_rows, WIDTH]: the sum; with NORM the norm of the stream
    regions_ptr,
    epochs_ptr,
    faults_ptr,
    host_ptr,  # int32 [1], in host memory
    num_rows,
    eps,
    inbox,
    flags,
    limit,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    LOOKS: tl.constexpr,
    NAPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adds up what send_rows_kernel has brought.

    With more than two ranks, each rank adds up its rows of every slot and sends the sums to all,
    and finish_rows_kernel takes the sums of the others. Then a row crosses 2 * (SIZE - 1) times
    instead of SIZE * (SIZE - 1).
    """
    begin(PDL)
    wait(PDL)
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    epoch = tl.load(epochs_ptr + program) + 1
    pair = (epoch & 1).to(tl.int64)
    weight = tl.load(weight_ptr + lanes, mask=lanes < WIDTH, other=0.0) if NORM else lanes
    ROWS: tl.constexpr = SIZE if SIZE > 2 else 1
    _await_flags(
        regions_ptr, epoch, faults_ptr, host_ptr, limit, flags, RANK, SIZE, SLOTS, LOOKS, NAPS
    )
    is_whole = (tl.load(faults_ptr, volatile=True) == 0).to(tl.int32)
    sums: tl.constexpr = 2 * (SIZE - 1) * SLOTS  # the second half of the inboxes
    for slot in range(program, tl.cdiv(num_rows, ROWS), PROGRAMS):
        row = slot * ROWS + (RANK if SIZE > 2 else 0)
        mask = (lanes < WIDTH) & (row < num_rows)
        places = row * WIDTH + lanes
        own = tl.load(partial_ptr + places, mask=mask, other=0.0)
        before = tl.load(stream_ptr + places, mask=mask, other=0.0) if NORM else own
        total = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(SIZE):
            if source == RANK:
                total += own.to(tl.float32)
            else:
                place = _place(pair, source, RANK, slot, SIZE, SLOTS)
                here = _row_at(partial_ptr, regions_ptr, RANK, inbox, place, ROW_WORDS)
                got = tl.load(here + lanes, mask=lanes < WIDTH, other=0.0, cache_modifier=".cg")
                total += got.to(tl.float32)
        summed = total.to(own.dtype)
        if SIZE > 2:
            for other in tl.static_range(SIZE):
                if other != RANK:
                    place = sums + _place(pair, RANK, other, slot, SIZE, SLOTS)
                    there = _row_at(partial_ptr, regions_ptr, other, inbox, place, ROW_WORDS)
                    tl.store(there + lanes, summed, mask=lanes < is_whole * WIDTH)
        finish(
            summed, before, weight, places, mask, stream_ptr, out_ptr, eps, WIDTH, NORM, PLUS_ONE
        )
    if SIZE > 2:
        _raise_flags(regions_ptr, program, epoch, is_whole, flags + sums, RANK, SIZE, SLOTS)
    else:
        tl.store(epochs_ptr + program, epoch)


@triton.jit(do_not_specialize=["num_rows"])
def finish_rows_kernel(
    stream_ptr,
    weight_ptr,
    out_ptr,
    regions_ptr,
    epochs_ptr,
    faults_ptr,
    host_ptr,
    num_rows,
    eps,
    inbox,
    flags,
    limit,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    LOOKS: tl.constexpr,
    NAPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Takes the rows that other ranks have added up. It runs only with more than two ranks."""
    begin(PDL)
    wait(PDL)
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    epoch = tl.load(epochs_ptr + program) + 1
    pair = (epoch & 1).to(tl.int64)
    weight = tl.load(weight_ptr + lanes, mask=lanes < WIDTH, other=0.0) if NORM else lanes
    sums: tl.constexpr = 2 * (SIZE - 1) * SLOTS
    at = flags + sums
    _await_flags(
        regions_ptr, epoch, faults_ptr, host_ptr, limit, at, RANK, SIZE, SLOTS, LOOKS, NAPS
    )
    for slot in range(program, tl.cdiv(num_rows, SIZE), PROGRAMS):
        for owner in tl.static_range(SIZE):
            if owner != RANK:
                place = sums + _place(pair, owner, RANK, slot, SIZE, SLOTS)
                here = _row_at(out_ptr, regions_ptr, RANK, inbox, place, ROW_WORDS)
                got = tl.load(here + lanes, mask=lanes < WIDTH, other=0.0, cache_modifier=".cg")
                row = slot * SIZE + owner
                mask = (lanes < WIDTH) & (row < num_rows)
                places = row * WIDTH + lanes
                before = tl.load(stream_ptr + places, mask=mask, other=0.0) if NORM else got
                finish(
                    got,
                    before,
                    weight,
                    places,
                    mask,
                    stream_ptr,
                    out_ptr,
                    eps,
                    WIDTH,
                    NORM,
                    PLUS_ONE,
                )
    tl.store(epochs_ptr + program, epoch)
