# mypy: allow-untyped-defs
"""Triton kernels that move rows and blocks of the KV pool: write_kv and copy_blocks.

All offsets are int64: pools exceed 2 ** 31 elements. Knows nothing of who owns a block. Called through triton_ops.py.
"""

import triton
import triton.language as tl
from torch import Tensor

WRITE_HEADS = 8  # KV heads of one program
COPY_BLOCK = 4096


def launch_write_kv(k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
    """reference.write_kv; the last dim of k and v is contiguous."""
    num_tokens, num_kv_heads, head_dim = k.shape
    write_kv_kernel[(num_tokens, triton.cdiv(num_kv_heads, WRITE_HEADS))](
        k,
        v,
        kv,
        slots,
        num_kv_heads,
        kv.shape[3].bit_length() - 1,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        HEADS=WRITE_HEADS,
        num_warps=4,
    )


def launch_copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    """reference.copy_blocks on a contiguous pool."""
    block_elements = pool.stride(0)
    grid = (len(src), triton.cdiv(block_elements, COPY_BLOCK))
    copy_blocks_kernel[grid](pool, src, dst, block_elements, BLOCK=COPY_BLOCK, num_warps=8)


@triton.jit(do_not_specialize=["num_kv_heads", "block_shift"])
def write_kv_kernel(
    k_ptr,  # [T, Hk, D]
    v_ptr,  # [T, Hk, D]
    kv_ptr,  # [num_blocks, Hk, 2, block_size, D]
    slots_ptr,  # int64 [T]
    num_kv_heads,
    block_shift,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_block,
    stride_kv_head,
    stride_plane,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Program (token, tile of HEADS KV heads)."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK_D)
    mask = (heads < num_kv_heads)[:, None] & (dims < HEAD_DIM)[None, :]
    k = tl.load(k_ptr + token * stride_k_token + (heads * stride_k_head)[:, None] + dims[None, :], mask=mask)
    v = tl.load(v_ptr + token * stride_v_token + (heads * stride_v_head)[:, None] + dims[None, :], mask=mask)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    row = kv_ptr + (slot >> block_shift) * stride_block + (slot & ((1 << block_shift) - 1)) * HEAD_DIM
    pointers = row + (heads.to(tl.int64) * stride_kv_head)[:, None] + dims[None, :]
    tl.store(pointers, k, mask=mask)
    tl.store(pointers + stride_plane, v, mask=mask)


@triton.jit
def copy_blocks_kernel(
    pool_ptr,  # [num_blocks, block_elements], contiguous
    src_ptr,  # int64 [N]
    dst_ptr,  # int64 [N]
    block_elements,
    BLOCK: tl.constexpr,
):
    """Program (copy, piece of the block)."""
    src = tl.load(src_ptr + tl.program_id(0)).to(tl.int64) * block_elements
    dst = tl.load(dst_ptr + tl.program_id(0)).to(tl.int64) * block_elements
    elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = elements < block_elements
    tl.store(pool_ptr + dst + elements, tl.load(pool_ptr + src + elements, mask=mask), mask=mask)
