# mypy: allow-untyped-defs
"""Casts to e4m3 and from it, which all kernels use, and products of e4m3.

A GPU has instructions for both. Triton's interpreter casts wrongly: it rounds halves away from
zero, loses carries, and makes 480 of NaN. So in the interpreter the bits are computed by
arithmetic. This file knows no kernel.
"""

import triton
import triton.language as tl

from pdserve.kernels.launching.dot import INTERPRETED

LARGEST = tl.constexpr(448.0)
NAN = tl.constexpr(0x7F)  # the code of NaN; with a sign it is NaN, too
SMALLEST_NORMAL = tl.constexpr(2.0**-6)
INTEGERS = tl.constexpr(2.0**23)  # added to a float32, it rounds to the nearest integer, or even
ROUNDED = tl.constexpr(
    "{ .reg .b16 codes; cvt.rn.satfinite.e4m3x2.f32 codes, $2, $1; cvt.rn.f16x2.e4m3x2 $0, codes; }"
)
PAIRS = tl.constexpr(
    "{ .reg .b32 bytes; .reg .b16 codes, none;"
    " prmt.b32 bytes, $2, $2, 0x2020; mov.b32 {codes, none}, bytes;"
    " cvt.rn.f16x2.e4m3x2 $0, codes;"
    " prmt.b32 bytes, $2, $2, 0x3131; mov.b32 {codes, none}, bytes;"
    " cvt.rn.f16x2.e4m3x2 $1, codes; }"
)


@triton.jit
def to_e4m3(x):
    """Rounds float32 x to the nearest e4m3, and ties to even. Numbers past the largest one become
    it, and NaN stays NaN. It is the same as kernels.e4m3.to_codes, except for the sign of a NaN."""
    x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:
        sign = (x.to(tl.uint32, bitcast=True) >> 31) << 7
        size = tl.abs(x)
        bits = size.to(tl.uint32, bitcast=True)
        # float32 has 20 more bits after the point, and exponents larger by 120
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        small = (size * 512.0 + INTEGERS).to(tl.uint32, bitcast=True) & 0xF
        code = tl.where(size < SMALLEST_NORMAL, small, normal)
        code = tl.where(x != x, NAN, code | sign)
        codes = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        codes = x.to(tl.float8e4nv)
    return codes


@triton.jit
def rounded_to_e4m3(x, dtype: tl.constexpr):
    """Rounds float32 x to e4m3, and returns the numbers in `dtype`: `to_e4m3` and back.

    It is one piece of assembly, because Triton would move codes between threads, and Triton 3.6
    then loses some of them.
    """
    if INTERPRETED:
        numbers = from_e4m3(to_e4m3(x), dtype)
    else:
        numbers = tl.inline_asm_elementwise(
            ROUNDED, "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        ).to(dtype)
    return numbers


@triton.jit
def from_e4m3(codes, dtype: tl.constexpr):
    """Returns the numbers of codes in `dtype`, float32 or 16 bits, which hold them exactly."""
    if INTERPRETED:
        code = codes.to(tl.uint8, bitcast=True).to(tl.uint32)
        size = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * (2.0**120)
        size = tl.where((code & 0x7F) == NAN, float("nan"), size)
        sign = (code & 0x80) << 24
        numbers = (size.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True).to(dtype)
    else:
        numbers = codes.to(dtype)
    return numbers


@triton.jit
def from_pairs(pairs):
    """Returns, in float16, the numbers of the first codes (the low bytes) of int16 `pairs`, and
    those of the second ones."""
    if INTERPRETED:
        first = from_e4m3((pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True), tl.float16)
        second = from_e4m3(
            (pairs >> 8 & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True), tl.float16
        )
    else:
        first, second = tl.inline_asm_elementwise(
            PAIRS, "=&r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return first, second


@triton.jit
def in_dtype(x, dtype: tl.constexpr):
    """Returns x as it is, or the numbers in `dtype` if x has codes."""
    return from_e4m3(x, dtype) if x.dtype == tl.float8e4nv else x


@triton.jit
def dot_e4m3(a, b):
    """Returns `a @ b` in float32, for at most a few hundred terms. Hopper's tensor cores keep about
    14 bits of a sum of products in e4m3, so a caller must add up the results of short dots itself.
    """
    if INTERPRETED:
        result = tl.dot(from_e4m3(a, tl.float32), from_e4m3(b, tl.float32), input_precision="ieee")
    else:
        result = tl.dot(a, b)
    return result


@triton.jit
def computed_here(y):
    """Returns float32 y, computed before the product that follows. Otherwise the compiler would
    postpone what is done with the results of `dot_e4m3`, and hold two results in registers."""
    if not INTERPRETED:
        y = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=False, pack=1
        )
    return y
