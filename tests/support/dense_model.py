"""A model over one sequence given whole: no engine and no KV cache, attention as it is written."""

import torch

from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.kv.reference import apply_rope
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
    ) -> torch.Tensor:
        q, k = apply_rope(q, k, *rope, torch.arange(len(q), device=q.device))
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale * scale
        t = torch.arange(len(q), device=q.device)
        hidden = t[None, :] > t[:, None]
        if window:
            hidden |= t[None, :] <= t[:, None] - window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    return attend


def our_logits(model: CausalLM, ids: torch.Tensor, attend: Attend | None = None) -> torch.Tensor:
    """Of every position of one sequence."""
    step = StepContext(attend or dense_attend())
    with torch.inference_mode():
        return model.logits(model.hidden(model.forward(model.embed(ids, step), step)))
