"""Gemma 2 and 3: norms come before and after attention and MLP. The rest is in ModelSpec."""

from pdserve.models.architectures.llama import Layer, Llama
from pdserve.models.layers.attention import Attention
from pdserve.models.layers.context import LayerContext
from pdserve.models.layers.mlp import GatedMlp
from pdserve.models.layers.norm import RmsNorm
from pdserve.models.step_context import RopeTables


class _Layer(Layer):
    def __init__(self, context: LayerContext, layer: int, rope: RopeTables) -> None:
        module = context.layer_module(layer)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(context, f"{module}.{name}_layernorm", context.spec.hidden_size)

        self.attention = Attention(
            context, layer, f"{module}.self_attn", rope, norm("input"), norm("post_attention")
        )
        self._mlp = GatedMlp(
            context, f"{module}.mlp", norm("pre_feedforward"), norm("post_feedforward")
        )


class Gemma(Llama):
    layer = _Layer
