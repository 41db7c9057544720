"""LatentOps in plain torch. Everything is computed in the latent's space, by the same core as other
attention, so that decodes and prompts get the same bits on CPU."""

import torch
from torch import Tensor

from pdserve.kernels.attention import reference as attention
from pdserve.kernels.attention.spec import Paged, Prefills
from pdserve.kernels.kv.reference import apply_rope
from pdserve.kernels.latents.space import into_latent, out_of_latent
from pdserve.kernels.latents.spec import LatentAttentionSpec, LatentHeads
from pdserve.kernels.norm.ops import Norm
from pdserve.kernels.norm.reference import rms_norm


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
    rank = latent.shape[1] - q.shape[2]
    k = latent[:, None, rank:]
    if is_interleaved:
        q, k = (torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1) for x in (q, k))
    q, k = apply_rope(q, k, cos, sin, positions)
    rotated.copy_(q)
    rows = torch.cat((rms_norm(latent[:, :rank], norm), k[:, 0]), dim=1)
    block_size = kv.shape[3]
    kv[slot_mapping // block_size, 0, 0, slot_mapping % block_size] = rows


def decode(
    q: Tensor, kv: Tensor, paged: Paged, spec: LatentAttentionSpec, out: Tensor | None = None
) -> Tensor:
    return attention.decode(q, kv, paged, spec.attends, out)


def prefill(
    q: Tensor, kv: Tensor, prefills: Prefills, spec: LatentAttentionSpec, out: Tensor | None = None
) -> Tensor:
    return attention.paged_prefill(q, kv, prefills, spec.attends, out)


def expansion_pays(prefills: Prefills, spec: LatentAttentionSpec, like: Tensor) -> bool:
    """Returns False, because decodes and prompts must get the same bits."""
    return False


def expanded_prefill(
    q: Tensor,
    kv: Tensor,
    prefills: Prefills,
    spec: LatentAttentionSpec,
    heads: LatentHeads,
    out: Tensor,
) -> None:
    """Attends in the latent's space, and then returns to the space of the heads."""
    wide = q.new_empty(*q.shape[:2], spec.attends.head_dim)
    into_latent(q[:, :, : spec.nope_dim], heads, wide[:, :, : spec.rank])
    wide[:, :, spec.rank :] = q[:, :, spec.nope_dim :]
    out.copy_(out_of_latent(prefill(wide, kv, prefills, spec), heads))


def warm(
    kv: Tensor, tables: Tensor, spec: LatentAttentionSpec, heads: LatentHeads, num_rows: int
) -> None:
    """Does nothing: there is nothing to prepare."""
