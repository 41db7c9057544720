"""The Llama family: Llama 2 and 3, Mistral, Qwen2 and Qwen3. ModelSpec has all their differences.
mixture.py and deepseek.py build on this file.

    ids -> embedding
        -> layers x [ norm, qkv (-> qk norm) -> attend -> o, add
                      -> norm, gate_up, gate -> down, add ]
        -> norm -> hidden -> lm_head -> logits

Tokens of all sequences of a step lie in one flat axis T. The model knows neither sequences,
positions nor the KV cache: `step.attend` rotates q and k, writes K and V and reads the past.
Arithmetic goes through Ops and the schemes of the weights, so CPU and GPU differ only there. All
work between two products is one op, so that kernels can fuse it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.kernels.collective.ops import Stream, finished
from pdserve.kernels.experts.placement import Placements
from pdserve.kernels.ops import Ops
from pdserve.models.config import ModelSpec
from pdserve.models.families import FAMILIES
from pdserve.models.layers.attention import Attention
from pdserve.models.layers.context import LayerContext
from pdserve.models.layers.embedding import Embedding, Head
from pdserve.models.layers.latent_attention import LatentAttention
from pdserve.models.layers.mlp import GatedMlp
from pdserve.models.layers.norm import RmsNorm
from pdserve.models.rope import rope_tables
from pdserve.models.step_context import RopeTables, StepContext
from pdserve.models.weights import WeightSet
from pdserve.parallel.dims import ParallelDims

Mlp = Callable[[Stream, StepContext], Stream]
"""The part of a layer that follows its attention."""


class Layer:
    """One decoder layer."""

    def __init__(self, context: LayerContext, layer: int, rope: RopeTables) -> None:
        module = context.layer_module(layer)
        width = context.spec.hidden_size
        norm = RmsNorm(context, f"{module}.input_layernorm", width)
        self.attention = self.make_attention(context, layer, rope, norm)
        norm = RmsNorm(context, f"{module}.post_attention_layernorm", width)
        self._mlp = self.make_mlp(context, layer, norm)

    def make_attention(
        self, context: LayerContext, layer: int, rope: RopeTables, norm: RmsNorm
    ) -> Attention | LatentAttention:
        """Makes the attention; norm is applied to the stream before it."""
        return Attention(context, layer, f"{context.layer_module(layer)}.self_attn", rope, norm)

    def make_mlp(self, context: LayerContext, layer: int, norm: RmsNorm) -> Mlp:
        """Makes the MLP; norm is applied to the stream before it."""
        return GatedMlp(context, f"{context.layer_module(layer)}.mlp", norm)

    def __call__(self, stream: Stream, step: StepContext) -> Stream:
        return self._mlp(self.attention(stream, step), step)


class Llama:
    """A CausalLM that declares its `weights` here; models/loader.py fills them.

    layer: the class of its layers. A family that differs in its layers alone is a subclass with
        another one.
    """

    layer: type[Layer] = Layer

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        dims: ParallelDims,
        placements: Placements | None = None,
    ) -> None:
        self.spec = spec
        self.weights = WeightSet(dtype, device)
        family = FAMILIES[spec.architecture]
        prefix = family.prefix
        context = LayerContext(spec, ops, self.weights, dims, placements=placements, prefix=prefix)
        held = dims.layers_of(spec.num_layers)
        self._embedding: Embedding | None = None
        if dims.is_first_stage or (dims.is_last_stage and spec.tie_embeddings):
            self._embedding = Embedding(context, f"{prefix}model.embed_tokens")
        ropes = {i: spec.rope_of(i) for i in held}
        tables = {
            rope: rope_tables(rope, spec.head_dim, spec.max_position, device)
            for rope in dict.fromkeys(ropes.values())
        }
        self._layers = {i: self.layer(context, i, tables[ropes[i]]) for i in held}
        self.attention = {i: layer.attention.attends for i, layer in self._layers.items()}
        self.expert_load = context.expert_load
        self._head: Head | None = None
        if dims.is_last_stage:
            norm = RmsNorm(context, f"{prefix}model.norm", spec.hidden_size)
            tied = self._embedding if spec.tie_embeddings else None
            self._head = Head(context, f"{prefix}lm_head", norm, tied)
        everywhere = range(spec.num_layers + spec.extra_layers)
        elsewhere = [f"{context.layer_module(i)}." for i in everywhere if i not in held]
        if self._embedding is None:
            elsewhere.append(f"{prefix}model.embed_tokens.")
        if self._head is None:
            elsewhere += [f"{prefix}model.norm.", f"{prefix}lm_head."]
        self.weights.elsewhere += (*elsewhere, *family.unused)

    def embed(self, ids: Tensor, step: StepContext) -> Stream:
        assert self._embedding is not None, "the first stage embeds"
        return self._embedding(ids, step)

    def forward(self, stream: Stream, step: StepContext) -> Stream:
        for number, layer in self._layers.items():
            if number in step.taps:
                stream = finished(stream)
                step.taps[number] = stream.clone()
            stream = layer(stream, step)
        return stream

    def hidden(self, stream: Stream) -> Tensor:
        assert self._head is not None, "the last stage has the last norm"
        return self._head.hidden(stream)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self._head is not None, "the last stage has the output matrix"
        return self._head.logits(hidden)
