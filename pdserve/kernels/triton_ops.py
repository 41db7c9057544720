"""Every op of ops.py in Triton: checks what the kernels assume, prepares tensors, launches. The
kernels are in norm/elementwise.py, linear/small_products.py, attention/{decode,prefill,dense}.py,
kv/{cache_rows,repack}.py, batch/state.py and sampling/{draw,cut,edits,penalties,logprobs}.py; the
`reference.py` of each room documents its functions.

No op waits for the device, and every grid and tile follows from shapes alone. Called by models
through ops_for(). Works in Triton's CPU interpreter too (TRITON_INTERPRET=1 before triton is
imported), where only tests use it.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.attention import dense
from pdserve.kernels.attention.decode import decode_tiles, launch_decode, num_decode_programs
from pdserve.kernels.attention.prefill import launch_prefill, prefill_tiles
from pdserve.kernels.batch.state import (
    launch_gather_inputs,
    launch_store_tokens,
    launch_update_tables,
)
from pdserve.kernels.kv.cache_rows import launch_copy_blocks, launch_rope_write_kv
from pdserve.kernels.kv.repack import launch_repack
from pdserve.kernels.launching.launch import is_hopper
from pdserve.kernels.linear.small_products import MAX_ROWS, launch_row_product, launch_small_product
from pdserve.kernels.norm.elementwise import launch_rms_norm, launch_silu_mul
from pdserve.kernels.sampling.cut import launch_cut
from pdserve.kernels.sampling.draw import launch_draw
from pdserve.kernels.sampling.edits import launch_edits
from pdserve.kernels.sampling.logprobs import launch_token_logprobs
from pdserve.kernels.sampling.penalties import launch_penalties

INTERPRETER_SMS = 8
SAMPLING_PROGRAMS = 8  # an SM: enough reads in flight of kernels that do little else


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """reference.rms_norm."""
    if x.numel() == 0:
        return torch.empty_like(x)
    rows = x if x.ndim in (2, 3) and x.stride(-1) == 1 else x.reshape(-1, x.shape[-1])
    return launch_rms_norm(rows, weight, eps).view(x.shape)


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor]:
    """reference.rope_write_kv, rotating in place: the returned tensors are q and k."""
    _check_rows(q=q, k=k, v=v)
    _check_kv(kv)
    _check_ids(positions=positions, slot_mapping=slot_mapping)
    if q.numel():
        launch_rope_write_kv(q, k, v, cos, sin, positions, kv, slot_mapping)
    return q, k


def silu_mul(gate_up: Tensor) -> Tensor:
    """reference.silu_mul."""
    _check_rows(gate_up=gate_up)
    if gate_up.numel() == 0:
        return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    return launch_silu_mul(gate_up)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """reference.linear: Triton for few rows, else cuBLAS."""
    if not _is_small(x, weight):
        return functional.linear(x, weight, bias)
    return _small_product(x, weight, bias)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """reference.linear_add, written to residual."""
    if residual.shape != (len(x), len(weight)) or not residual.is_contiguous():
        raise ValueError(
            f"residual must be contiguous {(len(x), len(weight))}, not {tuple(residual.shape)}"
        )
    if _is_small(x, weight):
        return _small_product(x, weight, bias, residual=residual)
    residual.addmm_(x, weight.mT)
    return residual if bias is None else residual.add_(bias)


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """reference.norm_linear."""
    return linear(rms_norm(x, norm_weight, eps), weight, bias)


def norm_linear_silu_mul(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """reference.norm_linear_silu_mul."""
    normed = rms_norm(x, norm_weight, eps)
    if _is_small(normed, weight):
        return _small_product(normed, weight, bias, silu=True)
    return silu_mul(functional.linear(normed, weight, bias))


def _is_small(x: Tensor, weight: Tensor) -> bool:
    """Whether x is of so few rows, and weight of such a kind, that linear/small_products.py is the
    faster."""
    return (
        0 < len(x) <= MAX_ROWS
        and (not x.is_cuda or is_hopper(x.device))  # their stages fill Hopper's shared memory
        and x.dtype != torch.float32
        and weight.shape[1] % 16 == 0
        and x.stride(1) == 1
        and weight.is_contiguous()
    )


def _small_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    if len(x) == 1:
        return launch_row_product(x, weight, bias, silu, residual=residual)
    return launch_small_product(x, weight, bias, _num_sms(x.device), silu, residual)


def gather_inputs(
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    last_token: Tensor,
    tables: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """reference.gather_inputs."""
    _check_ids(ids=ids, positions=positions, slots=slots, tables=tables)
    return launch_gather_inputs(ids, positions, slots, last_token, tables, block_size)


def update_tables(tables: Tensor, changes: Tensor) -> None:
    """reference.update_tables."""
    _check_ids(tables=tables, changes=changes)
    if changes.shape[1]:
        launch_update_tables(tables, changes)


def store_tokens(last_token: Tensor, slots: Tensor, token_ids: Tensor) -> None:
    """reference.store_tokens."""
    _check_ids(slots=slots, token_ids=token_ids)
    if len(slots):
        launch_store_tokens(last_token, slots, token_ids)


def warm_dense_prefill(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """dense.warm_dense_prefill."""
    dense.warm_dense_prefill(q, k, v, scale)


def fresh_prefill_pays(q: Tensor, k: Tensor, v: Tensor, query_lens: tuple[int, ...]) -> bool:
    """dense.fresh_prefill_pays."""
    return dense.fresh_prefill_pays(q, k, v, query_lens)


def fresh_prefill(
    q: Tensor, k: Tensor, v: Tensor, query_lens: tuple[int, ...], scale: float
) -> Tensor:
    """reference.fresh_prefill, by cuDNN, for prompts that fresh_prefill_pays() takes."""
    return dense.fresh_prefill(q, k, v, query_lens, scale)


def chunk_prefill_pays(q: Tensor, k: Tensor, v: Tensor, prefix_len: int, block_size: int) -> bool:
    """dense.chunk_prefill_pays."""
    return dense.chunk_prefill_pays(q, k, v, prefix_len, block_size)


def chunk_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    prefix_len: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """reference.chunk_prefill, by cuDNN but for the chunk's last rows, if chunk_prefill_pays()."""
    _check_ids(table_rows=table_rows)
    out = _output(q, out)
    done = dense.chunk_prefill(q, k, v, kv, block_tables, table_rows, prefix_len, scale, out)
    if done < len(q):
        _prefill(
            q, kv, block_tables, table_rows, context_lens, query_starts, len(q), scale, out, done
        )
    return out


def copy_blocks(kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """reference.copy_blocks."""
    if not kv_cache.is_contiguous():
        raise ValueError("kv_cache must be contiguous: pass the whole KV cache, not a layer of it")
    _check_ids(src=src, dst=dst)
    if len(src):
        launch_copy_blocks(kv_cache, src, dst)


def repack(
    source: Tensor,
    source_ids: Tensor,
    kv_cache: Tensor,
    block_ids: Tensor,
    skip: int,
    num_rows: int,
) -> None:
    """reference.repack."""
    if not (source.is_contiguous() and kv_cache.is_contiguous()):
        raise ValueError(
            "source and kv_cache must be contiguous: pass the whole ring and the whole KV cache"
        )
    _check_ids(source_ids=source_ids, block_ids=block_ids)
    if num_rows:
        launch_repack(source, source_ids, kv_cache, block_ids, skip, num_rows)


def paged_decode(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    context_lens: Tensor,
    scale: float,
    max_context_len: int,
    out: Tensor | None = None,
) -> Tensor:
    """reference.paged_decode."""
    _check_attention(q, kv, block_tables, scale)
    _check_ids(table_rows=table_rows, context_lens=context_lens)
    out = _output(q, out)
    if q.numel() == 0:
        return out
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[1]
    tiles = decode_tiles(num_heads // num_kv_heads, head_dim, q.dtype)
    num_programs = num_decode_programs(
        num_seqs * num_kv_heads, max_context_len, tiles.block_n, _num_sms(q.device)
    )
    launch_decode(q, kv, block_tables, table_rows, context_lens, scale, tiles, num_programs, out)
    return out


def paged_prefill(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    max_query_len: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """reference.paged_prefill."""
    out = _output(q, out)
    if q.numel():
        _prefill(
            q,
            kv,
            block_tables,
            table_rows,
            context_lens,
            query_starts,
            max(max_query_len, 1),
            scale,
            out,
            0,
        )
    return out


def _prefill(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    max_query_len: int,
    scale: float,
    out: Tensor,
    skip: int,
) -> None:
    """paged_prefill without the first `skip` rows of each sequence."""
    _check_attention(q, kv, block_tables, scale)
    _check_ids(table_rows=table_rows, context_lens=context_lens, query_starts=query_starts)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[1]
    block_size = kv.shape[3]
    group = num_heads // num_kv_heads
    num_rows = (num_tokens - skip) * num_heads
    tiles = prefill_tiles(group, num_rows, head_dim, block_size, q.dtype, _num_sms(q.device))
    paged = kv, block_tables, table_rows, context_lens, query_starts, max_query_len
    launch_prefill(q, *paged, scale, tiles, out, skip)


def _output(q: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous {tuple(q.shape)} of {q.dtype}, not {tuple(out.shape)} of "
            f"{out.dtype}"
        )
    return out


def draw_tokens(
    logits: Tensor,
    temperature: Tensor | None = None,
    keys: Tensor | None = None,
    cut: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """reference.draw_tokens."""
    _check_rows(logits=logits)
    if len(logits) == 0:
        return torch.empty(0, dtype=torch.int32, device=logits.device)
    return launch_draw(logits, temperature, keys, cut, SAMPLING_PROGRAMS * _num_sms(logits.device))


def cut_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """reference.cut_tokens."""
    _check_rows(logits=logits)
    return launch_cut(logits, temperature, top_k, top_p, min_p)


def apply_edits(logits: Tensor, slots: Tensor, counts: Tensor, ids: Tensor, values: Tensor) -> None:
    """reference.apply_edits."""
    _check_ids(logits=logits, ids=ids, values=values)
    launch_edits(logits, slots, counts, ids, values)


def apply_penalties(
    logits: Tensor,
    counts: Tensor,
    slots: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """reference.apply_penalties."""
    _check_ids(logits=logits, counts=counts)
    launch_penalties(logits, counts, slots, repetition, frequency, presence)


def token_logprobs(
    logits: Tensor, tokens: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """reference.token_logprobs; the alternatives by torch.topk."""
    _check_rows(logits=logits)
    _check_ids(tokens=tokens)
    logprobs, ranks, lse = launch_token_logprobs(
        logits, tokens, SAMPLING_PROGRAMS * _num_sms(logits.device)
    )
    if num_top == 0:
        none = logits.new_empty(len(logits), 0, dtype=torch.float32)
        return logprobs, ranks, none, none.long()
    values, ids = logits.topk(num_top, dim=-1)
    return logprobs, ranks, values.float() - lse[:, None], ids


@lru_cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check_attention(q: Tensor, kv: Tensor, block_tables: Tensor, scale: float) -> None:
    if scale <= 0:
        raise ValueError(
            f"scale must be above 0, not {scale}: the softmax subtracts its maximum before it "
            "scales"
        )
    _check_rows(q=q, block_tables=block_tables)
    _check_kv(kv)
    if q.shape[1] % kv.shape[1] or q.shape[1] // kv.shape[1] > 64:
        raise ValueError(
            f"q must have 1 to 64 heads for each of kv's {kv.shape[1]}, not {q.shape[1]} in all"
        )


def _check_rows(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} has stride {tensor.stride(-1)} in its last dim: make it contiguous there"
            )


def _check_ids(**tensors: Tensor) -> None:
    """Kernels read ids by pointer: a column of a table would be read as its first rows."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous: call .contiguous() on it")


def _check_kv(kv: Tensor) -> None:
    block_size, head_dim = kv.shape[3:]
    if kv.stride()[2:] != (block_size * head_dim, head_dim, 1) or block_size & (block_size - 1):
        raise ValueError(
            "kv must be kv_cache[:, :, layer] of a contiguous KV cache whose block_size is a "
            f"power of two, not {tuple(kv.shape)} with strides {kv.stride()}"
        )
