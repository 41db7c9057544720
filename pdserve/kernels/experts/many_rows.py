# mypy: allow-untyped-defs
"""Triton kernels of experts for many rows: products of tiles of rows that go to one expert, on
tensor cores; then each row's experts are added up.

A program finds its expert and its rows from the lists that the choice made: tiles are counted
through expert by expert, so nothing is sorted, and no more programs start than there can be tiles.
Called through triton_ops.py.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.experts.ops import Choice, Experts, Lists
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.dot import dot
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.norm.elementwise import gated

COMBINE_BLOCK = 1024
COMBINE_WARPS = 4


@dataclass(frozen=True)
class Tile:
    """A step of a program: rows x outputs x inputs."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def tile_for(num_slots: int, num_experts: int) -> Tile:
    """A tile for about as many rows as an expert gets, so that its weights are read once where that
    is possible."""
    rows = num_slots / num_experts
    if rows <= 16:
        return Tile(16, 64, 128, 4, 4)
    if rows <= 64:
        return Tile(64, 64, 64, 4, 4)
    return Tile(128, 128, 64, 8, 3)


def launch_many_rows(
    x: Tensor, choice: Choice, experts: Experts, onto: Tensor | None, tile: Tile | None = None
) -> Tensor:
    """`ExpertOps.mix`. tile: other than tile_for() would choose."""
    lists = choice.lists
    assert lists is not None, "a choice of another implementation"
    num_rows, top_k = choice.experts.shape
    num_slots = num_rows * top_k
    num_experts, width, size = experts.down.data.shape
    tile = tile or tile_for(num_slots, num_experts)
    hidden = torch.empty(num_slots, size, dtype=x.dtype, device=x.device)
    silu = experts.activation == "silu"
    _launch_product(x, experts.gate_up.data, lists, hidden, tile, top_k, is_gated=True, silu=silu)
    made = torch.empty(num_slots, width, dtype=x.dtype, device=x.device)
    _launch_product(hidden, experts.down.data, lists, made, tile, 1, is_gated=False, silu=silu)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if onto is None else onto
    launch(
        combine_kernel,
        (num_rows, cdiv(width, COMBINE_BLOCK)),
        (made, choice.experts, choice.weights, out),
        (width,),
        TOP_K=top_k,
        ADD=onto is not None,
        BLOCK=COMBINE_BLOCK,
        num_warps=COMBINE_WARPS,
        **launch_options(x.device),
    )
    return out


def _launch_product(
    x: Tensor,
    weight: Tensor,
    lists: Lists,
    out: Tensor,
    tile: Tile,
    slots_a_row: int,
    is_gated: bool,
    silu: bool,
) -> None:
    """x: has a row for so many slots."""
    num_experts, num_rows = lists.slots.shape
    num_slots, num_outputs = out.shape
    block_out = tile.outputs // 2 if is_gated else tile.outputs
    num_tiles = num_slots // tile.rows + min(num_experts, num_slots)
    launch(
        expert_product_kernel,
        (num_tiles, cdiv(num_outputs, block_out)),
        (x, weight, lists.counts, lists.slots, out),
        (num_rows, num_outputs, x.shape[1], x.stride(0)),
        NUM_EXPERTS=num_experts,
        BLOCK_EXPERTS=next_power_of_2(num_experts),
        SLOTS_A_ROW=slots_a_row,
        GATED=is_gated,
        SILU=silu,
        BLOCK_ROWS=tile.rows,
        BLOCK_OUT=block_out,
        BLOCK_IN=tile.inputs,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **launch_options(x.device),
    )


@triton.jit(do_not_specialize=["num_rows"])
def expert_product_kernel(
    x_ptr,  # [slots / SLOTS_A_ROW, num_inputs]
    weight_ptr,  # [NUM_EXPERTS, num_outputs or 2 * num_outputs, num_inputs]
    counts_ptr,  # int32 [NUM_EXPERTS]
    slots_ptr,  # int32 [NUM_EXPERTS, num_rows]
    out_ptr,  # [slots, num_outputs]
    num_rows,
    num_outputs,
    num_inputs,
    stride_x,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    SLOTS_A_ROW: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of an expert's rows, tile of outputs)."""
    begin(PDL)
    tile = tl.program_id(0)
    every = tl.arange(0, BLOCK_EXPERTS)

    wait(PDL)
    counts = tl.load(counts_ptr + every, mask=every < NUM_EXPERTS, other=0)
    tiles = tl.cdiv(counts, BLOCK_ROWS)
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    if expert < NUM_EXPERTS:
        is_ours = every == expert
        first = (tile - tl.sum(tl.where(is_ours, ends - tiles, 0), 0)) * BLOCK_ROWS
        count = tl.sum(tl.where(is_ours, counts, 0), 0)
        places = first + tl.arange(0, BLOCK_ROWS)
        is_row = places < count
        our_slots = slots_ptr + expert.to(tl.int64) * num_rows
        slots = tl.load(our_slots + places, mask=is_row, other=0).to(tl.int64)
        outputs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        columns = tl.arange(0, BLOCK_IN)
        # what lies past the last is computed and not stored
        weight_rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
        size = num_outputs.to(tl.int64) * num_inputs
        start_row = weight_ptr + expert * size * (2 if GATED else 1)
        gate_rows = start_row + (weight_rows * num_inputs)[:, None] + columns[None, :]
        up_rows = gate_rows + size
        x_rows = x_ptr + (slots // SLOTS_A_ROW * stride_x)[:, None] + columns[None, :]
        y = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
        up = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
        for start in tl.range(0, num_inputs, BLOCK_IN, num_stages=STAGES):
            inside = (start + columns < num_inputs)[None, :]
            x = tl.load(x_rows + start, mask=inside & is_row[:, None], other=0.0)
            weights = tl.load(gate_rows + start, mask=inside, other=0.0)
            y = dot(x, tl.trans(weights), y)
            if GATED:
                up_weights = tl.load(up_rows + start, mask=inside, other=0.0)
                up = dot(x, tl.trans(up_weights), up)
        if GATED:
            y = gated(y, up, SILU)
        out = out_ptr + (slots * num_outputs)[:, None] + outputs[None, :]
        mask = is_row[:, None] & (outputs < num_outputs)[None, :]
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def combine_kernel(
    made_ptr,  # [rows * TOP_K, width]
    experts_ptr,  # int32 [rows * TOP_K]
    weights_ptr,  # float32 [rows * TOP_K]
    out_ptr,  # [rows, width]
    width,
    TOP_K: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, tile of columns). ADD: to what stands in out."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width

    wait(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        slot = row * TOP_K + k
        is_made = tl.load(experts_ptr + slot) >= 0
        weight = tl.load(weights_ptr + slot)
        part = tl.load(made_ptr + slot * width + columns, mask=inside & is_made, other=0.0)
        total += part.to(tl.float32) * weight
    out = out_ptr + row * width + columns
    if ADD:
        total += tl.load(out, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)
