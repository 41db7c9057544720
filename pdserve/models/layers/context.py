"""The context that every layer is made with. Made by a model, passed to all of its layers."""

from dataclasses import dataclass, field

from torch import Tensor

from pdserve.kernels.experts.placement import Placements
from pdserve.kernels.ops import Ops
from pdserve.models.config import ModelSpec
from pdserve.models.weights import WeightSet
from pdserve.parallel.dims import ParallelDims


@dataclass(frozen=True)
class LayerContext:
    """weights: where layers declare theirs. dims: of which they hold this rank's share.
    expert_load: where layers that are mixtures leave their counts, see CausalLM. placements: of
    each such layer, which ranks of a stage hold which experts whole; None: all ranks of tensor
    parallelism hold a part of each. prefix: of all modules' names in the checkpoint."""

    spec: ModelSpec
    ops: Ops
    weights: WeightSet
    dims: ParallelDims
    expert_load: dict[int, Tensor] = field(default_factory=dict)
    placements: Placements | None = None
    prefix: str = ""

    def layer_module(self, layer: int) -> str:
        """Its name in the checkpoint."""
        return f"{self.prefix}model.layers.{layer}"
