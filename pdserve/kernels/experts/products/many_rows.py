# mypy: allow-untyped-defs
"""Triton kernels of experts for many rows. They multiply tiles of rows that go to one expert on
tensor cores; then the results of each row's experts are added up.

A program finds its expert and its rows from the lists of the choice. Tiles are counted expert by
expert, so nothing is sorted, and no more programs start than there can be tiles. Programs of the
same tile of rows run together, because rows are gathered and weights are not. The result of the
first product is in the order of tiles, so that the second product reads it without gathering. In
e4m3 it is in the order of slots, so that no padding is rounded between the products. triton_ops.py
and e4m3.py call this file.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pdserve.kernels.experts.ops import Choice, Experts
from pdserve.kernels.experts.products.tiles import Tile, tile_for
from pdserve.kernels.launching.codes import computed_here, dot_e4m3
from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.dot import dot
from pdserve.kernels.launching.launch import cdiv, is_hopper, launch, next_power_of_2
from pdserve.kernels.linear.fp8.quantise import GROUP
from pdserve.kernels.linear.matrix import Matrix
from pdserve.kernels.norm.elementwise import gated

COMBINE_BLOCK = 1024
COMBINE_WARPS = 4
TMA_BYTES = 16  # TMA reads rows whose bytes are a multiple of this


def launch_many_rows(
    x: Tensor,
    choice: Choice,
    experts: Experts,
    onto: Tensor | None,
    tiles: tuple[Tile, Tile] | None = None,
) -> Tensor:
    """Runs `ExpertOps.mix`. tiles: those of both products, instead of tile_for()'s choice."""
    lists = choice.lists
    assert lists is not None, "the choice comes from another implementation"
    num_rows, places = choice.experts.shape
    num_slots = num_rows * places
    num_experts, width, size = experts.down.data.shape
    if tiles is None:
        share, itemsize = num_slots / (lists.num_everywhere or num_experts), x.element_size()
        wide = tile_for(share, width, True, itemsize)
        tiles = wide, tile_for(share, size, False, itemsize)
    num_made = most_tiles(choice, tiles[0]) * tiles[0].rows
    hidden = torch.empty(num_made, size, dtype=x.dtype, device=x.device)
    made = torch.empty(num_slots, width, dtype=x.dtype, device=x.device)
    activation = experts.activation
    launch_product(
        x,
        None,
        experts.gate_up,
        choice,
        hidden,
        tiles[0],
        activation == "silu",
        activation == "clamped_swiglu",
    )
    launch_product(hidden, None, experts.down, choice, made, tiles[1])
    return launch_combine(made, choice, x, onto)


def most_tiles(choice: Choice, tile: Tile) -> int:
    """Upper bound of the number of tiles for the lists of a choice."""
    assert choice.lists is not None
    num_slots = choice.experts.numel()
    return num_slots // tile.rows + min(len(choice.lists.counts), num_slots)


def launch_combine(made: Tensor, choice: Choice, x: Tensor, onto: Tensor | None) -> Tensor:
    """Adds up the weighted results `[slots, hidden]` of each row's experts. The sum is shaped like
    x, or is added to onto."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if onto is None else onto
    num_rows, places = choice.experts.shape
    width = made.shape[1]
    launch(
        combine_kernel,
        (num_rows, cdiv(width, COMBINE_BLOCK)),
        (made, choice.experts, choice.weights, out),
        (width,),
        PLACES=places,
        ADD=onto is not None,
        BLOCK=COMBINE_BLOCK,
        num_warps=COMBINE_WARPS,
        **launch_options(x.device),
    )
    return out


def launch_product(
    x: Tensor,
    x_scales: Tensor | None,
    m: Matrix,
    choice: Choice,
    out: Tensor,
    tile: Tile,
    silu: bool | None = None,
    clamped: bool = False,
) -> None:
    """Launches one product.

    x_scales: the scales of x in e4m3. Then out, and the x of a second product, have one row per
        slot.
    silu: given for a product of gate and up: true if the gate's activation is silu.
    clamped: true if the activation is clamped_swiglu.
    """
    lists = choice.lists
    assert lists is not None
    is_gated = silu is not None
    num_outputs = out.shape[1]
    num_experts, num_rows = lists.slots.shape
    is_wide = not is_gated and x_scales is not None and tile.outputs > GROUP.value
    block_out = tile.outputs // 2 if is_gated or is_wide else tile.outputs
    weight = m.data
    x_steps = weight_steps = None
    if tile.has_tma and _can_use_tma(weight):
        flat = weight.flatten(0, 1)
        weight_steps = TensorDescriptor.from_tensor(flat, [block_out, tile.inputs])
        if not is_gated and x_scales is None:
            x_steps = TensorDescriptor.from_tensor(x, [tile.rows, tile.inputs])
    stride_x_scales = stride_scales = 0
    if x_scales is not None:
        assert m.scales is not None and m.group[0] in (1, GROUP.value)
        assert tile.inputs == GROUP.value and block_out <= GROUP.value
        stride_x_scales, stride_scales = x_scales.stride(0), m.scales.stride(1)
    launch(
        expert_product_kernel,
        (cdiv(num_outputs, tile.outputs if is_wide else block_out), most_tiles(choice, tile)),
        (
            x,
            x_scales,
            weight,
            m.scales,
            m.bias,
            x_steps,
            weight_steps,
            lists.counts,
            lists.slots,
            out,
        ),
        (num_rows, num_outputs, x.shape[1], x.stride(0), stride_x_scales, stride_scales),
        NUM_EXPERTS=num_experts,
        BLOCK_EXPERTS=next_power_of_2(num_experts),
        PLACES=choice.experts.shape[1],
        GATED=is_gated,
        SILU=bool(silu),
        CLAMPED=clamped,
        WIDE=is_wide,
        GROUP_ROWS=m.group[0],
        GROUPED=m.group[1] != 0,
        BLOCK_ROWS=tile.rows,
        BLOCK_OUT=block_out,
        BLOCK_IN=tile.inputs,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **launch_options(x.device),
    )


def _can_use_tma(weight: Tensor) -> bool:
    """True if the device has TMA and rows have a size that it reads."""
    row_bytes = weight.shape[-1] * weight.element_size()
    return is_hopper(weight.device) and row_bytes % TMA_BYTES == 0


@triton.jit
def rows_of_tile(
    tile,
    counts_ptr,
    slots_ptr,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Returns the expert of a tile (NUM_EXPERTS or more past the last one), which of BLOCK_ROWS are
    rows, and their slots, int64."""
    every = tl.arange(0, BLOCK_EXPERTS)
    counts = tl.load(counts_ptr + every, mask=every < NUM_EXPERTS, other=0)
    tiles = tl.cdiv(counts, BLOCK_ROWS)
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    is_ours = every == expert
    first = (tile - tl.sum(tl.where(is_ours, ends - tiles, 0), 0)) * BLOCK_ROWS
    count = tl.minimum(tl.sum(tl.where(is_ours, counts, 0), 0), num_rows)  # see places.py
    here = tl.arange(0, BLOCK_ROWS)
    is_row = first + here < count
    our_slots = slots_ptr + expert.to(tl.int64) * num_rows
    slots = tl.load(our_slots + first + here, mask=is_row, other=0).to(tl.int64)
    return expert, is_row, slots


@triton.jit
def add_product(y, x, w, x_scales, scales, GROUPED: tl.constexpr, GROUP_ROWS: tl.constexpr):
    """Returns `y + x @ w.T`. In e4m3, GROUPED means that this step has scales of its own: one for
    each row of x, and one for all rows of w. If GROUP_ROWS is 1, each row of w has one."""
    if x.dtype == tl.float8e4nv:
        sums = dot_e4m3(x, tl.trans(w))
        if GROUPED:
            if GROUP_ROWS == 1:
                sums *= x_scales[:, None] * scales[None, :]
            else:
                sums *= (x_scales * scales)[:, None]
        y = computed_here(y + sums)
    else:
        y = dot(x, tl.trans(w), y)
    return y


@triton.jit(do_not_specialize=["num_rows"])
def expert_product_kernel(
    x_ptr,  # with GATED [rows, num_inputs]; else [tiles * BLOCK_ROWS or slots, num_inputs]
    x_scales_ptr,  # for x in e4m3: [rows or slots, num_inputs / 128 or 1]; else None
    weight_ptr,  # [NUM_EXPERTS, num_outputs or 2 * num_outputs, num_inputs]
    scales_ptr,  # for weight in e4m3: [NUM_EXPERTS, / GROUP_ROWS, num_inputs / 128 or 1]; else None
    expert_bias_ptr,  # for weights not in e4m3: one number per row of them, or None
    x_steps,  # x for TMA in steps of [BLOCK_ROWS, BLOCK_IN], or None: read by pointers
    weight_steps,  # all rows of weight in steps of [BLOCK_OUT, BLOCK_IN], or None
    counts_ptr,  # int32 [NUM_EXPERTS]
    slots_ptr,  # int32 [NUM_EXPERTS, num_rows]
    out_ptr,  # with GATED [tiles * BLOCK_ROWS or slots, num_outputs]; else [slots, num_outputs]
    num_rows,
    num_outputs,
    num_inputs,
    stride_x,
    stride_x_scales,
    stride_scales,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    PLACES: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    CLAMPED: tl.constexpr,
    WIDE: tl.constexpr,  # without GATED: a tile of outputs is two products of BLOCK_OUT
    GROUP_ROWS: tl.constexpr,  # a multiple of BLOCK_OUT, or 1
    GROUPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes a (tile of outputs, tile of an expert's rows)."""
    begin(PDL)
    tile = tl.program_id(1)

    wait(PDL)
    expert, is_row, slots = rows_of_tile(
        tile, counts_ptr, slots_ptr, num_rows, NUM_EXPERTS, BLOCK_EXPERTS, BLOCK_ROWS
    )
    if expert < NUM_EXPERTS:
        in_tiles = tile.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        if x_scales_ptr is not None:
            in_tiles = slots
        first_out = tl.program_id(0) * BLOCK_OUT * (2 if WIDE else 1)
        outputs = first_out + tl.arange(0, BLOCK_OUT)
        columns = tl.arange(0, BLOCK_IN)
        # Outputs past the last one are computed and not stored.
        weight_rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
        first_step = expert * num_outputs * (2 if GATED else 1) + first_out
        size = num_outputs.to(tl.int64) * num_inputs
        start_row = weight_ptr + expert * size * (2 if GATED else 1)
        gate_rows = start_row + (weight_rows * num_inputs)[:, None] + columns[None, :]
        up_rows = gate_rows + size
        second_step = first_step + (BLOCK_OUT if WIDE else num_outputs)
        second_rows = weight_rows + num_outputs
        if WIDE:
            second_rows = tl.minimum(outputs + BLOCK_OUT, num_outputs - 1).to(tl.int64)
            up_rows = start_row + (second_rows * num_inputs)[:, None] + columns[None, :]
        x_index = slots // PLACES if GATED else in_tiles
        x_rows = x_ptr + (x_index * stride_x)[:, None] + columns[None, :]
        if x_scales_ptr is not None:
            x_scales_at = x_scales_ptr + x_index * stride_x_scales
            of_expert = tl.cdiv(num_outputs * (2 if GATED else 1), GROUP_ROWS).to(tl.int64)
            scales_at = scales_ptr + expert * of_expert * stride_scales
            up_scales_at = scales_at
            if GROUP_ROWS == 1:
                scales_at += weight_rows * stride_scales
                up_scales_at += second_rows * stride_scales
            else:
                second_out = first_out + num_outputs
                if WIDE:
                    second_out = tl.minimum(first_out + BLOCK_OUT, num_outputs - 1)
                scales_at += first_out // GROUP_ROWS * stride_scales
                up_scales_at += second_out // GROUP_ROWS * stride_scales
        y = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
        up = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
        for start in tl.range(0, num_inputs, BLOCK_IN, num_stages=STAGES):
            inside = (start + columns < num_inputs)[None, :]
            x_scales, scales, up_scales = None, None, None
            if GROUPED:  # loaded before the products, because the kernel waits for these
                x_scales = tl.load(x_scales_at + start // BLOCK_IN, mask=is_row, other=0.0)
                scales = tl.load(scales_at + start // BLOCK_IN)
                if GATED or WIDE:
                    up_scales = tl.load(up_scales_at + start // BLOCK_IN)
            if x_steps is not None:
                x = x_steps.load([tile * BLOCK_ROWS, start])
            else:
                x = tl.load(x_rows + start, mask=inside & is_row[:, None], other=0.0)
            if weight_steps is not None:
                w = weight_steps.load([first_step, start])
                y = add_product(y, x, w, x_scales, scales, GROUPED, GROUP_ROWS)
                if GATED or WIDE:
                    w = weight_steps.load([second_step, start])
                    up = add_product(up, x, w, x_scales, up_scales, GROUPED, GROUP_ROWS)
            else:
                w = tl.load(gate_rows + start, mask=inside, other=0.0)
                y = add_product(y, x, w, x_scales, scales, GROUPED, GROUP_ROWS)
                if GATED or WIDE:
                    w = tl.load(up_rows + start, mask=inside, other=0.0)
                    up = add_product(up, x, w, x_scales, up_scales, GROUPED, GROUP_ROWS)
        if x_scales_ptr is not None and not GROUPED:
            x_scales = tl.load(x_scales_at, mask=is_row, other=0.0)[:, None]
            y = y * tl.load(scales_at)[None, :] * x_scales
            if GATED or WIDE:
                up = up * tl.load(up_scales_at)[None, :] * x_scales
        if expert_bias_ptr is not None:
            biases = expert_bias_ptr + expert * num_outputs * (2 if GATED else 1) + weight_rows
            y += tl.load(biases).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(biases + num_outputs).to(tl.float32)[None, :]
        if GATED:
            y = gated(y, up, SILU, CLAMPED)
        out_rows = in_tiles if GATED else slots
        out = out_ptr + (out_rows * num_outputs)[:, None] + outputs[None, :]
        mask = is_row[:, None] & (outputs < num_outputs)[None, :]
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=mask)
        if WIDE:
            mask = is_row[:, None] & (outputs + BLOCK_OUT < num_outputs)[None, :]
            tl.store(out + BLOCK_OUT, up.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def combine_kernel(
    made_ptr,  # [rows * PLACES, width]
    experts_ptr,  # int32 [rows * PLACES]
    weights_ptr,  # float32 [rows * PLACES]
    out_ptr,  # [rows, width]
    width,
    PLACES: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes a (row, tile of columns). With ADD the sum is added to the content of
    out."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width

    wait(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(PLACES):
        slot = row * PLACES + k
        is_made = tl.load(experts_ptr + slot) >= 0
        weight = tl.load(weights_ptr + slot)
        part = tl.load(made_ptr + slot * width + columns, mask=inside & is_made, other=0.0)
        total += part.to(tl.float32) * weight
    out = out_ptr + row * width + columns
    if ADD:
        total += tl.load(out, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)
