# mypy: allow-untyped-defs
"""Triton kernels of several ranks: each writes into the others' memory and waits for theirs in its
own.

A word in an inbox is 8 bytes: 4 of payload and the number of the call (epoch), so that a word says
of itself whether it has come: no barrier, and nothing is ever cleared. Program p of a kernel uses
slot p of its inboxes and counts its own calls, whatever the grid, and inboxes come in pairs for
even and odd calls: who writes the second call after a word knows that it was read, for its reader
has answered the call between. Larger pieces are written bare, and then one flag.

Waiting is bounded: past `limit` looks, or once the host has set its word, a kernel sets the fault
words and ends; from then on every kernel of the rank ends at once and writes to nobody, so that
others run into their own bounds and never take nonsense for numbers. Knows no layout of regions:
triton_ops.py does.
"""

import triton
import triton.language as tl

from pdserve.kernels.launching.dependent_launch import begin, wait

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # KIND: what the 4 bytes of payload are
LOOK = 1024  # waits look at the host's word once in so many times


@triton.jit
def _halves(word, KIND: tl.constexpr):
    """The one or two numbers of a payload, float32."""
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
    """A payload of one or two float32 numbers, rounded."""
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
def _words(regions_ptr, rank, offset):
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
def _received(words, epoch, faults_ptr, host_ptr, limit, LOOKS: tl.constexpr):
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
def _summed(
    own,
    slot,
    limit,
    regions_ptr,
    epochs_ptr,
    faults_ptr,
    host_ptr,
    inbox,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    LOOKS: tl.constexpr,
):
    """A call of this slot: send own payloads to all, and add up everybody's in the order of ranks,
    float32."""
    epoch = tl.load(epochs_ptr + slot) + 1
    is_whole = (tl.load(faults_ptr) == 0).to(tl.int32)
    lanes = tl.arange(0, BLOCK)
    sent = (epoch.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    pair = inbox + (epoch & 1).to(tl.int64) * (SIZE * SLOTS * BLOCK)
    place = slot.to(tl.int64) * BLOCK
    for other in tl.static_range(SIZE):
        if other != RANK:
            words = _words(regions_ptr, other, pair + RANK * SLOTS * BLOCK + place)
            tl.store(words + lanes, sent, mask=lanes < is_whole * BLOCK, cache_modifier=".wt")
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(SIZE):
        if source == RANK:
            first, second = _halves(own, KIND)
        else:
            words = _words(regions_ptr, RANK, pair + source * SLOTS * BLOCK + place)
            got = _received(words + lanes, epoch, faults_ptr, host_ptr, limit * is_whole, LOOKS)
            first, second = _halves(got, KIND)
        low += first
        high += second
    tl.store(epochs_ptr + slot, epoch)
    return low, high


@triton.jit(do_not_specialize=["num_words"])
def sum_kernel(
    partial_ptr,  # int32 [num_words]
    sum_ptr,  # int32 [num_words]
    regions_ptr,  # int64 [SIZE], addresses
    epochs_ptr,  # int32 [SLOTS]
    faults_ptr,  # int32 [1]
    host_ptr,  # int32 [1], in host memory
    num_words,
    inbox,
    limit,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    LOOKS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    slot = tl.program_id(0)
    places = slot * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(partial_ptr + places, mask=places < num_words, other=0)
    low, high = _summed(
        own,
        slot,
        limit,
        regions_ptr,
        epochs_ptr,
        faults_ptr,
        host_ptr,
        inbox,
        RANK,
        SIZE,
        SLOTS,
        BLOCK,
        KIND,
        LOOKS,
    )
    tl.store(sum_ptr + places, _joined(low, high, KIND), mask=places < num_words)


@triton.jit
def add_norm_kernel(
    stream_ptr,  # int32 [rows, WORDS]; the sum is added to it
    partial_ptr,  # int32 [rows, WORDS]
    weight_ptr,  # int32 [WORDS]
    normed_ptr,  # int32 [rows, WORDS]
    regions_ptr,
    epochs_ptr,
    faults_ptr,
    host_ptr,
    eps,
    inbox,
    limit,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    LOOKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sum over ranks of a row, added to the stream, and the norm of that."""
    begin(PDL)
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + lanes, mask=lanes < WORDS, other=0)
    wait(PDL)
    places = row.to(tl.int64) * WORDS + lanes
    own = tl.load(partial_ptr + places, mask=lanes < WORDS, other=0)
    stream = tl.load(stream_ptr + places, mask=lanes < WORDS, other=0)
    low, high = _summed(
        own,
        row,
        limit,
        regions_ptr,
        epochs_ptr,
        faults_ptr,
        host_ptr,
        inbox,
        RANK,
        SIZE,
        SLOTS,
        BLOCK,
        KIND,
        LOOKS,
    )
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
    tl.store(normed_ptr + places, _joined(low, high, KIND), mask=lanes < WORDS)


@triton.jit(do_not_specialize=["count"])
def broadcast_kernel(
    numbers_ptr,  # int32 [count]: rank 0's are sent to the others, whose are overwritten
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
    """Between two of these lies a sum, so rank 0 knows that the one before was read."""
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
            words = _words(regions_ptr, other, place)
            tl.store(words + lanes, sent, mask=lanes < is_whole * BLOCK, cache_modifier=".wt")
    else:
        words = _words(regions_ptr, RANK, place)
        got = _received(words + lanes, epoch, faults_ptr, host_ptr, limit * is_whole, LOOKS)
        tl.store(numbers_ptr + places, got, mask=places < count)
    tl.store(epochs_ptr + slot, epoch)


@triton.jit
def _flag_reached(flag_ptr, epoch, faults_ptr, host_ptr, limit, LOOKS: tl.constexpr):
    """Waits until a flag says this call; what was written before it is visible then."""
    now = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    looks = 0
    while (now != epoch) & (looks < limit):
        now = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        looks += 1
        if _called_off(looks, host_ptr, LOOKS) != 0:
            looks = limit
    if now != epoch:
        tl.store(faults_ptr, 1)
        tl.store(host_ptr, 1)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["count"])
def send_columns_kernel(
    columns_ptr,  # [count], of 2 or 4 bytes each
    regions_ptr,
    epochs_ptr,  # int32 [chunks]
    faults_ptr,
    host_ptr,
    count,
    data,  # in rank 0's region, words of 8 bytes: this rank's part
    flags,  # there too: one int64 a chunk
    credits,  # in this rank's region: the last call of each chunk that rank 0 has read
    limit,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOKS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    chunk = tl.program_id(0)
    epoch = tl.load(epochs_ptr + chunk) + 1
    is_whole = (tl.load(faults_ptr) == 0).to(tl.int32)
    credit = _words(regions_ptr, RANK, credits + chunk)
    before = (epoch - 1).to(tl.int64)
    _flag_reached(credit, before, faults_ptr, host_ptr, limit * is_whole, LOOKS)
    is_whole = (tl.load(faults_ptr, volatile=True) == 0).to(tl.int32)
    places = chunk.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (places < count) & (is_whole != 0)
    own = tl.load(columns_ptr + places, mask=mask, other=0.0)
    there = _words(regions_ptr, 0, data).to(columns_ptr.dtype, bitcast=True)
    tl.store(there + places, own, mask=mask)
    tl.debug_barrier()
    flag = _words(regions_ptr, 0, flags + chunk)
    tl.atomic_xchg(flag, epoch.to(tl.int64), mask=is_whole != 0, sem="release", scope="sys")
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
    BLOCK: tl.constexpr,
    LOOKS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    chunk = tl.program_id(0)
    epoch = tl.load(epochs_ptr + chunk) + 1
    is_whole = (tl.load(faults_ptr) == 0).to(tl.int32)
    flag = _words(regions_ptr, 0, flags + chunk)
    _flag_reached(flag, epoch.to(tl.int64), faults_ptr, host_ptr, limit * is_whole, LOOKS)
    places = chunk.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < count
    here = _words(regions_ptr, 0, data).to(logits_ptr.dtype, bitcast=True)
    got = tl.load(here + places, mask=mask, other=0.0, volatile=True)
    target = places // columns * width + first + places % columns
    tl.store(logits_ptr + target, got, mask=mask)
    tl.debug_barrier()
    is_whole = (tl.load(faults_ptr, volatile=True) == 0).to(tl.int32)
    credit = _words(regions_ptr, SOURCE, credits + chunk)
    tl.atomic_xchg(credit, epoch.to(tl.int64), mask=is_whole != 0, sem="release", scope="sys")
    tl.store(epochs_ptr + chunk, epoch)
