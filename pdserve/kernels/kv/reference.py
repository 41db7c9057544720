"""Rows and blocks of the KV cache in plain torch, and the rotary embedding of the rows that are
written there."""

import torch
from torch import Tensor

from pdserve.kernels.e4m3 import E4M3, to_codes
from pdserve.kernels.kv.ops import HeadNorms, RowScales
from pdserve.kernels.norm.reference import rms_norm


def norm_heads(q: Tensor, k: Tensor, norms: HeadNorms | None) -> tuple[Tensor, Tensor]:
    """Norms each head of q [T, Hq, D] and k [T, Hk, D]. Leaves them unchanged if norms is None."""
    return (q, k) if norms is None else (rms_norm(q, norms.q), rms_norm(k, norms.k))


def apply_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotates halves (the Hugging Face Llama convention) of q [T, Hq, D] and k [T, Hk, D] by their
    positions [T]. It computes in float32.

    cos, sin: float32 [max_pos, D // 2].
    Use the returned tensors: an implementation may work in place.
    """
    # [T, 1, D // 2]
    cos_rows = cos[positions].unsqueeze(1)
    sin_rows = sin[positions].unsqueeze(1)
    first, second = torch.cat((q, k), dim=1).float().chunk(2, dim=-1)
    rotated = torch.cat(
        (first * cos_rows - second * sin_rows, second * cos_rows + first * sin_rows), dim=-1
    )
    q_rotated, k_rotated = rotated.to(q.dtype).split((q.shape[1], k.shape[1]), dim=1)
    return q_rotated, k_rotated


def write_kv(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """Writes rows k, v [T, Hk, D] into one layer's `kv` [num_blocks, Hk, 2, block_size, D] at
    `slot_mapping` [T] int64.

    An entry is block * block_size + offset. Several padding rows may share one of the null block.
    """
    block_size = kv.shape[3]
    kv[slot_mapping // block_size, :, :, slot_mapping % block_size] = torch.stack((k, v), dim=2)


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    norms: HeadNorms | None = None,
    scales: RowScales | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs norm_heads and apply_rope, and then write_kv for the rotated k and for v. Returns the
    rotated q and k, and v.

    A kv in e4m3 holds k and v divided by their scales. Then the returned k and v are what was
    written, in their own dtype, and the returned q is multiplied by k's scales. So attention needs
    no scales of keys, and its result must be multiplied by the scales of values. Fresh rows are the
    same as those that a later step reads.
    """
    q, k = apply_rope(*norm_heads(q, k, norms), cos, sin, positions)
    if kv.dtype == E4M3:
        if scales is not None:
            group = q.shape[1] // k.shape[1]
            q = (q.float() * scales.k.repeat_interleave(group)[:, None]).to(q.dtype)
            k, v = (x.float() / s[:, None] for x, s in ((k, scales.k), (v, scales.v)))
        k, v = to_codes(k), to_codes(v)
    write_kv(k, v, kv, slot_mapping)
    return q, k.to(q.dtype), v.to(q.dtype)


def copy_blocks(kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copies whole blocks of `kv_cache` [num_blocks, ...] from `src` to `dst` (int64 [N]). No block
    may be in both."""
    kv_cache[dst] = kv_cache[src]


def repack(
    source: Tensor,
    source_ids: Tensor,
    kv_cache: Tensor,
    block_ids: Tensor,
    skip: int,
    num_rows: int,
    scales: Tensor | None = None,
) -> None:
    """Copies KV rows of one sequence from blocks of one size to blocks of another. Rows of 16 or 32
    bits that go to a KV cache in e4m3 are rounded as rope_write_kv rounds them.

    source: [num_source_blocks, Hk, L, 2, source_size, D].
    source_ids: int32, the blocks of source that hold the rows one after another.
    kv_cache: [num_blocks, Hk, L, 2, block_size, D].
    block_ids: int32, the blocks of kv_cache; the rows are written from the beginning of the first.
    skip: the first row of source to copy, a multiple of the smaller block size.
    num_rows: rounded up to a multiple of the smaller block size; so rows after the last are copied
        with it.
    scales: float32 [Hk, L, 2], by which rounded rows are divided; None: all are 1.
    Block sizes are powers of two.
    """
    is_rounded = source.dtype != kv_cache.dtype
    rows = min(source.shape[4], kv_cache.shape[4])
    there = source.unflatten(4, (-1, rows))
    here = kv_cache.unflatten(4, (-1, rows))
    sources = source_ids.tolist()
    blocks = block_ids.tolist()
    for run in range(-(-num_rows // rows)):  # ten times as fast as one copy by indices of rows
        source_block, first = divmod(skip // rows + run, there.shape[4])
        block, target = divmod(run, here.shape[4])
        moved = there[sources[source_block], :, :, :, first]
        if is_rounded:
            moved = to_codes(moved if scales is None else moved.float() / scales[..., None, None])
        here[blocks[block], :, :, :, target] = moved


def gather_kv(
    kv: Tensor,
    block_tables: Tensor,
    table_row: Tensor,
    start: int,
    num_rows: int,
    dtype: torch.dtype,
) -> Tensor:
    """Gathers rows start : start + num_rows of one sequence. Row table_row (int32 [1]) of
    block_tables names its blocks.

    Returns keys and values [2, num_rows, Hk, D] in `dtype`, which is kv's dtype, or any wider one
    if kv is in e4m3.
    """
    positions = torch.arange(start, start + num_rows, device=kv.device)
    block_size = kv.shape[3]
    blocks = block_tables[table_row.long(), positions // block_size].long()
    return kv[blocks, :, :, positions % block_size].permute(2, 0, 1, 3).to(dtype)
