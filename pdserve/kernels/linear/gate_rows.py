# mypy: allow-untyped-defs
"""The rows of a matrix that a tile of a product has. With SiLU * mul the matrix holds gate and up.
Then half of the rows are from gate and half from up, so that one product on tensor cores computes
both.

This file knows no product. The kernels of fp8/ and int4/ call it.
"""

import triton
import triton.language as tl


@triton.jit
def matrix_rows(tile, num_outputs, SILU: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """Returns the rows of the matrix, int64 `[BLOCK_OUT]`. Rows past the last output repeat another
    output's row; their results are computed and not stored."""
    here = tl.arange(0, BLOCK_OUT)
    if SILU:
        EACH: tl.constexpr = BLOCK_OUT // 2
        output = tl.minimum(tile * EACH + here % EACH, num_outputs - 1)
        rows = output + tl.where(here >= EACH, num_outputs, 0)
    else:
        rows = tl.minimum(tile * BLOCK_OUT + here, num_outputs - 1)
    return rows.to(tl.int64)


@triton.jit
def outputs_of(tile, SILU: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """Returns the outputs of a tile. With SILU there are half as many."""
    EACH: tl.constexpr = BLOCK_OUT // 2 if SILU else BLOCK_OUT
    return tile * EACH + tl.arange(0, EACH)


@triton.jit
def gate_and_up(y, SILU: tl.constexpr):
    """Splits sums `[BLOCK_OUT, rows]` into those of gate and of up. Without SILU it returns them
    twice."""
    if SILU:
        pairs = tl.reshape(y, (2, y.shape[0] // 2, y.shape[1]))
        gate, up = tl.split(tl.permute(pairs, (1, 2, 0)))
    else:
        gate, up = y, y
    return gate, up
