# mypy: allow-untyped-defs
"""Triton kernel that finds the part of a choice that one rank computes, where ranks hold experts
whole. It also lists the rows of each of the rank's experts. triton_ops.py calls it.

If a rank of another home does not answer, the choice that should have come from there is arbitrary
memory. Its results are thrown away, but until then nothing may be read or written outside the
tensors. So numbers that no expert has count as -1, and the list of an expert never takes more than
all rows.
"""

import torch
import triton
import triton.language as tl

from pdserve.kernels.experts.ops import Choice, Lists, Share
from pdserve.kernels.experts.reference import KEY_FACTORS, LOW_BITS
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2

SLOTS = 32  # of one program
LOW = tl.constexpr(LOW_BITS)
FACTOR_1, FACTOR_2 = (tl.constexpr(factor) for factor in KEY_FACTORS)


def launch_place(choice: Choice, share: Share, own: range, has_lists: bool) -> Choice:
    """Launches the kernel of `ExpertOps.place`."""
    device = choice.experts.device
    num_rows, places = choice.experts.shape
    num_local = share.num_local + share.num_shared
    experts, weights = torch.empty_like(choice.experts), torch.empty_like(choice.weights)
    lists = None
    if has_lists:
        counts = torch.zeros(num_local, dtype=torch.int32, device=device)
        slots = torch.empty(num_local, num_rows, dtype=torch.int32, device=device)
        lists = Lists(counts, slots, share.num_everywhere)
    block_places = next_power_of_2(places)
    block_rows = max(SLOTS // block_places, 1)
    launch(
        place_kernel,
        (cdiv(num_rows, block_rows),),
        (
            choice.experts,
            choice.weights,
            share.num_copies,
            share.first,
            share.copies,
            experts,
            weights,
            lists and lists.counts,
            lists and lists.slots,
        ),
        (num_rows, own.start, own.stop, share.first_local, share.num_copies.numel()),
        NUM_LOCAL=share.num_local,
        NUM_SHARED=share.num_shared,
        TP_RANK=share.tp_rank,
        TP=share.tp,
        PLACES=places,
        BLOCK_PLACES=block_places,
        BLOCK_ROWS=block_rows,
        num_warps=1,
        **launch_options(device),
    )
    return Choice(experts, weights, lists)


@triton.jit
def row_key(weights):
    """Computes reference.row_key, bit for bit."""
    key = weights.to(tl.int32, bitcast=True).to(tl.int64) & LOW
    key = ((key ^ (key >> 16)) * FACTOR_1) & LOW
    key = ((key ^ (key >> 15)) * FACTOR_2) & LOW
    return ((key ^ (key >> 16)) >> 1).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "own_start", "own_stop", "first_local", "num_experts"])
def place_kernel(
    chosen_ptr,  # int32 [num_rows, PLACES]
    weights_ptr,  # float32 [num_rows, PLACES]
    num_copies_ptr,  # int32 [experts]
    first_ptr,  # int32 [experts]
    copies_ptr,  # int32 [copies]
    experts_ptr,  # int32 [num_rows, PLACES]
    out_weights_ptr,  # float32 [num_rows, PLACES]
    counts_ptr,  # int32 [NUM_LOCAL + NUM_SHARED], added to, or None
    slots_ptr,  # int32 [NUM_LOCAL + NUM_SHARED, num_rows], or None
    num_rows,
    own_start,
    own_stop,
    first_local,
    num_experts,
    NUM_LOCAL: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    TP_RANK: tl.constexpr,
    TP: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program handles a tile of rows."""
    begin(PDL)
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    place = tl.arange(0, BLOCK_PLACES)[None, :]
    inside = (row < num_rows) & (place < PLACES)
    is_shared = place >= PLACES - NUM_SHARED
    at = row * PLACES + place

    wait(PDL)
    chosen = tl.load(chosen_ptr + at, mask=inside, other=-1)
    weights = tl.load(weights_ptr + at, mask=inside, other=0.0)
    key = row_key(tl.load(weights_ptr + row * PLACES, mask=row < num_rows, other=0.0))
    is_routed = (chosen >= 0) & (chosen < num_experts) & (is_shared == 0)
    num_copies = tl.load(num_copies_ptr + chosen, mask=is_routed, other=1)
    first = tl.load(first_ptr + chosen, mask=is_routed, other=0)
    copy = tl.load(copies_ptr + first + key % num_copies, mask=is_routed, other=-1) - first_local
    is_here = is_routed & (copy >= 0) & (copy < NUM_LOCAL)
    is_own = (row >= own_start) & (row < own_stop) & (key % TP == TP_RANK)
    is_here = is_here | (is_shared & is_own & (chosen >= 0))
    expert = tl.where(is_shared, NUM_LOCAL + NUM_SHARED + place - PLACES, copy)
    tl.store(experts_ptr + at, tl.where(is_here, expert, -1), mask=inside)
    tl.store(out_weights_ptr + at, tl.where(is_here, weights, 0.0), mask=inside)
    if counts_ptr is not None:
        ones = tl.full([BLOCK_ROWS, BLOCK_PLACES], 1, tl.int32)
        position = tl.atomic_add(counts_ptr + expert, ones, mask=is_here, sem="relaxed")
        lists = slots_ptr + expert.to(tl.int64) * num_rows
        tl.store(lists + position, at, mask=is_here & (position < num_rows))
