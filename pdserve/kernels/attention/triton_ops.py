"""AttentionOps on a GPU: decode.py and prefill.py use Triton, dense.py uses cuDNN where it pays."""

import torch
from torch import Tensor

from pdserve.kernels.attention import dense
from pdserve.kernels.attention.decode import decode_tiles, launch_decode, num_decode_programs
from pdserve.kernels.attention.prefill import is_cut_finely, launch_prefill, prefill_tiles
from pdserve.kernels.attention.reference import scales_of_heads
from pdserve.kernels.attention.shares import num_splits
from pdserve.kernels.attention.spec import AttentionSpec, Paged, Prefills
from pdserve.kernels.e4m3 import E4M3
from pdserve.kernels.launching.checks import (
    check_ids,
    check_kv,
    check_kv_dtype,
    check_rows,
    num_sms,
)
from pdserve.kernels.launching.launch import cdiv
from pdserve.kernels.launching.notes import other_work

WARM_ROWS = 16


def decode(
    q: Tensor,
    kv: Tensor,
    paged: Paged,
    spec: AttentionSpec,
    out: Tensor | None = None,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    check_attention(q, kv, paged, spec, v_scales, sinks)
    out = output_of(q, spec, out)
    if q.numel() == 0:
        return out
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[1]
    tiles = decode_tiles(num_heads // num_kv_heads, head_dim, q.dtype)
    longest = min(paged.longest, spec.window) if spec.window else paged.longest
    num_items = num_seqs * num_kv_heads
    has_codes = kv.dtype == E4M3 and q.dtype != torch.float32
    num_programs = num_decode_programs(
        num_items, longest, tiles.block_n, num_sms(q.device), has_codes
    )
    launch_decode(q, kv, paged, spec, tiles, num_programs, out, v_scales, sinks)
    return out


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    prefills: Prefills,
    spec: AttentionSpec,
    out: Tensor | None = None,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Uses cuDNN if all keys are this step's rows, or if the rows before them are whole pieces."""
    if spec.is_plain:
        fresh = prefills.fresh_lens
        if fresh and dense.fresh_prefill_pays(q, k, v, fresh):
            other_work()
            done = _scaled(dense.fresh_prefill(q, k, v, fresh, spec.scale), v_scales)
            return done if out is None else out.copy_(done)
        if prefills.prefix_len and dense.chunk_prefill_pays(
            q, k, v, prefills.prefix_len, kv.shape[3]
        ):
            return _chunk(q, k, v, kv, prefills, spec, output_of(q, spec, out), v_scales)
    return paged_prefill(q, kv, prefills, spec, out, v_scales, sinks)


def paged_prefill(
    q: Tensor,
    kv: Tensor,
    prefills: Prefills,
    spec: AttentionSpec,
    out: Tensor | None = None,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Runs prefill by the paged kernel."""
    out = output_of(q, spec, out)
    if q.numel():
        _launch(q, kv, prefills, spec, out, max(prefills.max_query_len, 1), 0, v_scales, sinks)
    return out


def warm_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    tables: Tensor,
    spec: AttentionSpec,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Makes cuDNN's plans, and launches the kernels that hardly a first request would need: those
    of a chunk after pieces, and those of few rows, of which a step's graph has only one. Also
    launches those of many rows, because they take longest to compile. They read the blocks of kv
    that row 0 of `tables` names."""
    few = q[:WARM_ROWS]
    launches = [(q, None), (few, 1)] + ([(few, 2)] if spec.window is None else [])
    for rows, splits in launches:
        given = rows, kv, _one_prefill(tables, 0, len(rows)), spec, output_of(rows, spec, None)
        _launch(*given, len(rows), 0, v_scales, sinks, splits)
    if not spec.is_plain:
        return
    dense.warm_dense_prefill(q, k, v, spec.scale)
    num_rows = len(q)
    fits = 2 * num_rows <= tables.shape[1] * kv.shape[3]
    if fits and dense.chunk_prefill_pays(q, k, v, num_rows, kv.shape[3]):
        prefills = _one_prefill(tables, num_rows, num_rows)
        _chunk(q, k, v, kv, prefills, spec, output_of(q, spec, None), None)


def _one_prefill(tables: Tensor, before: int, num_rows: int) -> Prefills:
    """Makes a chunk of num_rows rows after `before` others, over row 0 of the tables."""
    rows, lens, starts = (
        torch.tensor(ids, dtype=torch.int32, device=tables.device)
        for ids in ([0], [before + num_rows], [0, num_rows])
    )
    paged = Paged(tables, rows, lens, before + num_rows)
    return Prefills(paged, starts, num_rows, ((before, num_rows),))


def _chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    prefills: Prefills,
    spec: AttentionSpec,
    out: Tensor,
    v_scales: Tensor | None,
) -> Tensor:
    """Attends by cuDNN, except for the chunk's last rows, which the paged kernel takes."""
    other_work()
    paged = prefills.paged
    check_ids(table_rows=paged.rows)
    done = dense.chunk_prefill(
        q, k, v, kv, paged.tables, paged.rows, prefills.prefix_len, spec.scale, out
    )
    _scaled(out[:done], v_scales)
    if done < len(q):
        _launch(q, kv, prefills, spec, out, len(q), done, v_scales)
    return out


def _scaled(out: Tensor, v_scales: Tensor | None) -> Tensor:
    """Scales what cuDNN computed from values in e4m3, in place."""
    return out if v_scales is None else out.mul_(scales_of_heads(v_scales, out.shape[1]))


def _launch(
    q: Tensor,
    kv: Tensor,
    prefills: Prefills,
    spec: AttentionSpec,
    out: Tensor,
    max_query_len: int,
    skip: int,
    v_scales: Tensor | None,
    sinks: Tensor | None = None,
    splits: int | None = None,
) -> None:
    """Launches the paged kernel for all rows but the first `skip` of each sequence. splits: by
    default as many as fill the device, and 1 for much work."""
    check_attention(q, kv, prefills.paged, spec, v_scales, sinks)
    check_ids(query_starts=prefills.query_starts)
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // kv.shape[1]
    num_rows = (num_tokens - skip) * num_heads
    sms = num_sms(q.device)
    tiles = prefill_tiles(group, num_rows, head_dim, kv.shape[3], q.dtype, sms)
    num_tiles = cdiv(max_query_len, tiles.block_m // group) * kv.shape[1] * len(prefills.paged.rows)
    if splits is None:
        splits = 1
        if is_cut_finely(num_rows, sms):
            splits = num_splits(num_tiles, prefills.paged.longest, spec, sms, skip)
    launch_prefill(q, kv, prefills, spec, tiles, out, max_query_len, skip, v_scales, sinks, splits)


def output_of(q: Tensor, spec: AttentionSpec, out: Tensor | None) -> Tensor:
    """Returns `out`, or a new output for q without one. Raises ValueError if `out` does not fit."""
    shape = (*q.shape[:2], spec.out_width)
    if out is None:
        return torch.empty(shape, dtype=q.dtype, device=q.device)
    if out.shape != shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous {shape} of {q.dtype}, not {tuple(out.shape)} of {out.dtype}"
        )
    return out


def check_attention(
    q: Tensor,
    kv: Tensor,
    paged: Paged,
    spec: AttentionSpec,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Raises ValueError for inputs that the kernels would misread."""
    check_rows(q=q, block_tables=paged.tables)
    check_kv(kv)
    check_kv_dtype(kv, q.dtype)
    check_ids(table_rows=paged.rows, context_lens=paged.context_lens)
    if v_scales is not None:
        check_ids(v_scales=v_scales)
    if (sinks is not None) != spec.has_sinks:
        raise ValueError("sinks must be given for a spec that has them, and for no other")
    if sinks is not None:
        check_ids(sinks=sinks)
    heads = spec.num_heads, spec.num_kv_heads
    if (q.shape[1], kv.shape[1]) != heads:
        raise ValueError(
            f"q must have {heads[0]} heads and kv {heads[1]}, as the spec says, not {q.shape[1]} "
            f"and {kv.shape[1]}"
        )
