"""Phi-3 and models that are built alike (Phi-3.5-mini, Phi-4, Phi-4-mini): a Llama whose checkpoint
stores q, k and v in one module, and gate and up in another."""

from pdserve.models.architectures.llama import Layer, Llama, Mlp
from pdserve.models.layers.attention import Attention
from pdserve.models.layers.context import LayerContext
from pdserve.models.layers.mlp import GatedMlp
from pdserve.models.layers.norm import RmsNorm
from pdserve.models.step_context import RopeTables


class _Layer(Layer):
    def make_attention(
        self, context: LayerContext, layer: int, rope: RopeTables, norm: RmsNorm
    ) -> Attention:
        module = f"{context.layer_module(layer)}.self_attn"
        return Attention(context, layer, module, rope, norm, is_fused=True)

    def make_mlp(self, context: LayerContext, layer: int, norm: RmsNorm) -> Mlp:
        return GatedMlp(context, f"{context.layer_module(layer)}.mlp", norm, is_fused=True)


class Phi3(Llama):
    layer = _Layer
