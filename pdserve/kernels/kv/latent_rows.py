# mypy: allow-untyped-defs
"""The Triton kernel that rotates queries and latents and writes the latents' rows into the KV
cache. Called through triton_ops.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launching.dependent_launch import begin, launch_options, wait
from pdserve.kernels.launching.launch import launch, next_power_of_2


def launch_rope_write_latent(
    q: Tensor,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    is_interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """reference.rope_write_latent; the last dims of q and latent are contiguous."""
    num_tokens, num_heads, rotated = q.shape
    width = latent.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    latent_out = torch.empty(latent.shape, dtype=latent.dtype, device=latent.device)
    launch(
        rope_write_latent_kernel,
        (num_tokens,),
        (q, latent, cos, sin, positions, kv, slot_mapping, q_out, latent_out),
        (
            num_heads,
            kv.shape[3].bit_length() - 1,
            *q.stride()[:2],
            latent.stride(0),
            kv.stride(0),
        ),
        HALF=rotated // 2,
        BLOCK_HALF=next_power_of_2(rotated // 2),
        BLOCK_HEADS=next_power_of_2(num_heads),
        RANK=width - rotated,
        BLOCK_RANK=next_power_of_2(width - rotated),
        INTERLEAVED=is_interleaved,
        num_warps=4,
        **launch_options(q.device),
    )
    return q_out, latent_out


@triton.jit
def _rotated(row, first, mask, cos, sin, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both halves of what stands at row + 0 ... 2 * HALF, in float32."""
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
    latent_ptr,  # [tokens, RANK + 2 * HALF]
    cos_ptr,  # float32 [positions, HALF]
    sin_ptr,
    positions_ptr,  # int32 [tokens]
    kv_ptr,  # [blocks, 1, 1, block size, RANK + 2 * HALF]
    slots_ptr,  # int64 [tokens]
    q_out_ptr,  # [tokens, heads, 2 * HALF]
    latent_out_ptr,  # [tokens, RANK + 2 * HALF]
    num_heads,
    block_bits,
    stride_token,
    stride_head,
    stride_latent,
    stride_block,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token)."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    first = tl.arange(0, BLOCK_HALF)
    heads = tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK_RANK)
    inside = first < HALF

    wait(PDL)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + first, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + first, mask=inside, other=0.0)
    dtype: tl.constexpr = q_out_ptr.dtype.element_ty

    mask = (heads < num_heads)[:, None] & inside[None, :]
    rows = q_ptr + token * stride_token + (heads * stride_head)[:, None]
    a, b = _rotated(rows, first[None, :], mask, cos[None, :], sin[None, :], HALF, INTERLEAVED)
    out = q_out_ptr + (token * num_heads + heads)[:, None] * (2 * HALF) + first[None, :]
    tl.store(out, a.to(dtype), mask=mask)
    tl.store(out + HALF, b.to(dtype), mask=mask)

    slot = tl.load(slots_ptr + token)
    block = slot >> block_bits
    offset = slot & ((1 << block_bits) - 1)
    width: tl.constexpr = RANK + 2 * HALF
    stored = kv_ptr + block * stride_block + offset * width
    row = latent_ptr + token * stride_latent
    returned = latent_out_ptr + token * width
    latent = tl.load(row + columns, mask=columns < RANK, other=0.0)
    tl.store(stored + columns, latent, mask=columns < RANK)
    tl.store(returned + columns, latent, mask=columns < RANK)
    a, b = _rotated(row + RANK, first, inside, cos, sin, HALF, INTERLEAVED)
    tl.store(stored + RANK + first, a.to(dtype), mask=inside)
    tl.store(stored + RANK + HALF + first, b.to(dtype), mask=inside)
    tl.store(returned + RANK + first, a.to(dtype), mask=inside)
    tl.store(returned + RANK + HALF + first, b.to(dtype), mask=inside)
