"""Counters by which the programs of a launch find out who comes last."""

import torch
from torch import Tensor

MAX_COUNTERS = 1024
_COUNTERS: dict[torch.device, Tensor] = {}


def arrivals(device: torch.device) -> Tensor:
    """int32 `[MAX_COUNTERS]`, zeros between launches: who comes last sets its counter back. That is
    why kernels with counters must not run in two streams of one device at once.
    """
    if (
        device.type == "cuda"
        and torch.cuda.is_current_stream_capturing()
        and device not in _COUNTERS
    ):
        # zeroed by the graph, not before: its own
        return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
    if device not in _COUNTERS:
        _COUNTERS[device] = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
    return _COUNTERS[device]
