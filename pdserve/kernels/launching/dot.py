# mypy: allow-untyped-defs
"""The product that all kernels use, which is `dot()`."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, acc):
    """Returns `a @ b + acc`, accumulated in float32. It is exact for float32 inputs; the default on
    a GPU would be TF32."""
    if INTERPRETED:
        # The interpreter holds bf16 as raw 16-bit patterns and would multiply the patterns.
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif a.dtype == tl.float32:
        result = tl.dot(a, b, acc, input_precision="ieee")
    else:
        result = tl.dot(a, b, acc)
    return result
