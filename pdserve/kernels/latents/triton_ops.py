"""LatentOps on a GPU: attention.py and rows.py use Triton, expanded.py uses cuDNN where it pays."""

import torch
from torch import Tensor

from pdserve.kernels.attention.spec import Paged, Prefills
from pdserve.kernels.attention.triton_ops import check_attention, output_of
from pdserve.kernels.latents import expanded
from pdserve.kernels.latents.attention import PARTED, launch_latent
from pdserve.kernels.latents.rows import launch_rope_write
from pdserve.kernels.latents.spec import LatentAttentionSpec, LatentHeads
from pdserve.kernels.launching.checks import check_ids, check_kv, check_rows
from pdserve.kernels.norm.ops import Norm


def rope_write(
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
    check_rows(q=q, rotated=rotated, latent=latent)
    check_kv(kv)
    check_ids(positions=positions, slot_mapping=slot_mapping)
    if q.numel():
        launch_rope_write(
            q, rotated, latent, norm, cos, sin, positions, kv, slot_mapping, is_interleaved
        )


def decode(
    q: Tensor, kv: Tensor, paged: Paged, spec: LatentAttentionSpec, out: Tensor | None = None
) -> Tensor:
    check_attention(q, kv, paged, spec.attends)
    out = output_of(q, spec.attends, out)
    if q.numel():
        launch_latent(q, kv, paged, spec.attends, out)
    return out


def prefill(
    q: Tensor, kv: Tensor, prefills: Prefills, spec: LatentAttentionSpec, out: Tensor | None = None
) -> Tensor:
    check_attention(q, kv, prefills.paged, spec.attends)
    check_ids(query_starts=prefills.query_starts)
    out = output_of(q, spec.attends, out)
    if q.numel():
        longest = max(prefills.max_query_len, 1)
        launch_latent(q, kv, prefills.paged, spec.attends, out, prefills.query_starts, longest)
    return out


def expansion_pays(prefills: Prefills, spec: LatentAttentionSpec, like: Tensor) -> bool:
    return expanded.expansion_pays(prefills, spec, like)


def expanded_prefill(
    q: Tensor,
    kv: Tensor,
    prefills: Prefills,
    spec: LatentAttentionSpec,
    heads: LatentHeads,
    out: Tensor,
) -> None:
    """Uses cuDNN to attend, on keys and values in a new layout."""
    paged = prefills.paged
    check_rows(q=q, block_tables=paged.tables)
    check_kv(kv)
    check_ids(
        table_rows=paged.rows,
        context_lens=paged.context_lens,
        query_starts=prefills.query_starts,
        out=out,
    )
    expanded.expanded_prefill(q, kv, prefills, spec, heads, out)


def warm(
    kv: Tensor, tables: Tensor, spec: LatentAttentionSpec, heads: LatentHeads, num_rows: int
) -> None:
    """Launches decodes with every number of parts of the keys, makes cuDNN's plans, and launches
    the kernels for a context in pieces."""
    row, lens = (torch.zeros(1, dtype=torch.int32, device=kv.device) for _ in range(2))
    q = kv.new_zeros(1, spec.attends.num_heads, spec.attends.head_dim)
    for longest in PARTED:
        decode(q, kv, Paged(tables, row, lens, longest), spec)
    if kv.is_cuda and kv.dtype != torch.float32:
        expanded.warm_expansion(spec, num_rows, q)
        expanded.warm_pieces(kv, tables, spec, heads)
