# mypy: allow-untyped-defs
"""Experts in e4m3. The inputs of each of the two products are rounded to e4m3, as linear/fp8/ does
it. The results of a row's experts are added up as for dense experts.

For many rows per expert the products are those of many_rows.py. For fewer rows, down to one, they
are bound by the bytes of the weights. For them this file has a Triton kernel that reads each weight
once and multiplies on tensor cores. Weights are the first operand, because tensor cores take 64
rows of the first operand and few of the second. triton_ops.py calls this file.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.experts.ops import Choice, Experts
from pdserve.kernels.experts.products.many_rows import (
    launch_combine,
    launch_product,
    most_tiles,
    rows_of_tile,
)
from pdserve.kernels.experts.products.tiles import MORE, Tile, e4m3_tile_for
from pdserve.kernels.launching.codes import dot_e4m3
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.linear.fp8.quantise import GROUP, Rounded, launch_quantise
from pdserve.kernels.linear.gate_rows import gate_and_up, matrix_rows, outputs_of
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.norm.elementwise import gated


def launch_e4m3(
    x: Tensor,
    choice: Choice,
    experts: Experts,
    onto: Tensor | None,
    tiles: tuple[Tile, Tile] | None = None,
) -> Tensor:
    """Runs `ExpertOps.mix`. tiles: those of both products, instead of e4m3_tile_for()'s choice."""
    assert experts.gate_up.bias is None and experts.activation != "clamped_swiglu"
    num_slots = choice.experts.numel()
    num_experts, width, size = experts.down.data.shape
    group_columns = experts.gate_up.group[1]
    if tiles is None:
        lists = choice.lists
        share = 1 if lists is None else num_slots / (lists.num_everywhere or num_experts)
        tiles = e4m3_tile_for(share, width), e4m3_tile_for(share, size)
    hidden = torch.empty(num_slots, size, dtype=x.dtype, device=x.device)
    made = torch.empty(num_slots, width, dtype=x.dtype, device=x.device)
    silu = experts.activation == "silu"
    rounded = launch_quantise(x, group_columns)
    _launch_product(rounded, experts.gate_up, choice, hidden, tiles[0], silu)
    rounded = launch_quantise(hidden, group_columns, chosen=choice.experts)
    _launch_product(rounded, experts.down, choice, made, tiles[1])
    return launch_combine(made, choice, x, onto)


def _launch_product(
    x: Rounded, m: Matrix, choice: Choice, out: Tensor, tile: Tile, silu: bool | None = None
) -> None:
    """Launches one product.

    x: has one row per row of the step if silu is given, else one row per slot.
    out: `[slots, outputs]`.
    """
    if tile.rows > MORE:
        return launch_product(x.codes, x.scales, m, choice, out, tile, silu)
    assert m.scales is not None
    lists = choice.lists
    is_gated = silu is not None
    num_outputs = out.shape[1]
    block_out = tile.outputs // 2 if is_gated else tile.outputs
    num_tiles = len(out) if lists is None else most_tiles(choice, tile)
    num_experts = len(m.data)
    launch(
        few_product_kernel,
        (cdiv(num_outputs, block_out), num_tiles),
        (
            x.codes,
            x.scales,
            m.data,
            m.scales,
            choice.experts,
            lists and lists.counts,
            lists and lists.slots,
            out,
        ),
        (
            len(choice.experts),
            num_outputs,
            m.shape[1],
            x.scales.stride(0),
            m.scales.stride(0),
            m.scales.stride(1),
        ),
        NUM_EXPERTS=num_experts,
        BLOCK_EXPERTS=next_power_of_2(num_experts),
        PLACES=choice.experts.shape[1],
        GATED=is_gated,
        SILU=bool(silu),
        GROUP_ROWS=m.group[0],
        GROUPED=m.group[1] != 0,
        BLOCK_ROWS=tile.rows,
        BLOCK_OUT=tile.outputs,
        STEPS=tile.inputs // GROUP.value,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **launch_options(out.device),
    )


@triton.jit(do_not_specialize=["num_rows"])
def few_product_kernel(
    x_ptr,  # with GATED [rows, num_inputs]; else [slots, num_inputs], contiguous
    x_scales_ptr,  # [rows or slots, num_inputs / 128 or 1]
    weight_ptr,  # [NUM_EXPERTS, num_outputs or 2 * num_outputs, num_inputs]
    scales_ptr,  # [NUM_EXPERTS, / GROUP_ROWS, num_inputs / 128 or 1]
    experts_ptr,  # int32 [slots]
    counts_ptr,  # int32 [NUM_EXPERTS], or None: each slot is a tile of its own
    slots_ptr,  # int32 [NUM_EXPERTS, num_rows], or None
    out_ptr,  # [slots, num_outputs]
    num_rows,
    num_outputs,
    num_inputs,
    stride_x_scales,
    stride_expert_scales,
    stride_scales,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    PLACES: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    STEPS: tl.constexpr,  # groups of 128 columns
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes a (tile of BLOCK_OUT rows of an expert's matrix, tile of the expert's
    rows)."""
    begin(PDL)
    matrix_tile = tl.program_id(0)
    tile = tl.program_id(1)
    step: tl.constexpr = GROUP * STEPS
    columns = tl.arange(0, GROUP)
    weight_rows = matrix_rows(matrix_tile, num_outputs, GATED, BLOCK_OUT)

    wait(PDL)
    if counts_ptr is None:
        expert = tl.load(experts_ptr + tile)
        is_there = expert >= 0
        is_row = tl.arange(0, BLOCK_ROWS) == 0
        slots = tl.zeros([BLOCK_ROWS], tl.int64) + tile
    else:
        expert, is_row, slots = rows_of_tile(
            tile, counts_ptr, slots_ptr, num_rows, NUM_EXPERTS, BLOCK_EXPERTS, BLOCK_ROWS
        )
        is_there = expert < NUM_EXPERTS
    if is_there:
        first_row = expert.to(tl.int64) * num_outputs * (2 if GATED else 1)
        weights_at = weight_ptr + ((first_row + weight_rows) * num_inputs)[:, None]
        weights_at += columns[None, :]
        scales_at = scales_ptr + expert * stride_expert_scales
        scales_at += weight_rows // GROUP_ROWS * stride_scales
        x_rows = slots // PLACES if GATED else slots
        x_at = x_ptr + (x_rows * num_inputs)[:, None] + columns[None, :]
        x_scales_at = x_scales_ptr + x_rows * stride_x_scales
        y = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
        for start in tl.range(0, num_inputs, step, num_stages=STAGES):
            for number in tl.static_range(STEPS):
                at = start + number * GROUP
                mask = (at + columns < num_inputs)[None, :]
                weights = tl.load(
                    weights_at + at, mask=mask, other=0.0, eviction_policy="evict_first"
                )
                x = tl.load(x_at + at, mask=mask & is_row[:, None], other=0.0)
                sums = dot_e4m3(weights, tl.trans(x))
                if GROUPED:
                    group = tl.minimum(at, num_inputs - 1) // GROUP
                    scales = tl.load(scales_at + group)[:, None]
                    sums *= tl.load(x_scales_at + group)[None, :] * scales
                y += sums
        if not GROUPED:
            y = y * tl.load(scales_at)[:, None] * tl.load(x_scales_at)[None, :]
        gate, up = gate_and_up(y, GATED)
        if GATED:
            gate = gated(gate, up, SILU)
        outputs = outputs_of(matrix_tile, GATED, BLOCK_OUT)
        out = out_ptr + (slots * num_outputs)[None, :] + outputs[:, None]
        mask = (outputs < num_outputs)[:, None] & is_row[None, :]
        tl.store(out, gate.to(out_ptr.dtype.element_ty), mask=mask)
