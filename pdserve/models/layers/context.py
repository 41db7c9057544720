"""The context with which every layer is made. A model makes one and passes it to its layers."""

from dataclasses import dataclass, field

from torch import Tensor

from pdserve.kernels.experts.placement import Placements
from pdserve.kernels.ops import Ops
from pdserve.models.config import ModelSpec
from pdserve.models.weights import WeightSet
from pdserve.parallel.dims import ParallelDims


@dataclass(frozen=True)
class LayerContext:
    """The context of a model's layers.

    weights: the set in which layers declare their weights.
    dims: says which share of them this rank holds.
    expert_load: the dict in which layers that are mixtures put their counts, see CausalLM.
    placements: for each mixture, which ranks of a stage hold which experts whole; None: all ranks
        of tensor parallelism hold a part of each expert.
    prefix: prefix of all module names in the checkpoint.
    """

    spec: ModelSpec
    ops: Ops
    weights: WeightSet
    dims: ParallelDims
    expert_load: dict[int, Tensor] = field(default_factory=dict)
    placements: Placements | None = None
    prefix: str = ""

    def layer_module(self, layer: int) -> str:
        """Returns the layer's name in the checkpoint."""
        return f"{self.prefix}model.layers.{layer}"
