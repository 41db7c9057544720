"""GLM-4: a Llama in which half of each head is rotated, by neighbours, and in which the checkpoint
has gate and up in one module. The newer models (Glm4) also norm the results of attention and MLP.
"""

from pdserve.models.architectures.llama import Layer, Llama, Mlp
from pdserve.models.layers.attention import Attention
from pdserve.models.layers.context import LayerContext
from pdserve.models.layers.mlp import GatedMlp
from pdserve.models.layers.norm import RmsNorm
from pdserve.models.step_context import RopeTables


class _GlmLayer(Layer):
    def make_mlp(self, context: LayerContext, layer: int, norm: RmsNorm) -> Mlp:
        return GatedMlp(context, f"{context.layer_module(layer)}.mlp", norm, is_fused=True)


class _Glm4Layer(Layer):
    def make_attention(
        self, context: LayerContext, layer: int, rope: RopeTables, norm: RmsNorm
    ) -> Attention:
        module = context.layer_module(layer)
        post_norm = RmsNorm(context, f"{module}.post_self_attn_layernorm", context.spec.hidden_size)
        return Attention(context, layer, f"{module}.self_attn", rope, norm, post_norm)

    def make_mlp(self, context: LayerContext, layer: int, norm: RmsNorm) -> Mlp:
        module = context.layer_module(layer)
        post_norm = RmsNorm(context, f"{module}.post_mlp_layernorm", context.spec.hidden_size)
        return GatedMlp(context, f"{module}.mlp", norm, post_norm, is_fused=True)


class Glm(Llama):
    layer = _GlmLayer


class Glm4(Llama):
    layer = _Glm4Layer
