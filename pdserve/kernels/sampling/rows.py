"""Parts that the sampling kernels share: how programs divide a row of logits, and the numbers that
lose every comparison.

This file knows no kernel. The kernels beside it use it.
"""

import triton.language as tl

from pdserve.kernels.launching.launch import cdiv, next_power_of_2

NEG_INF = tl.constexpr(float("-inf"))
NO_ID = tl.constexpr(2**31 - 1)


def splits_of(num_rows: int, vocab: int, block: int, target_programs: int) -> tuple[int, int]:
    """Returns (programs per row, tokens of each). They are enough to fill the device; each program
    has at least one block, and none is empty."""
    blocks = cdiv(vocab, block)
    per_program = cdiv(blocks, min(blocks, max(target_programs // num_rows, 1)))
    return cdiv(blocks, per_program), per_program * block


def most_splits(vocab: int, block: int) -> int:
    """Power of two that no number of splits exceeds, so one kernel serves any number of rows."""
    return next_power_of_2(cdiv(vocab, block))
