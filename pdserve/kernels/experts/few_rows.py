# mypy: allow-untyped-defs
"""Triton kernels of experts for few rows, bound by the bytes of the weights: each choice of a row
reads its expert's matrices through registers.

Called through triton_ops.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.experts.ops import Choice, Experts
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2
from pdserve.kernels.norm.elementwise import gated

MAX_ROWS = 4
TILE = 4096  # weights of a step of one program
MAX_IN = 1024


def launch_few_rows(x: Tensor, choice: Choice, experts: Experts, onto: Tensor | None) -> Tensor:
    """`ExpertOps.mix`."""
    num_rows, top_k = choice.experts.shape
    size = experts.down.data.shape[2]
    hidden = torch.empty(num_rows * top_k, size, dtype=x.dtype, device=x.device)
    block_out, block_in = _tile(x.shape[1], of_both=True)
    launch(
        few_gated_kernel,
        (cdiv(size, block_out), num_rows * top_k),
        (x, experts.gate_up.data, choice.experts, hidden),
        (size, x.shape[1], x.stride(0)),
        TOP_K=top_k,
        SILU=experts.activation == "silu",
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        num_warps=4,
        **launch_options(x.device),
    )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if onto is None else onto
    block_out, block_in = _tile(size, of_both=False)
    launch(
        few_down_kernel,
        (cdiv(x.shape[1], block_out), num_rows),
        (hidden, experts.down.data, choice.experts, choice.weights, out),
        (x.shape[1], size),
        TOP_K=top_k,
        ADD=onto is not None,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        num_warps=4,
        **launch_options(x.device),
    )
    return out


def _tile(num_inputs: int, of_both: bool) -> tuple[int, int]:
    """Outputs and inputs of a step. of_both: gate and up share it."""
    block_in = min(next_power_of_2(num_inputs), MAX_IN)
    return max(TILE // block_in // (2 if of_both else 1), 1), block_in


@triton.jit
def few_gated_kernel(
    x_ptr,  # [rows, num_inputs]
    weight_ptr,  # [experts, 2 * num_outputs, num_inputs]
    experts_ptr,  # int32 [rows * TOP_K]
    out_ptr,  # [rows * TOP_K, num_outputs]
    num_outputs,
    num_inputs,
    stride_x,
    TOP_K: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of outputs, choice of a row)."""
    begin(PDL)
    outputs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    slot = tl.program_id(1)
    columns = tl.arange(0, BLOCK_IN)
    # what lies past the last is computed and not stored
    rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)

    wait(PDL)
    expert = tl.load(experts_ptr + slot).to(tl.int64)
    if expert >= 0:
        gate_rows = weight_ptr + ((expert * 2 * num_outputs + rows) * num_inputs)[:, None]
        up_rows = gate_rows + num_outputs.to(tl.int64) * num_inputs
        x_row = x_ptr + (slot // TOP_K).to(tl.int64) * stride_x
        gate = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
        up = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
        for start in range(0, num_inputs, BLOCK_IN):
            at = start + columns
            inside = at < num_inputs
            x = tl.load(x_row + at, mask=inside, other=0.0).to(tl.float32)[None, :]
            gate_weights = tl.load(gate_rows + at[None, :], mask=inside[None, :], other=0.0)
            up_weights = tl.load(up_rows + at[None, :], mask=inside[None, :], other=0.0)
            gate += gate_weights.to(tl.float32) * x
            up += up_weights.to(tl.float32) * x
        y = gated(tl.sum(gate, 1), tl.sum(up, 1), SILU)
        out = out_ptr + slot.to(tl.int64) * num_outputs + outputs
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=outputs < num_outputs)


@triton.jit
def few_down_kernel(
    hidden_ptr,  # [rows * TOP_K, num_inputs]
    weight_ptr,  # [experts, num_outputs, num_inputs]
    experts_ptr,  # int32 [rows * TOP_K]
    weights_ptr,  # float32 [rows * TOP_K]
    out_ptr,  # [rows, num_outputs]
    num_outputs,
    num_inputs,
    TOP_K: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of outputs, row): all that the row's experts make of them. ADD: to what stands
    in out."""
    begin(PDL)
    outputs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.program_id(1)
    columns = tl.arange(0, BLOCK_IN)
    rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)

    wait(PDL)
    total = tl.zeros([BLOCK_OUT], tl.float32)
    out = out_ptr + row.to(tl.int64) * num_outputs + outputs
    if ADD:  # loaded after the sums, it would keep every program waiting for memory once more
        before = tl.load(out, mask=outputs < num_outputs, other=0.0).to(tl.float32)
    for k in range(TOP_K):
        slot = row * TOP_K + k
        expert = tl.load(experts_ptr + slot).to(tl.int64)
        if expert >= 0:
            weight = tl.load(weights_ptr + slot)
            weight_rows = weight_ptr + ((expert * num_outputs + rows) * num_inputs)[:, None]
            hidden_row = hidden_ptr + slot.to(tl.int64) * num_inputs
            y = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
            for start in range(0, num_inputs, BLOCK_IN):
                at = start + columns
                inside = at < num_inputs
                x = tl.load(hidden_row + at, mask=inside, other=0.0).to(tl.float32)[None, :]
                w = tl.load(weight_rows + at[None, :], mask=inside[None, :], other=0.0)
                y += w.to(tl.float32) * x
            total += tl.sum(y, 1) * weight
    if ADD:
        total += before
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=outputs < num_outputs)
