# mypy: allow-untyped-defs
"""Triton kernel that joins two attentions of the same queries over different keys into one. It
weights them by their log-sum-exps (Rabe & Staats 2021), and reads and writes every element once.
attention/dense.py calls it.
"""

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.launch import cdiv, launch, next_power_of_2

TILE = 2048  # elements of one program


def launch_join_attention(
    out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, joined: Tensor
) -> None:
    """Does what reference.join_attention does, and writes the results to `joined` (which may be
    `out`) and to `lse`. All tensors must be contiguous."""
    num_tokens, num_heads, head_dim = out.shape
    block_d = next_power_of_2(head_dim)
    rows = max(TILE // block_d, 1)
    launch(
        join_attention_kernel,
        (cdiv(num_tokens * num_heads, rows),),
        (out, lse, other, other_lse, joined),
        (num_tokens, num_heads),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        ROWS=rows,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_tokens", "num_heads"])
def join_attention_kernel(
    out_ptr,  # [T, Hq, D]
    lse_ptr,  # float32 [Hq, T]
    other_ptr,
    other_lse_ptr,
    joined_ptr,
    num_tokens,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each program joins ROWS rows, where a row is one head of one token."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_range = row < num_tokens * num_heads
    at = row % num_heads * num_tokens + row // num_heads
    lse = tl.load(lse_ptr + at, mask=in_range, other=0.0)
    other_lse = tl.load(other_lse_ptr + at, mask=in_range, other=0.0)
    largest = tl.maximum(lse, other_lse)
    weight = tl.exp(lse - largest)
    other_weight = tl.exp(other_lse - largest)
    total = weight + other_weight
    dims = tl.arange(0, BLOCK_D)
    elements = row[:, None].to(tl.int64) * HEAD_DIM + dims[None, :]
    mask = in_range[:, None] & (dims < HEAD_DIM)[None, :]
    out = tl.load(out_ptr + elements, mask=mask, other=0.0)
    other = tl.load(other_ptr + elements, mask=mask, other=0.0)
    joined = (
        out.to(tl.float32) * (weight / total)[:, None]
        + other.to(tl.float32) * (other_weight / total)[:, None]
    )
    tl.store(joined_ptr + elements, joined.to(out.dtype), mask=mask)
    tl.store(lse_ptr + at, largest + tl.log(total), mask=in_range)
