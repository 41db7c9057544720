# mypy: allow-untyped-defs
"""Triton kernel that hides the tokens of some rows that a mask of bits does not allow.

Knows no sequences: who makes the masks is the sampler's. Called through triton_ops.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.launch import cdiv, launch

MASK_BLOCK = 2048  # tokens


def launch_token_mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """reference.apply_token_mask; all contiguous."""
    vocab = logits.shape[1]
    launch(
        token_mask_kernel,
        (cdiv(vocab, MASK_BLOCK), len(rows)),
        (logits, rows, words),
        (vocab, words.shape[1]),
        BLOCK=MASK_BLOCK,
        num_warps=4,
    )


@triton.jit
def token_mask_kernel(
    logits_ptr,  # float32 [R, vocab]
    rows_ptr,  # int32 [M]
    words_ptr,  # int32 [M, width]
    vocab,
    width,
    BLOCK: tl.constexpr,
):
    """Only hidden logits are written; none is read."""
    mask_row = tl.program_id(1)
    row = tl.load(rows_ptr + mask_row).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    at = mask_row.to(tl.int64) * width + tokens // 32
    words = tl.load(words_ptr + at, mask=inside, other=0)
    hidden = inside & (((words >> (tokens % 32)) & 1) == 0)
    nothing = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * vocab + tokens, nothing, mask=hidden)
