"""A model over one sequence given whole: no engine and no KV cache, attention as it is written."""

import torch

from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.kv.ops import HeadNorms
from pdserve.kernels.kv.reference import apply_rope, norm_heads
from pdserve.kernels.latents.spec import LatentAttentionSpec, LatentHeads
from pdserve.kernels.norm.reference import rms_norm
from pdserve.models.registry import CausalLM
from pdserve.models.step_context import Attend, RopeTables, StepContext


def dense_attend(window: int = 0, scale: float = 1.0) -> Attend:
    """Causal attention over one sequence given whole; `window` and `scale` mutate mask and softmax
    scale."""

    def attend(
        layer: int,
        spec: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: RopeTables,
        norms: HeadNorms | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        positions = torch.arange(len(q), device=q.device)
        q, k = apply_rope(*norm_heads(q, k, norms), *rope, positions)
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale * scale
        if spec.soft_cap is not None:
            scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
        hidden = positions[None, :] > positions[:, None]
        for each in (window, spec.window):
            if each:
                hidden |= positions[None, :] <= positions[:, None] - each
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            beside = sinks[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat((scores, beside), -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)

    return attend


def dense_attend_latent(
    layer: int,
    spec: LatentAttentionSpec,
    q: torch.Tensor,
    latent: torch.Tensor,
    heads: LatentHeads,
    rope: RopeTables,
) -> torch.Tensor:
    """As it is written: every head has keys and values of its own, made of the latents."""
    nope, rotated = q.split((spec.nope_dim, spec.rope_dim), 2)
    latent, shared = latent.split((spec.rank, spec.rope_dim), 1)
    latent = rms_norm(latent, heads.norm)
    if spec.is_interleaved:
        rotated, shared = (torch.cat((x[..., ::2], x[..., 1::2]), -1) for x in (rotated, shared))
    positions = torch.arange(len(q), device=q.device)
    rotated, shared_heads = apply_rope(rotated, shared[:, None], *rope, positions)
    own = torch.einsum("qhd,khd->hqk", nope, torch.einsum("tr,hdr->thd", latent, heads.keys))
    common = torch.einsum("qhd,kd->hqk", rotated, shared_heads[:, 0])
    hidden = positions[None, :] > positions[:, None]
    scores = ((own + common) * spec.attends.scale).masked_fill(hidden, -torch.inf)
    values = torch.einsum("tr,hdr->thd", latent, heads.values)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def our_logits(model: CausalLM, ids: torch.Tensor, attend: Attend | None = None) -> torch.Tensor:
    """Returns the logits of every position of one sequence."""
    step = StepContext(attend or dense_attend(), attend_latent=dense_attend_latent)
    with torch.inference_mode():
        return model.logits(model.hidden(model.forward(model.embed(ids, step), step)))
