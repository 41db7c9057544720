# mypy: allow-untyped-defs
"""Parts that the attention kernels share: tile sizes, loads of paged KV rows, the online softmax.

They know the layout of one layer's KV, `[num_blocks, kv_heads, 2, block_size, head_dim]`, and
nothing of grids or sequences. decode.py and prefill.py call them. The kernels for latents, whose
rows have one plane, use the offsets alone.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.launching.codes import from_pairs, in_dtype
from pdserve.kernels.launching.dot import dot
from pdserve.kernels.launching.launch import next_power_of_2

LOG2_E = 1.4426950408889634
EXP_IN_LOG2 = tl.constexpr(LOG2_E)


@dataclass(frozen=True)
class AttentionTiles:
    """Constants of one attention launch.

    block_m: query rows of a program.
    block_n: KV rows of a step.
    block_d: a power of two >= head_dim.
    """

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


def float32_tiles(block_m: int, head_dim: int) -> AttentionTiles:
    """Returns tiles with small steps and many warps. Exact float32 cannot use tensor cores, so all
    operands and sums live in registers."""
    block_d = next_power_of_2(head_dim)
    num_warps = min(max(block_m * block_d // 512, 4), 16)
    return AttentionTiles(block_m, 32 if block_d <= 64 else 16, block_d, num_warps, 2)


def unscaled_cap(spec: AttentionSpec) -> float:
    """The soft cap in the scale of unscaled scores; 0 if there is none."""
    return spec.soft_cap / spec.scale if spec.soft_cap is not None else 0.0


@triton.jit
def load_rows(base, rows, valid, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Loads [len(rows), BLOCK_D] at int64 element offsets `rows`. Returns zeros where `valid` is
    false and in columns from HEAD_DIM on."""
    dims = tl.arange(0, BLOCK_D)
    mask = valid[:, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (dims < HEAD_DIM)[None, :]
    return tl.load(base + rows[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def load_pairs(base, rows, valid, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Loads rows of codes as `load_rows` does, but as int16 [len(rows), BLOCK_D / 2]: two
    neighbouring codes each."""
    pairs = tl.arange(0, BLOCK_D // 2)
    mask = valid[:, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (pairs < HEAD_DIM // 2)[None, :]
    base = base.to(tl.pointer_type(tl.int16))
    return tl.load(base + (rows >> 1)[:, None] + pairs[None, :], mask=mask, other=0)


@triton.jit
def in_halves(q):
    """Returns rows q in float16, divided by a power of two of their own, and these powers in
    float32. So the largest number of a row is between 1 and 2, and nothing overflows."""
    wide = q.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(largest >> 23, 1), 253)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (wide * inverse[:, None]).to(tl.float16), power


@triton.jit
def in_even_and_odd(x):
    """Splits [rows, D] into the even and the odd columns."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def kv_rows(table, positions, valid, block_shift, stride_block, HEAD_DIM: tl.constexpr):
    """Returns the int64 offsets of the K rows at absolute `positions` from the base of their KV
    head. block_size is 1 << block_shift."""
    blocks = tl.load(table + (positions >> block_shift), mask=valid, other=0).to(tl.int64)
    offsets = positions & ((1 << block_shift) - 1)
    return blocks * stride_block + offsets * HEAD_DIM


@triton.jit
def tanh(x):
    """Computes tanh by the exp of a number <= 0, so that nothing overflows."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def begin_with_sinks(sinks, valid, scale_log2):
    """Returns (row_max, row_sum) [M]. Rows where `valid` is true have seen the sinks at these
    pointers; the other rows have seen nothing. A sink is a scaled score whose value is zero."""
    sink = tl.load(sinks, mask=valid, other=0.0) * EXP_IN_LOG2 / scale_log2
    return tl.where(valid, sink, float("-inf")), tl.where(valid, 1.0, 0.0)


@triton.jit
def attend(
    acc,
    row_max,
    row_sum,
    q,
    power,
    kv_matrix,
    first_row,
    kv_head,
    table,
    start,
    end,
    row_positions,
    num_keys,
    scale_log2,
    cap,
    window,
    block_shift,
    stride_block,
    stride_plane,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Online softmax of rows q over the keys start..end, BLOCK_N per step.

    K and V may be codes in e4m3. They are multiplied as numbers in q's dtype, which holds them
    exactly. A GPU casts codes to float16 many times as fast as to bfloat16, so q is `in_halves`.

    q, acc: tuples of [M, BLOCK_D], or with PAIRS of their even and their odd columns.
    power: float32 [M], the numbers that rows of q were divided by; None if they were not.
    acc, row_max [M] (of unscaled scores), row_sum [M]: the result of earlier keys.
    PAIRS: codes are loaded two by two. Tensor cores take V by columns, which could only be loaded
        byte by byte otherwise.
    start: a multiple of BLOCK_N.
    scale_log2: above 0.
    MASKED: some keys are at or after num_keys or after a row's position; without it every row sees
        every key. If WINDOW is not set, a row must see a key in its first step: otherwise its
        row_max would stay -inf, and -inf - -inf is NaN.
    CAPPED: scores s become cap * tanh(s / cap), where cap is in the scale of unscaled scores.
    WINDOW: (with MASKED) a row sees `window` keys up to its position.
    kv_matrix: None to load K and V by pointers from `kv_head`, or a descriptor of the layer as
        [rows, head_dim] in tiles [BLOCK_N, BLOCK_D] to load them by TMA. Then first_row is the
        first row of the KV head, and a block holds whole tiles. No key may be at or after num_keys:
        its V might be NaN, which TMA cannot mask.
    """
    dtype: tl.constexpr = q[0].dtype
    for block_start in range(start, end, BLOCK_N):
        positions = block_start + tl.arange(0, BLOCK_N)
        valid = positions < num_keys
        if WINDOW:  # keys that no row sees may hold anything
            valid = valid & (positions > tl.min(row_positions, 0) - window)
        scores = tl.zeros([row_max.shape[0], BLOCK_N], tl.float32)
        if kv_matrix is None:
            rows = kv_rows(table, positions, valid, block_shift, stride_block, HEAD_DIM)
            if PAIRS:
                k = from_pairs(load_pairs(kv_head, rows, valid, HEAD_DIM, BLOCK_D))
                scores = dot(q[1], tl.trans(k[1]), scores)
            else:
                k = (in_dtype(load_rows(kv_head, rows, valid, HEAD_DIM, BLOCK_D), dtype),)
        else:
            block = tl.load(table + (block_start >> block_shift))
            row = first_row + block * (stride_block // HEAD_DIM).to(tl.int32)
            row += block_start & ((1 << block_shift) - 1)
            k = (in_dtype(kv_matrix.load([row, 0]), dtype),)
        scores = dot(q[0], tl.trans(k[0]), scores)
        if power is not None:
            scores *= power[:, None]
        if CAPPED:
            scores = cap * tanh(scores / cap)
        if MASKED:
            visible = valid[None, :] & (positions[None, :] <= row_positions[:, None])
            if WINDOW:
                visible = visible & (positions[None, :] > row_positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        base = new_max
        if WINDOW:  # for a row that has not seen a key yet, any number will do
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        if dtype == tl.float32:
            # Scaled after the subtraction: to scale large scores first would round those that
            # matter most.
            probs = tl.exp2((scores - base[:, None]) * scale_log2)
        else:
            # one multiply-add
            probs = tl.exp2(scores * scale_log2 - (base * scale_log2)[:, None])
        keep = tl.exp2((row_max - base) * scale_log2)
        weights = probs.to(dtype)
        if PAIRS:
            v = from_pairs(load_pairs(kv_head + stride_plane, rows, valid, HEAD_DIM, BLOCK_D))
            acc = (
                dot(weights, v[0], acc[0] * keep[:, None]),
                dot(weights, v[1], acc[1] * keep[:, None]),
            )
        elif kv_matrix is None:
            v = in_dtype(load_rows(kv_head + stride_plane, rows, valid, HEAD_DIM, BLOCK_D), dtype)
            acc = (dot(weights, v, acc[0] * keep[:, None]),)
        else:
            v = in_dtype(kv_matrix.load([row + (1 << block_shift), 0]), dtype)
            acc = (dot(weights, v, acc[0] * keep[:, None]),)
        row_sum = row_sum * keep + tl.sum(probs, 1)
        row_max = new_max
    return acc, row_max, row_sum
