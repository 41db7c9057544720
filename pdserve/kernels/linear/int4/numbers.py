# mypy: allow-untyped-defs
"""Unpacks 4-bit numbers from their words, in Triton kernels. schemes/int4.py says how words hold
them.

A number is put into the lowest bits of a mantissa whose exponent makes them whole numbers. In bf16
the bits 0x4300 + n are 128 + n; in fp16 the bits 0x6400 + n are 1024 + n. One register holds two of
them. The zero point is added to the same power of two, and then subtracted exactly. This file knows
no product.
"""

import triton
import triton.language as tl

from pdserve.kernels.launching.dot import INTERPRETED

BLOCK = tl.constexpr(128)  # columns that are packed together
LANES = tl.constexpr(16)  # words that hold them

_TAKE = """
{{
.reg .b32 low, high, moved;
prmt.b32 low, $8, $9, 0x5410;
prmt.b32 high, $8, $9, 0x7632;
{steps}
}}
"""
_STEP = """
shr.u32 moved, {half}, {shift};
lop3.b32 moved, moved, 0x000f000f, {magic}, 0xea;
sub.rn.{kind} ${number}, moved, ${zeros};
"""
_SCALED_STEP = (
    _STEP
    + """
mul.rn.{kind} ${number}, ${number}, ${scales};
"""
)


def _assembly(kind: str, magic: str, step: str = _STEP) -> str:
    """Makes PTX for two neighbouring words.

    - $0 to $7: each number of both words, in one register.
    - $8 and $9: the words.
    - $10 to $13: the zero point of every two numbers.
    - $14 to $17: the scale of every two numbers.
    """
    steps = (
        step.format(
            half="low" if number < 4 else "high",
            shift=4 * (number % 4),
            magic=magic,
            kind=kind,
            number=number,
            zeros=10 + number // 2,
            scales=14 + number // 2,
        )
        for number in range(8)
    )
    return _TAKE.format(steps="".join(steps))


IN_BF16 = tl.constexpr(_assembly("bf16x2", "0x43004300"))
IN_FP16 = tl.constexpr(_assembly("f16x2", "0x64006400"))
SCALED_BF16 = tl.constexpr(_assembly("bf16x2", "0x43004300", _SCALED_STEP))
SCALED_FP16 = tl.constexpr(_assembly("f16x2", "0x64006400", _SCALED_STEP))
REGISTERS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 6))
SCALED_REGISTERS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 10))
BF16 = tl.constexpr((tl.bfloat16,) * 8)
FP16 = tl.constexpr((tl.float16,) * 8)


@triton.jit
def raised(zeros, NUMBER: tl.constexpr, dtype: tl.constexpr):
    """Returns zero point NUMBER of the four in each of int32 `zeros` `[outputs]`, in the form that
    `numbers` takes."""
    zero = (zeros >> (8 * NUMBER)) & 0xFF
    if INTERPRETED:
        made = zero.to(tl.float32)[:, None]
    elif dtype == tl.bfloat16:
        made = (zero | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]
    else:
        made = (zero | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)[:, None]
    return made


@triton.jit
def numbers(words, z0, z1, z2, z3, dtype: tl.constexpr):
    """Returns the eight numbers of int32 words `[outputs, 16]`, less their zero points. Each is a
    tensor of that shape in dtype (bf16 or fp16); in the interpreter it is float32.

    z0 to z3: the zero point of every two numbers, from `raised`.
    """
    if INTERPRETED:
        made = (
            (words & 15).to(tl.float32) - z0,
            (words >> 4 & 15).to(tl.float32) - z0,
            (words >> 8 & 15).to(tl.float32) - z1,
            (words >> 12 & 15).to(tl.float32) - z1,
            (words >> 16 & 15).to(tl.float32) - z2,
            (words >> 20 & 15).to(tl.float32) - z2,
            (words >> 24 & 15).to(tl.float32) - z3,
            (words >> 28 & 15).to(tl.float32) - z3,
        )
    elif dtype == tl.bfloat16:
        made = tl.inline_asm_elementwise(
            IN_BF16, REGISTERS, [words, z0, z1, z2, z3], BF16, is_pure=True, pack=2
        )
    else:
        made = tl.inline_asm_elementwise(
            IN_FP16, REGISTERS, [words, z0, z1, z2, z3], FP16, is_pure=True, pack=2
        )
    return made


@triton.jit
def weights_of(words, z0, z1, z2, z3, s0, s1, s2, s3, dtype: tl.constexpr):
    """Returns `numbers` times their scales, which are in dtype `[outputs, 1]`, rounded to dtype."""
    if INTERPRETED:
        n = numbers(words, z0, z1, z2, z3, dtype)
        made = (
            n[0] * s0.to(tl.float32),
            n[1] * s0.to(tl.float32),
            n[2] * s1.to(tl.float32),
            n[3] * s1.to(tl.float32),
            n[4] * s2.to(tl.float32),
            n[5] * s2.to(tl.float32),
            n[6] * s3.to(tl.float32),
            n[7] * s3.to(tl.float32),
        )
    elif dtype == tl.bfloat16:
        made = tl.inline_asm_elementwise(
            SCALED_BF16,
            SCALED_REGISTERS,
            [words, z0, z1, z2, z3, s0, s1, s2, s3],
            BF16,
            is_pure=True,
            pack=2,
        )
    else:
        made = tl.inline_asm_elementwise(
            SCALED_FP16,
            SCALED_REGISTERS,
            [words, z0, z1, z2, z3, s0, s1, s2, s3],
            FP16,
            is_pure=True,
            pack=2,
        )
    return made


@triton.jit
def joined(n, FIRST: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns `[outputs, COLUMNS]`: COLUMNS / 16 of `numbers` side by side, from number FIRST on.
    It happens in registers: for an operand of tensor cores, a thread holds the same words of each.
    """
    if COLUMNS == 128:
        even = tl.join(tl.join(n[0], n[4]), tl.join(n[2], n[6]))
        odd = tl.join(tl.join(n[1], n[5]), tl.join(n[3], n[7]))
        apart = tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1))
    elif COLUMNS == 64:
        even = tl.join(n[FIRST], n[FIRST + 2])
        odd = tl.join(n[FIRST + 1], n[FIRST + 3])
        apart = tl.permute(tl.join(even, odd), (0, 2, 3, 1))
    else:
        apart = tl.permute(tl.join(n[FIRST], n[FIRST + 1]), (0, 2, 1))
    return tl.reshape(apart, (n[0].shape[0], COLUMNS))
