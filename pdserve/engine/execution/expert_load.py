"""Counts how many rows each expert got, on the device, and copies the counts to the host without
waiting.

Each rank keeps the counts of its own layers, for metrics and for placing experts. They include all
tokens that the experts see. Ranks of tensor parallelism have equal counts.
"""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from pdserve.engine.sampling.device_copies import HostCopy


class LoadCopy:
    """Counts by layer on their way to the host. `counts` waits for these copies, and for nothing
    that was queued after them."""

    def __init__(self, counts: Mapping[int, Tensor]) -> None:
        self._layers = tuple(counts)
        self._copy = HostCopy(list(counts.values()))

    def ready(self) -> bool:
        """True if `counts` would not wait."""
        return self._copy.ready()

    def counts(self) -> dict[int, np.ndarray]:
        """Int64 `[num_experts]` for each layer."""
        found = [count.numpy().copy() for count in self._copy.tensors()]
        return dict(zip(self._layers, found, strict=True))


class ExpertLoad:
    """Rows per expert, for each layer that is a mixture of experts. `latest` may be called by
    another thread than the rest, and `start_copy` by any thread.

    counts: by layer, int64 `[num_experts]` on the device. They only grow.
    """

    def __init__(self, counts: Mapping[int, Tensor]) -> None:
        self._counts = counts
        self._copy = LoadCopy(counts)
        self._latest = self._copy.counts()

    def start_copy(self) -> LoadCopy:
        """Queues a copy of the counts after all steps that are queued so far. Never waits."""
        return LoadCopy(self._counts)

    def latest(self) -> dict[int, np.ndarray]:
        """Counts by layer. They cover all steps before the last call that found a copy done, or
        they are zeros after `clear`. Never waits."""
        if self._copy.ready():
            self._latest = self._copy.counts()
            self._copy = self.start_copy()
        return self._latest

    def now(self) -> dict[int, np.ndarray]:
        """Counts by layer of all steps so far; waits for the device."""
        self._copy = self.start_copy()
        return self._copy.counts()

    def clear(self) -> None:
        """Set all counts to zero."""
        for count in self._counts.values():
            count.zero_()
        self._latest = {layer: np.zeros_like(count) for layer, count in self._latest.items()}
        self._copy = self.start_copy()
