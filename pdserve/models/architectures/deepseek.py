"""DeepSeek V2 and V3: attention over latents. The first layers are dense, all later ones are
mixtures of experts.

The checkpoint has further layers after the last, which predict more tokens at once. They are not
loaded.
"""

from pdserve.models.architectures.llama import Llama
from pdserve.models.architectures.mixture import MixtureLayer
from pdserve.models.layers.context import LayerContext
from pdserve.models.layers.experts import ExpertNames
from pdserve.models.layers.latent_attention import LatentAttention
from pdserve.models.layers.norm import RmsNorm
from pdserve.models.step_context import RopeTables


class _Layer(MixtureLayer):
    names = ExpertNames(shared="mlp.shared_experts")

    def make_attention(
        self, context: LayerContext, layer: int, rope: RopeTables, norm: RmsNorm
    ) -> LatentAttention:
        return LatentAttention(
            context, layer, f"{context.layer_module(layer)}.self_attn", rope, norm
        )


class DeepSeek(Llama):
    layer = _Layer
