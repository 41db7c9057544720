# mypy: allow-untyped-defs
"""The way in which kernels of several ranks write into each other's memory and wait in their own.

Program p of a kernel uses slot p of its inboxes and counts its own calls (epochs), whatever the
grid. Inboxes come in pairs, for even and odd calls. A program that writes the second call after a
piece knows that the piece was read, because its reader has answered the call between. Small pieces
are words of 8 bytes: 4 of payload and 4 with the number of the call. So a word shows by itself
whether it has arrived; there is no barrier, and nothing is ever cleared. Larger pieces are written
bare, followed by one flag.

A program that waits for a flag polls it more and more seldom, and acquires it once. If many
programs polled without a pause, or with loads that acquire, the data they wait for would hardly
move. Waiting is bounded: after `limit` looks, or once the host has set its word, a kernel sets the
fault words and ends. From then on every kernel of the rank ends at once and writes to nobody. So
other ranks run into their own bounds and never take garbage for numbers. This file knows no layout
of regions; region.py does.
"""

import torch
import triton
import triton.language as tl

LOOK = 1024  # a waiting program reads the host's word once in so many looks


def flag_options(device: torch.device) -> dict[str, int]:
    """Returns the constants of kernels that wait for flags. Triton's interpreter cannot nap."""
    return {"LOOKS": LOOK, "NAPS": int(device.type == "cuda")}


@triton.jit
def words_at(regions_ptr, rank, offset):
    """Returns where words of 8 bytes begin in a rank's region."""
    return tl.load(regions_ptr + rank).to(tl.pointer_type(tl.int64), bitcast=True) + offset


@triton.jit
def _called_off(looks, host_ptr, LOOKS: tl.constexpr):
    """True if the host has called off the wait, as far as its word was last read."""
    said = 0
    if looks % LOOKS == 0:
        said = tl.load(host_ptr, volatile=True)
    return said


@triton.jit
def received(words, epoch, faults_ptr, host_ptr, limit, LOOKS: tl.constexpr):
    """Returns the payloads at these places once all belong to this call."""
    got = tl.load(words, volatile=True)
    late = tl.max(((got >> 32).to(tl.int32) != epoch).to(tl.int32), 0)
    looks = 0
    while (late > 0) & (looks < limit):
        got = tl.load(words, volatile=True)
        late = tl.max(((got >> 32).to(tl.int32) != epoch).to(tl.int32), 0)
        looks += 1
        if _called_off(looks, host_ptr, LOOKS) != 0:
            looks = limit
    if late > 0:
        tl.store(faults_ptr, 1)
        tl.store(host_ptr, 1)
    return (got & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _nap(looks, NAPS: tl.constexpr):
    """Pauses between two looks: longer after more looks, at most 2 µs."""
    if NAPS:
        tl.inline_asm_elementwise(
            "nanosleep.u32 $1; mov.u32 $0, $1;",
            "=r,r",
            [tl.minimum(looks * 64, 2048)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def await_flag(
    flag_ptr, epoch, faults_ptr, host_ptr, limit, LOOKS: tl.constexpr, NAPS: tl.constexpr
):
    """Waits until a flag has this call's epoch. Then all that was written before it is visible."""
    now = tl.load(flag_ptr, volatile=True)
    looks = 0
    while (now != epoch) & (looks < limit):
        looks += 1
        _nap(looks, NAPS)
        now = tl.load(flag_ptr, volatile=True)
        if _called_off(looks, host_ptr, LOOKS) != 0:
            looks = limit
    now = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    if now != epoch:
        tl.store(faults_ptr, 1)
        tl.store(host_ptr, 1)
    tl.debug_barrier()


@triton.jit
def await_flags(
    flags_ptr,  # several addresses, in this rank's own region
    is_awaited,  # for each of them
    epoch,
    faults_ptr,
    host_ptr,
    limit,
    LOOKS: tl.constexpr,
    NAPS: tl.constexpr,
):
    """Waits like await_flag until all awaited flags have this call's epoch. It looks at all of them
    at once."""
    now = tl.load(flags_ptr, mask=is_awaited, other=epoch, volatile=True)
    late = tl.max((now != epoch).to(tl.int32), 0)
    looks = 0
    while (late > 0) & (looks < limit):
        looks += 1
        _nap(looks, NAPS)
        now = tl.load(flags_ptr, mask=is_awaited, other=epoch, volatile=True)
        late = tl.max((now != epoch).to(tl.int32), 0)
        if _called_off(looks, host_ptr, LOOKS) != 0:
            looks = limit
    now = tl.atomic_add(flags_ptr, 0, mask=is_awaited, sem="acquire", scope="sys")
    if tl.max((is_awaited & (now != epoch)).to(tl.int32), 0) > 0:
        tl.store(faults_ptr, 1)
        tl.store(host_ptr, 1)
    tl.debug_barrier()


@triton.jit
def raise_flag(flag_ptr, epoch, is_whole):
    """Raises a flag. A program that sees the flag also sees what this program has written."""
    tl.atomic_xchg(flag_ptr, epoch.to(tl.int64), mask=is_whole != 0, sem="release", scope="sys")
