# mypy: allow-untyped-defs
"""Triton kernels of the router, which compute its logits and choose experts by them.

The product leaves parts of sums, which the choice adds up in order. They are float32 and never
rounded between. The choice also lists the rows of each expert, in whatever order they come, because
an expert's result for a row does not depend on the row's place. The file triton_ops.py calls this
one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.experts.ops import Lists, Router
from pdserve.kernels.experts.products.tiles import router_tile
from pdserve.kernels.experts.routing import Routing
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.dot import dot
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2, power_of_2_below

BLOCK_IN = 128
SPLIT_INPUTS = 512  # the fewest inputs of one part of a sum
LOWEST = tl.constexpr(-1e38)


def launch_router_product(x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Computes the logits of x `[T, hidden]` in parts, float32 `[parts, T, num_experts]`. Also
    returns the first counts for launch_choose: 0, and T for shared experts."""
    weight = router.weight
    num_rows, num_inputs = x.shape
    num_experts = weight.shape[0]
    num_counts = num_experts + router.routing.num_shared
    block_rows, block_experts, most = router_tile(num_rows, num_experts)
    splits = power_of_2_below(min(most, num_inputs // SPLIT_INPUTS))
    parts = torch.empty(splits, num_rows, num_experts, dtype=torch.float32, device=x.device)
    counts = torch.empty(num_counts, dtype=torch.int32, device=x.device)
    launch(
        router_product_kernel,
        (cdiv(num_rows, block_rows), cdiv(num_experts, block_experts), splits),
        (x, weight, parts, counts),
        (num_rows, num_experts, num_counts, num_inputs, x.stride(0), weight.stride(0)),
        BLOCK_ROWS=block_rows,
        BLOCK_OUT=block_experts,
        BLOCK_IN=BLOCK_IN,
        SPLITS=splits,
        BLOCK_COUNTS=next_power_of_2(num_counts),
        num_warps=4,
        **launch_options(x.device),
    )
    return parts, counts


def launch_choose(
    parts: Tensor, counts: Tensor, router: Router, live: Tensor | None, load: Tensor
) -> tuple[Tensor, Tensor, Lists]:
    """Returns the experts and weights of a `Choice`, and the rows of each expert."""
    routing = router.routing
    splits, num_rows = parts.shape[:2]
    shape = (num_rows, routing.num_places)
    experts = torch.empty(shape, dtype=torch.int32, device=parts.device)
    weights = torch.empty(shape, dtype=torch.float32, device=parts.device)
    slots = torch.empty(len(counts), num_rows, dtype=torch.int32, device=parts.device)
    launch(
        choose_kernel,
        (num_rows,),
        (
            parts,
            router.bias,
            router.logit_bias,
            None if live is None else live.view(torch.uint8),
            experts,
            weights,
            counts,
            slots,
            load,
        ),
        (num_rows, float(routing.scaling)),
        SPLITS=splits,
        **routing_constants(routing),
        num_warps=1,
        **launch_options(parts.device),
    )
    return experts, weights, Lists(counts, slots)


def routing_constants(routing: Routing) -> dict[str, object]:
    """Returns the constants of the kernels that choose."""
    return {
        "NUM_GROUPS": routing.num_groups,
        "GROUP_SIZE": routing.group_size,
        "BLOCK_GROUPS": next_power_of_2(routing.num_groups),
        "BLOCK_SIZE": next_power_of_2(routing.group_size),
        "TOP_K": routing.top_k,
        "PLACES": routing.num_places,
        "BLOCK_K": next_power_of_2(routing.num_places),
        "TOP_GROUPS": routing.top_groups,
        "SOFTMAX": routing.scoring == "softmax",
        "NORMALIZE": routing.normalize,
        "BEST_TWO": routing.group_score == "top2",
    }


@triton.jit(do_not_specialize=["num_rows"])
def router_product_kernel(
    x_ptr,  # [num_rows, num_inputs]
    weight_ptr,  # [num_experts, num_inputs]
    parts_ptr,  # float32 [SPLITS, num_rows, num_experts]
    counts_ptr,  # int32 [num_counts]: of experts, then of shared ones
    num_rows,
    num_experts,
    num_counts,
    num_inputs,
    stride_x,
    stride_weight,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_COUNTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes a (tile of rows, tile of experts, part of the inputs). The first one
    sets the counts."""
    begin(PDL)
    split = tl.program_id(2)
    span = tl.cdiv(num_inputs, BLOCK_IN * SPLITS) * BLOCK_IN
    first = split * span
    end = tl.minimum(first + span, num_inputs)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    experts = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    columns = tl.arange(0, BLOCK_IN)
    x_rows = x_ptr + (rows.to(tl.int64) * stride_x)[:, None] + columns[None, :]
    weight_rows = weight_ptr + (experts.to(tl.int64) * stride_weight)[:, None] + columns[None, :]

    wait(PDL)
    if tl.program_id(0) + tl.program_id(1) + split == 0:
        every = tl.arange(0, BLOCK_COUNTS)
        counts = tl.where(every < num_experts, 0, num_rows)
        tl.store(counts_ptr + every, counts, mask=every < num_counts)
    y = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for start in range(first, end, BLOCK_IN):
        inside = (start + columns < end)[None, :]
        x = tl.load(x_rows + start, mask=inside & (rows < num_rows)[:, None], other=0.0)
        w = tl.load(weight_rows + start, mask=inside & (experts < num_experts)[:, None], other=0.0)
        y = dot(x, tl.trans(w), y)
    out = parts_ptr + (split * num_rows + rows).to(tl.int64)[:, None] * num_experts
    mask = (rows < num_rows)[:, None] & (experts < num_experts)[None, :]
    tl.store(out + experts[None, :], y, mask=mask)


@triton.jit
def _best(x, index):
    """Returns the highest of x, and the lowest index that has it."""
    best = tl.max(tl.max(x, 1), 0)
    return best, tl.min(tl.min(tl.where(x == best, index, 1 << 30), 1), 0)


@triton.jit
def choose(
    scores,  # float32 [BLOCK_GROUPS, BLOCK_SIZE]: the router's logits
    index,  # the numbers of the experts in scores
    there,  # true where scores has an expert
    bias_ptr,  # float32 [experts], or None
    logit_bias_ptr,  # float32 [experts], or None
    scaling,
    NUM_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BEST_TWO: tl.constexpr,
):
    """Returns the experts and weights of a row, both [BLOCK_K]: the chosen experts, then the shared
    ones with weight 1."""
    groups = tl.arange(0, BLOCK_GROUPS)
    if logit_bias_ptr is not None:
        scores += tl.load(logit_bias_ptr + index, mask=there, other=0.0)
    # A row with NaN or infinities must also go to some experts, and to each of them only once.
    scores = tl.where(tl.abs(scores) < float("inf"), scores, LOWEST)
    if SOFTMAX:
        scores = tl.where(there, scores, float("-inf"))
        scores = tl.exp(scores - tl.max(tl.max(scores, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    else:
        scores = tl.where(there, 1.0 / (1.0 + tl.exp(-scores)), 0.0)
    ranked = scores
    if bias_ptr is not None:
        ranked += tl.load(bias_ptr + index, mask=there, other=0.0)
    ranked = tl.where(there, ranked, float("-inf"))

    if NUM_GROUPS > 1:
        group_scores = tl.max(ranked, 1)
        if BEST_TWO:
            firsts = tl.min(tl.where(ranked == group_scores[:, None], index, 1 << 30), 1)
            others = tl.where(index == firsts[:, None], float("-inf"), ranked)
            group_scores += tl.max(others, 1)
        group_scores = tl.where(groups < NUM_GROUPS, group_scores, float("-inf"))
        is_open = tl.zeros([BLOCK_GROUPS], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.max(group_scores, 0)
            group = tl.min(tl.where(group_scores == best, groups, 1 << 30), 0)
            is_open = tl.where(groups == group, 1, is_open)
            group_scores = tl.where(groups == group, float("-inf"), group_scores)
        ranked = tl.where((is_open == 1)[:, None], ranked, float("-inf"))

    k = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for i in tl.static_range(TOP_K):
        _, expert = _best(ranked, index)
        weight = tl.sum(tl.sum(tl.where(index == expert, scores, 0.0), 1), 0)
        chosen = tl.where(k == i, expert, chosen)
        weights = tl.where(k == i, weight, weights)
        ranked = tl.where(index == expert, float("-inf"), ranked)
    if NORMALIZE:
        weights = weights / tl.sum(weights, 0)
    weights = weights * scaling
    chosen = tl.where(k < TOP_K, chosen, NUM_EXPERTS + k - TOP_K)
    return chosen, tl.where(k < TOP_K, weights, 1.0)


@triton.jit(do_not_specialize=["num_rows"])
def choose_kernel(
    parts_ptr,  # float32 [SPLITS, num_rows, experts]
    bias_ptr,  # float32 [experts], or None
    logit_bias_ptr,  # float32 [experts], or None
    live_ptr,  # uint8 [num_rows], or None
    experts_ptr,  # int32 [num_rows, PLACES]
    weights_ptr,  # float32 [num_rows, PLACES]
    counts_ptr,  # int32 [experts and shared], added to
    slots_ptr,  # int32 [experts and shared, num_rows]
    load_ptr,  # int64 [experts], added to
    num_rows,
    scaling,
    SPLITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BEST_TWO: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program chooses for one row. Experts are laid out as [group, place in it]."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, BLOCK_GROUPS)
    places = tl.arange(0, BLOCK_SIZE)
    index = groups[:, None] * GROUP_SIZE + places[None, :]
    there = (groups < NUM_GROUPS)[:, None] & (places < GROUP_SIZE)[None, :]
    num_experts: tl.constexpr = NUM_GROUPS * GROUP_SIZE

    wait(PDL)
    scores = tl.zeros([BLOCK_GROUPS, BLOCK_SIZE], tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * num_rows + row) * num_experts
        scores += tl.load(parts_ptr + at + index, mask=there, other=0.0)
    chosen, weights = choose(
        scores,
        index,
        there,
        bias_ptr,
        logit_bias_ptr,
        scaling,
        NUM_GROUPS,
        BLOCK_GROUPS,
        num_experts,
        TOP_K,
        BLOCK_K,
        TOP_GROUPS,
        SOFTMAX,
        NORMALIZE,
        BEST_TWO,
    )
    k = tl.arange(0, BLOCK_K)
    is_live = True
    if live_ptr is not None:
        is_live = tl.load(live_ptr + row) != 0
    is_choice = k < TOP_K
    is_shared = (k >= TOP_K) & (k < PLACES)
    counted = is_choice & is_live
    at = row * PLACES + k
    tl.store(experts_ptr + at, tl.where(is_live, chosen, -1), mask=k < PLACES)
    tl.store(weights_ptr + at, weights, mask=k < PLACES)
    ones = tl.full([BLOCK_K], 1, tl.int32)
    position = tl.atomic_add(counts_ptr + chosen, ones, mask=counted, sem="relaxed")
    position = tl.where(is_shared, row.to(tl.int32), position)
    lists = slots_ptr + chosen.to(tl.int64) * num_rows
    tl.store(lists + position, at.to(tl.int32), mask=counted | is_shared)
    tl.atomic_add(load_ptr + chosen, ones.to(tl.int64), mask=counted, sem="relaxed")
