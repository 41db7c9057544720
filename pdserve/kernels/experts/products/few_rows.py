# mypy: allow-untyped-defs
"""Triton kernels of experts for few rows, which are bound by the bytes of the weights. Each choice
of a row reads its expert's matrices through registers.

The speed depends on how many bytes are in flight at once. So steps over the inputs are unrolled,
and a program of the second product reads all experts of a row together. triton_ops.py calls this
file.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.experts.ops import Choice, Experts
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.norm.elementwise import gated

MAX_ROWS = 1  # for two rows or more, tiles are better: they read an expert of both rows once
GATED_OUT = 1  # outputs of a program
DOWN_OUT = 2
MAX_IN = 512  # inputs of a step
GATED_WARPS = 2
DOWN_WARPS = 8


def launch_few_rows(x: Tensor, choice: Choice, experts: Experts, onto: Tensor | None) -> Tensor:
    """Runs `ExpertOps.mix`."""
    num_rows, places = choice.experts.shape
    width, size = experts.down.data.shape[1:]
    hidden = torch.empty(num_rows * places, size, dtype=x.dtype, device=x.device)
    launch(
        few_gated_kernel,
        (cdiv(size, GATED_OUT), num_rows * places),
        (x, experts.gate_up.data, experts.gate_up.bias, choice.experts, hidden),
        (size, x.stride(0)),
        NUM_INPUTS=width,
        PLACES=places,
        SILU=experts.activation == "silu",
        CLAMPED=experts.activation == "clamped_swiglu",
        BLOCK_OUT=GATED_OUT,
        BLOCK_IN=min(next_power_of_2(width), MAX_IN),
        num_warps=GATED_WARPS,
        **launch_options(x.device),
    )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if onto is None else onto
    launch(
        few_down_kernel,
        (cdiv(width, DOWN_OUT), num_rows),
        (hidden, experts.down.data, experts.down.bias, choice.experts, choice.weights, out),
        (width,),
        NUM_INPUTS=size,
        PLACES=places,
        BLOCK_PLACES=next_power_of_2(places),
        ADD=onto is not None,
        BLOCK_OUT=DOWN_OUT,
        BLOCK_IN=min(next_power_of_2(size), MAX_IN),
        num_warps=DOWN_WARPS,
        **launch_options(x.device),
    )
    return out


@triton.jit
def few_gated_kernel(
    x_ptr,  # [rows, NUM_INPUTS]
    weight_ptr,  # [experts, 2 * num_outputs, NUM_INPUTS]
    expert_bias_ptr,  # [experts, 2 * num_outputs], or None
    experts_ptr,  # int32 [rows * PLACES]
    out_ptr,  # [rows * PLACES, num_outputs]
    num_outputs,
    stride_x,
    NUM_INPUTS: tl.constexpr,
    PLACES: tl.constexpr,
    SILU: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes a (tile of outputs, choice of a row)."""
    begin(PDL)
    outputs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    slot = tl.program_id(1)
    columns = tl.arange(0, BLOCK_IN)
    # Outputs past the last one are computed and not stored.
    rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)

    wait(PDL)
    expert = tl.load(experts_ptr + slot).to(tl.int64)
    if expert >= 0:
        gate_rows = weight_ptr + ((expert * 2 * num_outputs + rows) * NUM_INPUTS)[:, None]
        up_rows = gate_rows + num_outputs.to(tl.int64) * NUM_INPUTS
        x_row = x_ptr + (slot // PLACES).to(tl.int64) * stride_x
        gate = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
        up = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
        for step in tl.static_range((NUM_INPUTS + BLOCK_IN - 1) // BLOCK_IN):
            at = step * BLOCK_IN + columns
            inside = at < NUM_INPUTS
            x = tl.load(x_row + at, mask=inside, other=0.0).to(tl.float32)[None, :]
            gate_weights = tl.load(gate_rows + at[None, :], mask=inside[None, :], other=0.0)
            up_weights = tl.load(up_rows + at[None, :], mask=inside[None, :], other=0.0)
            gate += gate_weights.to(tl.float32) * x
            up += up_weights.to(tl.float32) * x
        gate = tl.sum(gate, 1)
        up = tl.sum(up, 1)
        if expert_bias_ptr is not None:
            biases = expert_bias_ptr + expert * 2 * num_outputs + rows
            gate += tl.load(biases).to(tl.float32)
            up += tl.load(biases + num_outputs).to(tl.float32)
        y = gated(gate, up, SILU, CLAMPED)
        out = out_ptr + slot.to(tl.int64) * num_outputs + outputs
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=outputs < num_outputs)


@triton.jit
def few_down_kernel(
    hidden_ptr,  # [rows * PLACES, NUM_INPUTS]
    weight_ptr,  # [experts, num_outputs, NUM_INPUTS]
    expert_bias_ptr,  # [experts, num_outputs], or None
    experts_ptr,  # int32 [rows * PLACES]
    weights_ptr,  # float32 [rows * PLACES]
    out_ptr,  # [rows, num_outputs]
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes (tile of outputs, row): the sum over all experts of the row. With ADD
    the sum is added to the content of out."""
    begin(PDL)
    pairs = tl.arange(0, BLOCK_OUT * BLOCK_PLACES)  # pairs of an output and a place
    outputs = tl.program_id(0) * BLOCK_OUT + pairs // BLOCK_PLACES
    places = pairs % BLOCK_PLACES
    row = tl.program_id(1)
    columns = tl.arange(0, BLOCK_IN)

    wait(PDL)
    slots = row * PLACES + places
    experts = tl.load(experts_ptr + slots, mask=places < PLACES, other=-1).to(tl.int64)
    is_there = (experts >= 0) & (outputs < num_outputs)
    weights = tl.load(weights_ptr + slots, mask=is_there, other=0.0)
    hidden_rows = hidden_ptr + (slots.to(tl.int64) * NUM_INPUTS)[:, None]
    weight_rows = weight_ptr + ((experts * num_outputs + outputs) * NUM_INPUTS)[:, None]
    made = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    out = out_ptr + row.to(tl.int64) * num_outputs + made
    total = tl.zeros([BLOCK_OUT], tl.float32)
    if ADD:
        total += tl.load(out, mask=made < num_outputs, other=0.0).to(tl.float32)
    y = tl.zeros([BLOCK_OUT * BLOCK_PLACES, BLOCK_IN], tl.float32)
    for step in tl.static_range((NUM_INPUTS + BLOCK_IN - 1) // BLOCK_IN):
        at = (step * BLOCK_IN + columns)[None, :]
        mask = is_there[:, None] & (at < NUM_INPUTS)
        w = tl.load(weight_rows + at, mask=mask, other=0.0)
        hidden = tl.load(hidden_rows + at, mask=mask, other=0.0)
        y += w.to(tl.float32) * hidden.to(tl.float32)
    sums = tl.sum(y, 1)
    if expert_bias_ptr is not None:
        biases = expert_bias_ptr + experts * num_outputs + outputs
        sums += tl.load(biases, mask=is_there, other=0.0).to(tl.float32)
    parts = sums * weights
    total += tl.sum(tl.reshape(parts, [BLOCK_OUT, BLOCK_PLACES]), 1)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=made < num_outputs)
