"""Counters by which the programs of a launch find out which of them is the last to arrive."""

import torch
from torch import Tensor

MAX_COUNTERS = 1024
_COUNTERS: dict[torch.device, Tensor] = {}


def arrivals(device: torch.device) -> Tensor:
    """Returns int32 `[MAX_COUNTERS]`, which are zeros between launches: the program that arrives
    last resets its counter. Therefore kernels with counters must not run in two streams of one
    device at once.
    """
    if (
        device.type == "cuda"
        and torch.cuda.is_current_stream_capturing()
        and device not in _COUNTERS
    ):
        # The graph zeroes them when it is replayed, not earlier, so it needs counters of its own.
        return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
    if device not in _COUNTERS:
        _COUNTERS[device] = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
    return _COUNTERS[device]
