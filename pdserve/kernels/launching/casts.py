# mypy: allow-untyped-defs
"""Numbers in e4m3 inside kernels: rounding to them, reading them, and their product.

On a GPU each is one of Triton's own operations. Triton's interpreter cuts where a GPU rounds, and
takes the NaN of e4m3 for 480, so there the bits are computed here. Knows no kernel.
"""

import triton
import triton.language as tl

from pdserve.kernels.launching.dot import INTERPRETED

LARGEST = tl.constexpr(448.0)
NAN_BITS = tl.constexpr(0x7F)
# float32 below this are subnormal in e4m3: multiples of 2**-9
LEAST_NORMAL = tl.constexpr(2.0**-6)
# float32 from 2**14 on are multiples of 2**-9 apart: adding it rounds as e4m3's subnormals do
ROUNDER = tl.constexpr(2.0**14)


@triton.jit
def to_e4m3(x):
    """Round float32 to the nearest of e4m3; what is past the largest number becomes it, and NaN
    stays NaN. The same as `pdserve.kernels.e4m3.to_codes`."""
    x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + ((magnitude >> 20) & 1) + 0x7FFFF) >> 20) - (120 << 3)
        small = tl.abs(x) + ROUNDER
        subnormal = small.to(tl.int32, bitcast=True) & 0xFF
        code = tl.where(magnitude < (121 << 23), subnormal, normal)
        code = tl.where(magnitude > 0x7F800000, NAN_BITS, code)
        result = (code | ((bits >> 24) & 0x80)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        result = x.to(tl.float8e4nv)
    return result


@triton.jit
def from_e4m3(codes):
    """The numbers as float32, exactly."""
    if INTERPRETED:
        bits = codes.to(tl.uint8, bitcast=True).to(tl.int32)
        magnitude = bits & 0x7F
        normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        number = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
        number = tl.where(magnitude == NAN_BITS, float("nan"), number)
        result = tl.where(bits > 0x7F, -number, number)
    else:
        result = codes.to(tl.float32)
    return result


@triton.jit
def dot_e4m3(a, b):
    """`a @ b` in float32, of at most a few hundred terms: Hopper's tensor cores keep some 14 bits
    of a sum of products in e4m3, so a caller adds the results of short dots up by itself."""
    if INTERPRETED:
        result = tl.dot(from_e4m3(a), from_e4m3(b), input_precision="ieee")
    else:
        result = tl.dot(a, b)
    return result
