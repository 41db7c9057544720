"""Mixtures of experts of the Llama kind: Mixtral, Qwen2-MoE and Qwen3-MoE.

A layer's MLP is a mixture, except for the layers that ModelSpec.experts lists as dense. The
families differ in ExpertSpec and in the names of their tensors.
"""

from pdserve.models.architectures.llama import Layer, Llama, Mlp
from pdserve.models.layers.context import LayerContext
from pdserve.models.layers.experts import ExpertMlp, ExpertNames
from pdserve.models.layers.norm import RmsNorm


class MixtureLayer(Layer):
    """A layer whose MLP may be a mixture."""

    names = ExpertNames()

    def make_mlp(self, context: LayerContext, layer: int, norm: RmsNorm) -> Mlp:
        spec = context.spec.experts
        if spec is None or layer in spec.dense_layers:
            return super().make_mlp(context, layer, norm)
        return ExpertMlp(context, layer, context.layer_module(layer), self.names, norm)


class _MixtralLayer(MixtureLayer):
    names = ExpertNames(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        gate="w1",
        up="w3",
        down="w2",
    )


class Mixtral(Llama):
    layer = _MixtralLayer


class QwenMoe(Llama):
    """The models that are called Qwen2-MoE and Qwen3-MoE."""

    layer = MixtureLayer
