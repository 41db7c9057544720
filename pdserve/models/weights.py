"""Parameters that know how to fill themselves: from checkpoint tensors, or at random.

A Weight is one tensor made of one or more checkpoint tensors stacked along axis 0 (q, k, v; gate,
up), so fused matrices need no special case in the loader (nano-vllm's idea). WeightSet owns all
weights of a model. Knows no files and no architecture; models/llama.py declares weights,
models/loader.py fills them.
"""

from typing import Literal

import torch

from pdserve.models.dummy import fill_normal

Init = Literal["matrix", "bias", "ones"]
BIAS_STD = 0.02


class Weight:
    """One parameter, `data [sum of rows, *columns]`; `parts`: checkpoint name -> rows, in order of
    stacking."""

    def __init__(
        self,
        parts: dict[str, int],
        columns: tuple[int, ...],
        init: Init,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.data = torch.empty(sum(parts.values()), *columns, dtype=dtype, device=device)
        self.missing = set(parts)
        self._init = init
        self._slices = dict(zip(parts, self.data.split(list(parts.values())), strict=True))

    def part(self, name: str) -> torch.Tensor:
        """The rows (a view of `data`) that the checkpoint tensor `name` fills."""
        return self._slices[name]

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy checkpoint tensor `name` into its rows, converting dtype; ValueError on a wrong
        shape or integers"""
        target = self.part(name)
        if tensor.shape != target.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} in the checkpoint; config.json says "
                f"{list(target.shape)}"
            )
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ValueError(
                f"{name} is {tensor.dtype}: quantised checkpoints are not supported yet"
            )
        target.copy_(tensor)
        self.missing.discard(name)

    def draw(self, seed: int) -> None:
        """Random values under which activations keep their scale through any number of layers
        (norms are ones)."""
        for name, target in self._slices.items():
            if self._init == "ones":
                target.fill_(1.0)
            else:
                fill_normal(
                    target,
                    BIAS_STD if self._init == "bias" else target.shape[-1] ** -0.5,
                    f"{seed}/{name}",
                )
        self.missing.clear()


class WeightSet:
    """All weights of one model; `by_name` finds the one that holds a checkpoint tensor."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.all: list[Weight] = []
        self.by_name: dict[str, Weight] = {}

    def add(self, parts: dict[str, int], *columns: int, init: Init = "matrix") -> Weight:
        """A new, unfilled weight `[sum of rows, *columns]`."""
        weight = Weight(parts, columns, init, self.dtype, self.device)
        self.all.append(weight)
        self.by_name.update(dict.fromkeys(parts, weight))
        return weight

    def missing(self) -> list[str]:
        """Checkpoint names not loaded so far, sorted."""
        return sorted(name for weight in self.all for name in weight.missing)
