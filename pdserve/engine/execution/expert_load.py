"""How many rows each expert got, counted on the device: copied to the host without waiting.

Kept by each rank for the layers that it has, for metrics and for whoever places experts. The counts
are those of all tokens that the experts see; ranks of tensor parallelism count alike.
"""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from pdserve.engine.sampling.device_copies import HostCopy


class ExpertLoad:
    """counts: of each layer that is a mixture, int64 `[num_experts]` on the device, which only
    grow. `latest` may be asked for by another thread than the rest."""

    def __init__(self, counts: Mapping[int, Tensor]) -> None:
        self._counts = counts
        self._copy = HostCopy(list(counts.values()))
        self._latest = self._fetch()

    def latest(self) -> dict[int, np.ndarray]:
        """Counts by layer, of all steps before the last call that found a copy done, or those that
        `clear` has just forgotten; never waits."""
        if self._copy.ready():
            self._latest = self._fetch()
            self._copy = HostCopy(list(self._counts.values()))
        return self._latest

    def now(self) -> dict[int, np.ndarray]:
        """Counts by layer, of all steps so far; waits for the device."""
        self._copy = HostCopy(list(self._counts.values()))
        return self._fetch()

    def clear(self) -> None:
        """Nothing that was counted so far counts."""
        for count in self._counts.values():
            count.zero_()
        self._latest = {layer: np.zeros_like(count) for layer, count in self._latest.items()}
        self._copy = HostCopy(list(self._counts.values()))

    def _fetch(self) -> dict[int, np.ndarray]:
        found = [count.numpy().copy() for count in self._copy.tensors()]
        return dict(zip(self._counts, found, strict=True))
