# mypy: allow-untyped-defs
"""Which rows of a matrix a tile of a product has: with SiLU * mul, where the matrix holds gate and
up, half of them of gate and half of up, so that one product on tensor cores makes both.

Knows no product. Called by the kernels of fp8/ and int4/.
"""

import triton
import triton.language as tl


@triton.jit
def matrix_rows(tile, num_outputs, SILU: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """int64 `[BLOCK_OUT]`: rows of the matrix; what lies past the last output is another's, to be
    computed and not stored."""
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
    """The outputs of a tile: half as many with SILU."""
    EACH: tl.constexpr = BLOCK_OUT // 2 if SILU else BLOCK_OUT
    return tile * EACH + tl.arange(0, EACH)


@triton.jit
def gate_and_up(y, SILU: tl.constexpr):
    """Sums `[BLOCK_OUT, rows]` as those of gate and of up; without SILU as they are, twice."""
    if SILU:
        pairs = tl.reshape(y, (2, y.shape[0] // 2, y.shape[1]))
        gate, up = tl.split(tl.permute(pairs, (1, 2, 0)))
    else:
        gate, up = y, y
    return gate, up
