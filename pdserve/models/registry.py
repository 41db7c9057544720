"""Which class computes which architecture, and what the engine may ask of any model.

A new family is one file and one line here (and one in models/config.py, which reads its
configuration). Called by models/loader.py.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from pdserve.kernels.ops import Ops
from pdserve.models.config import ModelSpec
from pdserve.models.llama import Attend, Llama
from pdserve.models.weights import WeightSet
from pdserve.parallel.dims import ParallelDims


class CausalLM(Protocol):
    """A decoder-only language model; shapes in models/llama.py."""

    spec: ModelSpec
    weights: WeightSet

    def forward(self, input_ids: torch.Tensor, attend: Attend) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


Builder = Callable[[ModelSpec, torch.dtype, torch.device, Ops, ParallelDims], CausalLM]

BUILDERS: dict[str, Builder] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Llama,
    "Qwen3ForCausalLM": Llama,
}
