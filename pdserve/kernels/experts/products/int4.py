# mypy: allow-untyped-defs
"""Experts in int4. A Triton kernel unpacks numbers from their words, as linear/int4 does. It
multiplies tiles of the rows that go to one expert on tensor cores, with the weights as the first
operand.

With few rows per expert it is bound by the bytes of the words. With many rows, each tile of rows
unpacks the numbers again, because dense matrices of all experts would be several times as large as
the words. Dtypes other than bfloat16 and float16, other groups, and older GPUs do use these dense
matrices. triton_ops.py calls this file.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.experts.ops import Choice, Experts
from pdserve.kernels.experts.products.few_rows import MAX_ROWS, launch_few_rows
from pdserve.kernels.experts.products.many_rows import (
    launch_combine,
    launch_many_rows,
    most_tiles,
    rows_of_tile,
)
from pdserve.kernels.experts.products.tiles import Tile, int4_tile_for
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import cdiv, is_hopper, launch, next_power_of_2
from pdserve.kernels.linear.gate_rows import gate_and_up, matrix_rows, outputs_of
from pdserve.kernels.linear.int4.dense import dequantise_into
from pdserve.kernels.linear.int4.numbers import BLOCK, LANES
from pdserve.kernels.linear.int4.products import FEW_ROWS, FOLDED_GROUPS, GROUPS, added
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.norm.elementwise import gated


def launch_int4(
    x: Tensor,
    choice: Choice,
    experts: Experts,
    onto: Tensor | None,
    tile: Tile | None = None,
) -> Tensor:
    """Runs `ExpertOps.mix`. tile: that of both products, instead of int4_tile_for()'s choice."""
    assert experts.gate_up.bias is None and experts.activation != "clamped_swiglu"
    if not _has_kernel(x, experts):
        dense = replace(
            experts,
            gate_up=_dequantised(experts.gate_up, x.dtype),
            down=_dequantised(experts.down, x.dtype),
        )
        few = len(x) <= MAX_ROWS
        return (launch_few_rows if few else launch_many_rows)(x, choice, dense, onto)
    num_slots = choice.experts.numel()
    num_experts, width = experts.down.data.shape[:2]
    size = experts.down.shape[1]
    if tile is None:
        lists = choice.lists
        share = 1 if lists is None else num_slots / (lists.num_everywhere or num_experts)
        tile = int4_tile_for(share)
    hidden = torch.empty(num_slots, size, dtype=x.dtype, device=x.device)
    made = torch.empty(num_slots, width, dtype=x.dtype, device=x.device)
    silu = experts.activation == "silu"
    _launch_product(x.contiguous(), experts.gate_up, choice, hidden, tile, silu)
    _launch_product(hidden, experts.down, choice, made, tile)
    return launch_combine(made, choice, x, onto)


def _has_kernel(x: Tensor, experts: Experts) -> bool:
    return (
        (not x.is_cuda or is_hopper(x.device))  # older GPUs lack the PTX instructions
        and x.dtype in (torch.bfloat16, torch.float16)
        and experts.gate_up.group[1] in GROUPS
        and experts.down.group[1] in GROUPS
    )


def _dequantised(stack: Matrix, dtype: torch.dtype) -> Matrix:
    """Makes the dense matrices of a stack."""
    assert stack.scales is not None and stack.zeros is not None
    rows, columns = stack.shape
    data = torch.empty(len(stack.data), rows, columns, dtype=dtype, device=stack.data.device)
    flat = replace(
        stack,
        data=stack.data.flatten(0, 1),
        scales=stack.scales.flatten(0, 1),
        zeros=stack.zeros.flatten(0, 1),
    )
    dequantise_into(flat, data.flatten(0, 1))
    return Matrix(data)


def _launch_product(
    x: Tensor, m: Matrix, choice: Choice, out: Tensor, tile: Tile, silu: bool | None = None
) -> None:
    """Launches one product.

    x: contiguous; has one row per row of the step if silu is given, else one row per slot.
    out: `[slots, outputs]`.
    """
    assert m.scales is not None and m.zeros is not None
    assert m.scales.stride(1) == 1 and m.zeros.stride(1) == 1, "rows of a group must be contiguous"
    lists = choice.lists
    is_gated = silu is not None
    num_outputs = out.shape[1]
    block_out = tile.outputs // 2 if is_gated else tile.outputs
    num_experts = len(m.data)
    launch(
        int4_expert_kernel,
        (cdiv(num_outputs, block_out), len(out) if lists is None else most_tiles(choice, tile)),
        (
            x,
            m.data,
            m.scales,
            m.zeros,
            choice.experts,
            lists and lists.counts,
            lists and lists.slots,
            out,
        ),
        (
            len(choice.experts),
            num_outputs,
            x.shape[1],
            m.data.stride(1),
            m.scales.shape[2],
            m.scales.stride(0),
            m.scales.stride(2),
            m.zeros.stride(0),
            m.zeros.stride(2),
        ),
        NUM_EXPERTS=num_experts,
        BLOCK_EXPERTS=next_power_of_2(num_experts),
        PLACES=choice.experts.shape[1],
        GATED=is_gated,
        SILU=bool(silu),
        GROUP=m.group[1],
        FOLDED=tile.rows > FEW_ROWS or m.group[1] in FOLDED_GROUPS,
        BLOCK_ROWS=tile.rows,
        BLOCK_OUT=tile.outputs,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **launch_options(out.device),
    )


@triton.jit(do_not_specialize=["num_rows"])
def int4_expert_kernel(
    x_ptr,  # with GATED [rows, num_inputs]; else [slots, num_inputs], contiguous
    words_ptr,  # int32 [NUM_EXPERTS, num_outputs or 2 * num_outputs, 16 * blocks of 128 columns]
    scales_ptr,  # float32 [NUM_EXPERTS, ..., num_groups]; the rows of a group are contiguous
    zeros_ptr,  # int32 [NUM_EXPERTS, ..., blocks of 128 columns], likewise; four in each
    experts_ptr,  # int32 [slots]
    counts_ptr,  # int32 [NUM_EXPERTS], or None: each slot is a tile of its own
    slots_ptr,  # int32 [NUM_EXPERTS, num_rows], or None
    out_ptr,  # [slots, num_outputs]
    num_rows,
    num_outputs,
    num_inputs,
    stride_words,
    num_groups,
    stride_expert_scales,
    stride_scales,  # from one group to the next
    stride_expert_zeros,
    stride_zeros,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    PLACES: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    GROUP: tl.constexpr,  # columns: 32, 64, 128; 0: all
    FOLDED: tl.constexpr,  # scales multiply the weights, not the sums
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes a (tile of BLOCK_OUT rows of an expert's matrix, tile of the expert's
    rows)."""
    begin(PDL)
    matrix_tile = tl.program_id(0)
    tile = tl.program_id(1)
    matrix = matrix_rows(matrix_tile, num_outputs, GATED, BLOCK_OUT)

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
        number = expert.to(tl.int64)
        first_row = number * num_outputs * (2 if GATED else 1)
        words_at = words_ptr + ((first_row + matrix) * stride_words)[:, None]
        words_at += tl.arange(0, LANES)[None, :]
        scales_at = scales_ptr + number * stride_expert_scales + matrix
        zeros_at = zeros_ptr + number * stride_expert_zeros + matrix
        x_rows = x_ptr + ((slots // PLACES if GATED else slots) * num_inputs)[:, None]
        y = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
        for block in tl.range(0, tl.cdiv(num_inputs, BLOCK), num_stages=STAGES):
            words = tl.load(words_at + block * LANES, eviction_policy="evict_first")
            zeros = tl.load(zeros_at + block * stride_zeros)
            y = added(
                y,
                words,
                zeros,
                scales_at,
                x_rows,
                block,
                num_inputs,
                num_groups,
                stride_scales,
                is_row,
                GROUP,
                FOLDED,
            )
        if not GROUP:
            y *= tl.load(scales_at)[:, None]
        gate, up = gate_and_up(y, GATED)
        if GATED:
            gate = gated(gate, up, SILU)
        outputs = outputs_of(matrix_tile, GATED, BLOCK_OUT)
        out = out_ptr + (slots * num_outputs)[None, :] + outputs[:, None]
        mask = (outputs < num_outputs)[:, None] & is_row[None, :]
        tl.store(out, gate.to(out_ptr.dtype.element_ty), mask=mask)
