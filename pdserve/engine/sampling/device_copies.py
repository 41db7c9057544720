"""Copies between host and device that nothing waits for: many small arrays in one copy, and results
on their way back.

On CPU nothing is copied. Knows nothing of the contents. Used by the sampler and by the objects that
it returns.
"""

from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor


class HostCopy:
    """Device tensors on their way to the host. `tensors()` waits for these copies, and for nothing
    that was queued after them."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = tensors
        device = tensors[0].device
        if device.type == "cuda":
            # Torch does not reuse pinned memory before the copies into it are done.
            self._tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for target, source in zip(self._tensors, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            # The stream of the copies: another thread's device may be another one.
            self._event.record(torch.cuda.current_stream(device))

    def ready(self) -> bool:
        """True if `tensors` would not wait."""
        return self._event is None or self._event.query()

    def tensors(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


Name = TypeVar("Name", bound=Hashable)


def to_device_packed(arrays: Mapping[Name, np.ndarray], device: torch.device) -> dict[Name, Tensor]:
    """Put the arrays (of 4- or 8-byte numbers) on the device, as tensors. On CUDA this is one copy
    from pinned memory, which torch does not reuse before the copy is done.
    """
    if device.type != "cuda":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    starts = np.cumsum([0, *(-(-array.nbytes // 16) * 16 for array in arrays.values())]).tolist()
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    memory = packed.numpy()
    for start, array in zip(starts, arrays.values(), strict=False):
        memory[start : start + array.nbytes] = array.view(np.uint8)
    sent = packed.to(device, non_blocking=True)
    tensors = {}
    for start, (name, array) in zip(starts, arrays.items(), strict=False):
        tensors[name] = sent[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype)
    return tensors
