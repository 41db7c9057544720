"""Attention of one layer: its projections and the norms of its heads. The step computes the
attention itself, with norms and rotation of heads."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.collective.ops import Stream
from pdserve.kernels.kv.ops import HeadNorms
from pdserve.models.layers.context import LayerContext
from pdserve.models.layers.linear import Linear, column_parts, fused_parts, row_shard
from pdserve.models.layers.norm import NormOfHeads, RmsNorm
from pdserve.models.step_context import RopeTables, StepContext
from pdserve.models.weights import Part, Plain, Weight


class Attention:
    """The attention of one layer.

    norm: is applied to the stream before the projections; None: no norm.
    post_norm: is applied to the output before it is added.
    is_fused: q, k and v are one module of the checkpoint.
    attends: the spec of this rank's heads.
    """

    def __init__(
        self,
        context: LayerContext,
        layer: int,
        module: str,
        rope: RopeTables,
        norm: RmsNorm | None,
        post_norm: RmsNorm | None = None,
        is_fused: bool = False,
    ) -> None:
        spec = context.spec
        self._layer = layer
        self._rope = rope
        self._norm = norm
        self._post_norm = post_norm
        self.attends = attention_spec(context, layer)
        [q] = column_parts(context, {f"{module}.q_proj": spec.num_heads * spec.head_dim})
        k, v = (kv_part(context, f"{module}.{name}") for name in ("k_proj", "v_proj"))
        order = spec.rope_of(layer).head_order(spec.head_dim)
        parts = [replace(q, order=order), replace(k, order=order), v]
        if is_fused:
            parts = fused_parts(parts, f"{module}.qkv_proj")
        self._qkv = Linear(context, parts, spec.hidden_size, spec.qkv_bias)
        out = [Part(f"{module}.o_proj", spec.hidden_size)]
        heads = self.attends
        self._o = Linear(
            context, out, heads.num_heads * heads.head_dim, spec.o_bias, row_shard(context)
        )
        self._heads = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        self._qk_norms: tuple[RmsNorm, RmsNorm] | None = None
        self._wide_norms: tuple[NormOfHeads, NormOfHeads] | None = None
        if spec.qk_norm_of_all:
            assert not order, "norms of heads whose columns are reordered are not supported"
            self._wide_norms = (
                NormOfHeads(context, f"{module}.q_norm", q),
                NormOfHeads(context, f"{module}.k_norm", k),
            )
        if spec.qk_norm:
            assert not order, "norms of heads whose columns are reordered are not supported"
            self._qk_norms = (
                RmsNorm(context, f"{module}.q_norm", spec.head_dim),
                RmsNorm(context, f"{module}.k_norm", spec.head_dim),
            )

        self._sinks: Tensor | None = None
        if spec.has_sinks:
            own = replace(q, module=module, rows=spec.num_heads, order=(), of_rows=None, first=0)
            plain = {"sinks": Plain((), torch.float32, "bias")}
            weights = context.weights
            weights.add(Weight([own], plain, weights.device, self._take_sinks))

    def _take_sinks(self, tensors: Mapping[str, Tensor]) -> None:
        self._sinks = tensors["sinks"]

    def __call__(self, stream: Stream, step: StepContext) -> Stream:
        qkv, stream = self._qkv.of_norm(stream, self._norm)
        heads = qkv.unflatten(1, (-1, self.attends.head_dim))
        q, k, v = heads.split_with_sizes(self._heads, 1)
        if self._wide_norms is not None:
            q, k = (
                norm(x.flatten(1)).view(x.shape)
                for norm, x in zip(self._wide_norms, (q, k), strict=True)
            )
        attended = step.attend(
            self._layer, self.attends, q, k, v, self._rope, self._head_norms, self._sinks
        )
        return self._o.add_to(stream, attended.flatten(1), self._post_norm)

    @cached_property
    def _head_norms(self) -> HeadNorms | None:
        if self._qk_norms is None:
            return None
        q, k = self._qk_norms
        return HeadNorms(q.value, k.value)


def attention_spec(context: LayerContext, layer: int) -> AttentionSpec:
    """Returns the AttentionSpec of this rank's heads in a layer."""
    spec = context.spec
    dims = context.dims
    num_kv_heads = max(spec.num_kv_heads // dims.tp, 1)
    return AttentionSpec(
        num_heads=spec.num_heads // dims.tp,
        num_kv_heads=num_kv_heads,
        first_kv_head=dims.tp_rank * spec.num_kv_heads // dims.tp,
        head_dim=spec.head_dim,
        scale=spec.attention_scale or spec.head_dim**-0.5,
        window=spec.windows[layer] if spec.windows else None,
        soft_cap=spec.attention_soft_cap,
        has_sinks=spec.has_sinks,
    )


def kv_part(context: LayerContext, module: str) -> Part:
    """Returns this rank's KV heads of a projection. If there are more ranks than KV heads, several
    ranks have the same head."""
    spec = context.spec
    dims = context.dims
    count = min(dims.tp, spec.num_kv_heads)
    index = dims.tp_rank * count // dims.tp
    return Part(module, spec.num_kv_heads * spec.head_dim, index, count)
