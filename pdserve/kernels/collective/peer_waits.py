# mypy: allow-untyped-defs
"""Kernels of several ranks write into each other's memory and wait in their own: this is how.

Program p of a kernel uses slot p of its inboxes and counts its own calls (epochs), whatever the
grid, and inboxes come in pairs for even and odd calls: who writes the second call after a piece
knows that it was read, for its reader has answered the call between. Small pieces are words of 8
bytes, 4 of payload and the number of the call, so that a word says of itself whether it has come:
no barrier, and nothing is ever cleared. Larger pieces are written bare, and then one flag.

Who waits for a flag looks at it ever more seldom, and acquires it once: when many programs look
without a pause, or with loads that acquire, what they wait for hardly moves. Waiting is bounded:
past `limit` looks, or once the host has set its word, a kernel sets the fault words and ends; from
then on every kernel of the rank ends at once and writes to nobody, so that others run into their
own bounds and never take nonsense for numbers. Knows no layout of regions: region.py does.
"""

import torch
import triton
import triton.language as tl

LOOK = 1024  # waits look at the host's word once in so many times


def flag_options(device: torch.device) -> dict[str, int]:
    """Constants of kernels that wait for flags. Triton's interpreter cannot take naps."""
    return {"LOOKS": LOOK, "NAPS": int(device.type == "cuda")}


@triton.jit
def words_at(regions_ptr, rank, offset):
    """Where words of 8 bytes begin in a rank's region."""
    return tl.load(regions_ptr + rank).to(tl.pointer_type(tl.int64), bitcast=True) + offset


@triton.jit
def _called_off(looks, host_ptr, LOOKS: tl.constexpr):
    """Whether the host has said, when it was looked at last, that nobody will come."""
    said = 0
    if looks % LOOKS == 0:
        said = tl.load(host_ptr, volatile=True)
    return said


@triton.jit
def received(words, epoch, faults_ptr, host_ptr, limit, LOOKS: tl.constexpr):
    """The payloads at these places, once all are of this call."""
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
    """Between two looks: the longer, the more there were, and 2 µs at most."""
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
    """Waits until a flag says this call; what was written before it is visible then."""
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
def raise_flag(flag_ptr, epoch, is_whole):
    """Whoever sees the flag sees what this program has written."""
    tl.atomic_xchg(flag_ptr, epoch.to(tl.int64), mask=is_whole != 0, sem="release", scope="sys")
