"""`CausalLM` is what the engine may ask of any model; `builder_of` finds the class that computes a
model.

This file knows the rows of models/families.py. models/loader.py calls it.
"""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Protocol

import torch
from torch import Tensor

from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.collective.ops import Stream
from pdserve.kernels.experts.placement import Placements
from pdserve.kernels.ops import Ops
from pdserve.models.config import ModelSpec
from pdserve.models.families import FAMILIES
from pdserve.models.step_context import StepContext
from pdserve.models.weights import WeightSet
from pdserve.parallel.dims import ParallelDims


class CausalLM(Protocol):
    """A decoder-only language model, or a rank's share of one. A stage may hold some of its layers;
    the first and the last stage also hold the two ends.

    attention: how each of its layers attends with this rank's heads, by the layer's number in the
        whole model.
    expert_load: for layers that are mixtures, the rows that went to each expert, int64
        `[num_experts]`.

    A step has T rows, N of which get logits. The model does not pad them: if Ops needs padded rows
    (on CPU), the caller pads.
    """

    spec: ModelSpec
    weights: WeightSet
    attention: Mapping[int, AttentionSpec]
    expert_load: Mapping[int, Tensor]

    def embed(self, ids: Tensor, step: StepContext) -> Stream:
        """Computes `ids [T]` -> `[T, hidden]`; only on the first stage."""
        ...

    def forward(self, stream: Stream, step: StepContext) -> Stream:
        """Passes the stream through the layers that are here, which may overwrite it."""
        ...

    def hidden(self, stream: Stream) -> Tensor:
        """Returns `[T, hidden]` after the last norm; only on the last stage."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes `hidden [N, hidden]` -> `[N, vocab]`, in the model's dtype; only on the last
        stage."""
        ...


Builder = Callable[
    [ModelSpec, torch.dtype, torch.device, Ops, ParallelDims, Placements | None], CausalLM
]


def builder_of(spec: ModelSpec) -> Builder:
    return resolve_name(f"pdserve.models.architectures.{FAMILIES[spec.architecture].builder}")
