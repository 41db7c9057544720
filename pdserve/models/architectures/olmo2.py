"""OLMo 2: norms come after attention and MLP, none before. One norm covers all heads of q, another
all heads of k."""

from pdserve.models.architectures.llama import Layer, Llama
from pdserve.models.layers.attention import Attention
from pdserve.models.layers.context import LayerContext
from pdserve.models.layers.mlp import GatedMlp
from pdserve.models.layers.norm import RmsNorm
from pdserve.models.step_context import RopeTables


class _Layer(Layer):
    def __init__(self, context: LayerContext, layer: int, rope: RopeTables) -> None:
        module = context.layer_module(layer)
        width = context.spec.hidden_size
        norm = RmsNorm(context, f"{module}.post_attention_layernorm", width)
        self.attention = Attention(context, layer, f"{module}.self_attn", rope, None, norm)
        norm = RmsNorm(context, f"{module}.post_feedforward_layernorm", width)
        self._mlp = GatedMlp(context, f"{module}.mlp", None, norm)


class Olmo2(Llama):
    layer = _Layer
