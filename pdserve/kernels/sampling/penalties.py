# mypy: allow-untyped-defs
"""Triton kernel that applies the repetition, frequency and presence penalties in place, by the
token counts of slots.

It knows no sequences; the sampler counts tokens. triton_ops.py calls it.
"""

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.launch import cdiv, launch
from pdserve.kernels.sampling.reference import IN_PROMPT

PENALTY_BLOCK = 2048
PROMPT_FLAG = tl.constexpr(IN_PROMPT)


def launch_penalties(
    logits: Tensor,
    counts: Tensor,
    slots: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Does what reference.apply_penalties does; all tensors must be contiguous."""
    num_rows, vocab = logits.shape
    launch(
        penalties_kernel,
        (cdiv(vocab, PENALTY_BLOCK), num_rows),
        (logits, counts, slots, repetition, frequency, presence),
        (vocab,),
        BLOCK=PENALTY_BLOCK,
        num_warps=4,
    )


@triton.jit
def penalties_kernel(
    logits_ptr,  # float32 [R, vocab]
    counts_ptr,  # int32 [slots, vocab]
    slots_ptr,  # int32 [R]
    repetition_ptr,  # float32 [R], the next two as well
    frequency_ptr,
    presence_ptr,
    vocab,
    BLOCK: tl.constexpr,
):
    """Each program penalises a block of tokens of one row. It reads and writes only the logits of
    counted tokens."""
    row = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if slot > 0:
        tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        counts = tl.load(
            counts_ptr + slot.to(tl.int64) * vocab + tokens, mask=tokens < vocab, other=0
        )
        pointers = logits_ptr + row.to(tl.int64) * vocab + tokens
        logit = tl.load(pointers, mask=counts != 0, other=0.0)
        repetition = tl.load(repetition_ptr + row)
        logit = tl.where(logit > 0, logit / repetition, logit * repetition)
        amount = (counts & (PROMPT_FLAG - 1)).to(tl.float32)
        penalty = tl.load(frequency_ptr + row) * amount + tl.load(presence_ptr + row)
        tl.store(pointers, tl.where(amount > 0, logit - penalty, logit), mask=counts != 0)
