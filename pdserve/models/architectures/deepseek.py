"""DeepSeek V2 and V3: attention over latents, and mixtures of experts after the first, dense
layers.

The layers after the last, which predict more tokens at once, are not loaded.
"""

import torch

from pdserve.kernels.ops import Ops
from pdserve.models.architectures.llama import Llama
from pdserve.models.architectures.mixture import MixtureLayer
from pdserve.models.config import ModelSpec
from pdserve.models.layers.context import LayerContext
from pdserve.models.layers.experts import ExpertNames
from pdserve.models.layers.latent_attention import LatentAttention
from pdserve.models.layers.norm import RmsNorm
from pdserve.models.step_context import RopeTables
from pdserve.parallel.dims import ParallelDims


class _Layer(MixtureLayer):
    names = ExpertNames(shared="mlp.shared_experts")

    def make_attention(
        self, context: LayerContext, layer: int, rope: RopeTables, norm: RmsNorm
    ) -> LatentAttention:
        return LatentAttention(context, layer, f"model.layers.{layer}.self_attn", rope, norm)


class DeepSeek(Llama):
    layer = _Layer

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        dims: ParallelDims,
    ) -> None:
        super().__init__(spec, dtype, device, ops, dims)
        last = spec.num_layers + spec.extra_layers
        self.weights.elsewhere += tuple(
            f"model.layers.{layer}." for layer in range(spec.num_layers, last)
        )
