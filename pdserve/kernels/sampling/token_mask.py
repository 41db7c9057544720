# mypy: allow-untyped-defs
"""Triton kernel that hides tokens of some rows that a bit mask does not allow.

It knows no sequences; the sampler makes the masks. triton_ops.py calls it.
"""

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.launch import cdiv, launch

MASK_BLOCK = 2048  # tokens


def launch_token_mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Does what reference.apply_token_mask does; all tensors must be contiguous."""
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
    """Each program masks a block of tokens of one row. It writes only hidden logits, and reads
    none."""
    mask_row = tl.program_id(1)
    row = tl.load(rows_ptr + mask_row).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    at = mask_row.to(tl.int64) * width + tokens // 32
    words = tl.load(words_ptr + at, mask=inside, other=0)
    hidden = inside & (((words >> (tokens % 32)) & 1) == 0)
    nothing = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * vocab + tokens, nothing, mask=hidden)
