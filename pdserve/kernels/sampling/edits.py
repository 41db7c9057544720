# mypy: allow-untyped-defs
"""Triton kernel that adds the numbers of a slot's table to single logits, in place: biases and
masked stop tokens.

It knows no sequences; the sampler fills the tables. triton_ops.py calls it.
"""

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.launch import cdiv, launch

EDIT_BLOCK = 1024


def launch_edits(
    logits: Tensor, slots: Tensor, counts: Tensor, ids: Tensor, values: Tensor
) -> None:
    """Does what reference.apply_edits does; all tensors must be contiguous."""
    num_rows, vocab = logits.shape
    width = ids.shape[1]
    launch(
        edits_kernel,
        (cdiv(width, EDIT_BLOCK), num_rows),
        (logits, slots, counts, ids, values),
        (vocab, width),
        BLOCK=EDIT_BLOCK,
        num_warps=4,
    )


@triton.jit
def edits_kernel(
    logits_ptr,  # float32 [R, vocab]
    slots_ptr,  # int32 [R]
    counts_ptr,  # int32 [slots]
    ids_ptr,  # int32 [slots, width]
    values_ptr,  # float32 [slots, width]
    vocab,
    width,
    BLOCK: tl.constexpr,
):
    """Each program adds a block of edits of one row. A slot's ids are distinct, so no logit is
    written twice."""
    row = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if slot > 0:
        entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = entries < tl.load(counts_ptr + slot)
        at = slot.to(tl.int64) * width + entries
        pointers = logits_ptr + row.to(tl.int64) * vocab + tl.load(ids_ptr + at, mask=mask, other=0)
        logit = tl.load(pointers, mask=mask, other=0.0)
        tl.store(pointers, logit + tl.load(values_ptr + at, mask=mask, other=0.0), mask=mask)
