# mypy: allow-untyped-defs
"""Triton kernels that compute the log-probabilities and ranks of given tokens, by one read of the
logits.

Several programs may share a row; a second kernel joins their sums. They know nothing of draws. They
do not find alternatives; torch.topk does. triton_ops.py calls them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.launch import launch
from pdserve.kernels.sampling.rows import NEG_INF, most_splits, splits_of

SCORE_BLOCK = 2048


def launch_token_logprobs(
    logits: Tensor, tokens: Tensor, target_programs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probabilities, ranks (see reference.token_logprobs) and log-sum-exps float32 [R].
    The logits are as in launch_draw."""
    num_rows, vocab = logits.shape
    num_splits, span = splits_of(num_rows, vocab, SCORE_BLOCK, target_programs)
    device = logits.device
    sums = torch.empty((2, num_rows, num_splits), dtype=torch.float32, device=device)
    better = torch.empty((num_rows, num_splits), dtype=torch.int32, device=device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=device)
    lse = torch.empty_like(logprobs)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=device)
    launch(
        score_kernel,
        (num_splits, num_rows),
        (logits, tokens, sums, better),
        (vocab, span, logits.stride(0), num_rows),
        BLOCK=SCORE_BLOCK,
        num_warps=8,
    )
    launch(
        score_of_splits_kernel,
        (num_rows,),
        (logits, tokens, sums, better, logprobs, ranks, lse),
        (num_splits, logits.stride(0), num_rows),
        BLOCK=most_splits(vocab, SCORE_BLOCK),
        num_warps=1,
    )
    return logprobs, ranks, lse


@triton.jit(do_not_specialize=["num_rows"])
def score_kernel(
    logits_ptr,  # [R, vocab]
    tokens_ptr,  # [R]
    sums_ptr,  # float32 [2, R, splits]: the maximum, and the sum of exponentials over it
    better_ptr,  # int32 [R, splits]: number of logits above the token's
    vocab,
    span,
    stride_row,
    num_rows,
    BLOCK: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1)
    splits = tl.num_programs(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_row
    chosen = tl.load(row_ptr + tl.load(tokens_ptr + row)).to(tl.float32)
    start = split * span
    end = tl.minimum(start + span, vocab)
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -1e30, tl.float32)  # finite even if logits are not
    total = tl.zeros([BLOCK], tl.float32)
    better = tl.zeros([BLOCK], tl.int32)
    for first in range(start, end, BLOCK):
        tokens = first + lanes
        logit = tl.load(row_ptr + tokens, mask=tokens < end, other=NEG_INF).to(tl.float32)
        higher = tl.maximum(top, logit)
        total = total * tl.exp(top - higher) + tl.exp(logit - higher)
        top = higher
        better += (logit > chosen).to(tl.int32)
    highest = tl.max(top, 0)
    at = row * splits + split
    tl.store(sums_ptr + at, highest)
    tl.store(sums_ptr + num_rows * splits + at, tl.sum(total * tl.exp(top - highest), 0))
    tl.store(better_ptr + at, tl.sum(better, 0))


@triton.jit(do_not_specialize=["splits", "num_rows"])
def score_of_splits_kernel(
    logits_ptr,
    tokens_ptr,
    sums_ptr,
    better_ptr,
    logprobs_ptr,  # float32 [R]
    ranks_ptr,  # int32 [R]
    lse_ptr,  # float32 [R]
    splits,
    stride_row,
    num_rows,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    parts = tl.arange(0, BLOCK)
    mask = parts < splits
    at = row * splits + parts
    top = tl.load(sums_ptr + at, mask=mask, other=-1e30)
    total = tl.load(sums_ptr + num_rows * splits + at, mask=mask, other=0.0)
    highest = tl.max(top, 0)
    # Not highest + log(sum), where the log-probability of a near-certain token would lose digits.
    log_sum = tl.log(tl.sum(total * tl.exp(top - highest), 0))
    chosen = tl.load(logits_ptr + row.to(tl.int64) * stride_row + tl.load(tokens_ptr + row)).to(
        tl.float32
    )
    tl.store(logprobs_ptr + row, chosen - highest - log_sum)
    tl.store(lse_ptr + row, highest + log_sum)
    tl.store(ranks_ptr + row, tl.sum(tl.load(better_ptr + at, mask=mask, other=0), 0) + 1)
