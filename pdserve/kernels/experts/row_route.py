# mypy: allow-untyped-defs
"""Triton kernel that routes a single row: it computes the logits and chooses by them in one launch.
triton_ops.py calls it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.experts.ops import Router
from pdserve.kernels.experts.routes import choose, routing_constants
from pdserve.kernels.launching.arrivals import arrivals
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2

ROW_EXPERTS = 2  # experts of a program
ROW_INPUTS = 2048  # inputs of a step


def launch_route_row(
    x: Tensor, router: Router, live: Tensor | None, load: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the experts and weights of a `Choice` for one row."""
    routing = router.routing
    width = x.shape[1]
    logits = torch.empty(routing.num_experts, dtype=torch.float32, device=x.device)
    experts = torch.empty(1, routing.num_places, dtype=torch.int32, device=x.device)
    weights = torch.empty(1, routing.num_places, dtype=torch.float32, device=x.device)
    launch(
        route_row_kernel,
        (cdiv(routing.num_experts, ROW_EXPERTS),),
        (
            x,
            router.weight,
            router.bias,
            router.logit_bias,
            None if live is None else live.view(torch.uint8),
            logits,
            arrivals(x.device),
            experts,
            weights,
            load,
        ),
        (float(routing.scaling), router.weight.stride(0)),
        NUM_INPUTS=width,
        BLOCK_OUT=ROW_EXPERTS,
        BLOCK_IN=min(next_power_of_2(width), ROW_INPUTS),
        **routing_constants(routing),
        num_warps=1,
        **launch_options(x.device),
    )
    return experts, weights


@triton.jit
def route_row_kernel(
    x_ptr,  # [NUM_INPUTS]
    weight_ptr,  # [experts, NUM_INPUTS]
    bias_ptr,  # float32 [experts], or None
    logit_bias_ptr,  # float32 [experts], or None
    live_ptr,  # uint8 [1], or None
    logits_ptr,  # float32 [experts]
    arrivals_ptr,  # int32, 0 between launches
    experts_ptr,  # int32 [PLACES]
    weights_ptr,  # float32 [PLACES]
    load_ptr,  # int64 [experts], added to
    scaling,
    stride_weight,
    NUM_INPUTS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
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
    """Each program computes the logits of a tile of experts for the row. It loads their first
    weights while the kernel before still runs. The last program to arrive chooses."""
    begin(PDL)
    num_experts: tl.constexpr = NUM_GROUPS * GROUP_SIZE
    experts = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    columns = tl.arange(0, BLOCK_IN)
    # Outputs past the last one are computed and not stored.
    rows = tl.minimum(experts, num_experts - 1).to(tl.int64)
    weight_rows = weight_ptr + (rows * stride_weight)[:, None] + columns[None, :]
    w = tl.load(weight_rows, mask=(columns < NUM_INPUTS)[None, :], other=0.0)
    groups = tl.arange(0, BLOCK_GROUPS)
    places = tl.arange(0, BLOCK_SIZE)
    index = groups[:, None] * GROUP_SIZE + places[None, :]
    there = (groups < NUM_GROUPS)[:, None] & (places < GROUP_SIZE)[None, :]

    wait(PDL)
    x = tl.load(x_ptr + columns, mask=columns < NUM_INPUTS, other=0.0)
    y = w.to(tl.float32) * x.to(tl.float32)[None, :]
    for step in tl.static_range(1, (NUM_INPUTS + BLOCK_IN - 1) // BLOCK_IN):
        at = step * BLOCK_IN + columns
        w = tl.load(weight_rows + step * BLOCK_IN, mask=(at < NUM_INPUTS)[None, :], other=0.0)
        x = tl.load(x_ptr + at, mask=at < NUM_INPUTS, other=0.0)
        y += w.to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(logits_ptr + experts, tl.sum(y, 1), mask=experts < num_experts)
    tl.debug_barrier()  # so that the arrival of one thread covers the stores of all threads
    if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrivals_ptr, 0)
        logits = tl.load(logits_ptr + index, mask=there, other=0.0, cache_modifier=".cg")
        chosen, weights = choose(
            logits,
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
            is_live = tl.load(live_ptr) != 0
        tl.store(experts_ptr + k, tl.where(is_live, chosen, -1), mask=k < PLACES)
        tl.store(weights_ptr + k, weights, mask=k < PLACES)
        ones = tl.full([BLOCK_K], 1, tl.int64)
        tl.atomic_add(load_ptr + chosen, ones, mask=(k < TOP_K) & is_live, sem="relaxed")
