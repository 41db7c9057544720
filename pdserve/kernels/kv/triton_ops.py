"""KVOps in Triton: checks the inputs of the kernels and launches them."""

from torch import Tensor

from pdserve.kernels.e4m3 import E4M3
from pdserve.kernels.kv.cache_rows import launch_copy_blocks, launch_rope_write_kv
from pdserve.kernels.kv.ops import HeadNorms, RowScales
from pdserve.kernels.kv.repack import launch_repack
from pdserve.kernels.launching.checks import check_ids, check_kv, check_kv_dtype, check_rows


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
    """Does what reference.rope_write_kv does, in place: the returned tensors are q, k and v."""
    check_rows(q=q, k=k, v=v)
    check_kv(kv)
    check_kv_dtype(kv, k.dtype)
    check_ids(positions=positions, slot_mapping=slot_mapping)
    if kv.dtype != E4M3:
        scales = None
    if scales is not None:
        check_ids(k_scales=scales.k, v_scales=scales.v)
    if q.numel():
        launch_rope_write_kv(q, k, v, cos, sin, positions, kv, slot_mapping, norms, scales)
    return q, k, v


def copy_blocks(kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """Does what reference.copy_blocks does."""
    if not kv_cache.is_contiguous():
        raise ValueError("kv_cache must be contiguous: pass the whole KV cache, not a layer of it")
    check_ids(src=src, dst=dst)
    if len(src):
        launch_copy_blocks(kv_cache, src, dst)


def repack(
    source: Tensor,
    source_ids: Tensor,
    kv_cache: Tensor,
    block_ids: Tensor,
    skip: int,
    num_rows: int,
    scales: Tensor | None = None,
) -> None:
    """Does what reference.repack does."""
    if not (source[0].is_contiguous() and kv_cache[0].is_contiguous()):
        raise ValueError(
            "each block of source and kv_cache must be contiguous: pass all their heads and layers"
        )
    if (*source.shape[1:4], source.shape[5]) != (*kv_cache.shape[1:4], kv_cache.shape[5]):
        raise ValueError(
            "source and kv_cache must differ in their block size alone, but their blocks have the "
            f"shapes {tuple(source.shape[1:])} and {tuple(kv_cache.shape[1:])}"
        )
    if source.dtype != kv_cache.dtype != E4M3:
        raise ValueError(
            f"rows can only be rounded to e4m3: source is {source.dtype} and kv_cache is "
            f"{kv_cache.dtype}"
        )
    check_ids(source_ids=source_ids, block_ids=block_ids)
    if scales is not None:
        check_ids(scales=scales)
    if num_rows:
        launch_repack(source, source_ids, kv_cache, block_ids, skip, num_rows, scales)
