# mypy: allow-untyped-defs
"""The Triton kernel that rotates queries, norms and rotates latents, and writes the rows of the
latents into the KV cache. triton_ops.py calls it."""

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import launch, next_power_of_2
from pdserve.kernels.norm.elementwise import weighted
from pdserve.kernels.norm.ops import Norm


def launch_rope_write(
    q: Tensor,
    rotated: Tensor,
    latent: Tensor,
    norm: Norm,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    is_interleaved: bool,
) -> None:
    """Runs LatentOps.rope_write; the last dims of q, rotated and latent must be contiguous."""
    num_tokens, num_heads, width = q.shape
    rank = latent.shape[1] - width
    launch(
        rope_write_latent_kernel,
        (num_tokens,),
        (q, rotated, latent, norm.weight, cos, sin, positions, kv, slot_mapping),
        (
            norm.eps,
            num_heads,
            kv.shape[3].bit_length() - 1,
            *q.stride()[:2],
            *rotated.stride()[:2],
            latent.stride(0),
            kv.stride(0),
        ),
        HALF=width // 2,
        BLOCK_HALF=next_power_of_2(width // 2),
        BLOCK_HEADS=next_power_of_2(num_heads),
        RANK=rank,
        BLOCK_RANK=next_power_of_2(rank),
        PLUS_ONE=norm.plus_one,
        INTERLEAVED=is_interleaved,
        num_warps=4,
        **launch_options(q.device),
    )


@triton.jit
def _rotated(row, first, mask, cos, sin, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotates the numbers at row + 0 ... 2 * HALF. Returns both halves in float32."""
    if INTERLEAVED:
        a = tl.load(row + 2 * first, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(row + 2 * first + 1, mask=mask, other=0.0).to(tl.float32)
    else:
        a = tl.load(row + first, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(row + first + HALF, mask=mask, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def rope_write_latent_kernel(
    q_ptr,  # [tokens, heads, 2 * HALF]
    rotated_ptr,  # [tokens, heads, 2 * HALF], which may be q
    latent_ptr,  # [tokens, RANK + 2 * HALF]
    norm_ptr,  # [RANK]
    cos_ptr,  # float32 [positions, HALF]
    sin_ptr,
    positions_ptr,  # int32 [tokens]
    kv_ptr,  # [blocks, 1, 1, block size, RANK + 2 * HALF]
    slots_ptr,  # int64 [tokens]
    eps,
    num_heads,
    block_bits,
    stride_q_token,
    stride_q_head,
    stride_token,
    stride_head,
    stride_latent,
    stride_block,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program handles one token."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    first = tl.arange(0, BLOCK_HALF)
    heads = tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK_RANK)
    inside = first < HALF
    in_rank = columns < RANK
    weight = tl.load(norm_ptr + columns, mask=in_rank, other=0.0).to(tl.float32)
    dtype: tl.constexpr = kv_ptr.dtype.element_ty

    wait(PDL)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + first, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + first, mask=inside, other=0.0)

    mask = (heads < num_heads)[:, None] & inside[None, :]
    rows = q_ptr + token * stride_q_token + (heads * stride_q_head)[:, None]
    a, b = _rotated(rows, first[None, :], mask, cos[None, :], sin[None, :], HALF, INTERLEAVED)
    if INTERLEAVED:  # a thread writes numbers that another thread may not have read yet
        tl.debug_barrier()
    out = rotated_ptr + token * stride_token + (heads * stride_head)[:, None] + first[None, :]
    tl.store(out, a.to(dtype), mask=mask)
    tl.store(out + HALF, b.to(dtype), mask=mask)

    slot = tl.load(slots_ptr + token)
    block = slot >> block_bits
    offset = slot & ((1 << block_bits) - 1)
    stored = kv_ptr + block * stride_block + offset * (RANK + 2 * HALF)
    row = latent_ptr + token * stride_latent
    latent = tl.load(row + columns, mask=in_rank, other=0.0).to(tl.float32)
    latent *= 1.0 / tl.sqrt(tl.sum(latent * latent, 0) / RANK + eps)
    tl.store(stored + columns, weighted(latent, weight, dtype, PLUS_ONE), mask=in_rank)
    a, b = _rotated(row + RANK, first, inside, cos, sin, HALF, INTERLEAVED)
    tl.store(stored + RANK + first, a.to(dtype), mask=inside)
    tl.store(stored + RANK + HALF + first, b.to(dtype), mask=inside)
