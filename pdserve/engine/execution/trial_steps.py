"""Steps of a model over the null block, on a device whose engine does not serve yet. They measure
memory and prepare attention. Used by the executors, and by `engine.components`."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.execution.model_runner import ModelRunner
from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.kv.ops import HeadNorms
from pdserve.kernels.latents.spec import LatentAttentionSpec, LatentHeads
from pdserve.kernels.launching.ahead import compile_ahead, compile_and_do
from pdserve.models.step_context import Attend, AttendLatent, RopeTables, StepContext


@torch.inference_mode()
def warm_prefill(runner: ModelRunner, num_rows: int) -> None:
    """Prepare prompt attention for steps of up to num_rows rows, by running one step over the
    null block."""
    zeros = torch.zeros(num_rows, dtype=torch.int32, device=runner.device)
    warmed: set[AttentionSpec] = set()

    def attend(
        layer: int,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: RopeTables,
        norms: HeadNorms | None,
        sinks: Tensor | None,
    ) -> Tensor:
        if spec not in warmed:
            warmed.add(spec)
            kv = runner.kv_cache.layers[layer]
            q, k, v = runner.ops.kv.rope_write_kv(q, k, v, *rope, zeros, kv, zeros.long(), norms)
            scales = runner.scales.get(layer)
            v_scales = None if scales is None else scales.v
            warm = runner.ops.attention.warm_prefill
            compile_and_do(
                runner.device, partial(warm, q, k, v, kv, runner.tables, spec, v_scales, sinks)
            )
        return torch.zeros_like(q)

    def attend_latent(
        layer: int,
        spec: LatentAttentionSpec,
        q: Tensor,
        latent: Tensor,
        heads: LatentHeads,
        rope: RopeTables,
    ) -> Tensor:
        if spec.attends not in warmed:
            warmed.add(spec.attends)
            kv = runner.kv_cache.layers[layer]
            warm = runner.ops.latents.warm
            compile_and_do(runner.device, partial(warm, kv, runner.tables, spec, heads, num_rows))
        return latents_like(layer, spec, q, latent, heads, rope)

    _run(runner, attend, attend_latent, zeros)


@torch.inference_mode()
def peak_bytes(runner: ModelRunner, num_rows: int, num_logits: int) -> int:
    """Device memory (CUDA) that the largest step needs beyond weights and KV cache. It is
    measured by running one over the null block.
    """
    zeros = torch.zeros(num_rows, dtype=torch.int32, device=runner.device)

    def attend(
        layer: int, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, *others: Any
    ) -> Tensor:
        """Hold as much memory as attention/dense.py: three outputs, and keys and values for all
        rows."""
        held = q.new_zeros(3, *q.shape), k.new_zeros(2, *k.shape)
        return held[0][0]

    def step() -> None:
        hidden = _run(runner, attend, latents_like, zeros)
        if runner.stage.dims.is_last_stage:
            rows = np.arange(num_logits, dtype=np.int32)
            runner.logits(hidden, [rows] * runner.stage.dims.dp)

    compile_ahead(runner.device, step)
    torch.cuda.reset_peak_memory_stats(runner.device)
    before = torch.cuda.memory_allocated(runner.device)
    step()
    torch.cuda.synchronize(runner.device)
    return torch.cuda.max_memory_allocated(runner.device) - before


def latents_like(
    layer: int,
    spec: LatentAttentionSpec,
    q: Tensor,
    latent: Tensor,
    heads: LatentHeads,
    rope: RopeTables,
) -> Tensor:
    """Stands in for attention over latents, and holds as much memory as the larger of two paths:
    latents/expanded.py, or attention in the latent's space. The first holds latents, queries, keys,
    values and outputs for twice the step's rows."""
    attends = spec.attends
    num_rows, num_heads = q.shape[:2]
    width = max(2 * (spec.nope_dim + spec.rope_dim) + 2 * spec.v_dim, attends.head_dim)
    held = q.new_empty(2 * num_rows, num_heads, width), q.new_empty(2 * num_rows, spec.rank)
    return held[0].new_zeros(num_rows, num_heads, spec.v_dim)


def _run(runner: ModelRunner, attend: Attend, attend_latent: AttendLatent, zeros: Tensor) -> Tensor:
    """Run a step with equally many rows in each home, all at position 0."""
    home_rows = (len(zeros),) * runner.stage.dims.dp
    step = StepContext(attend, zeros, attend_latent=attend_latent, home_rows=home_rows)
    return runner.run_layers(zeros, step)
