"""Marks moments of the device's work, to wait for and to measure times between. Knows nothing of
the work itself."""

import torch


class Fence:
    """A moment of the device's work. Make it when that work has been queued. On CPU it has already
    passed."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def ready(self) -> bool:
        """True if everything queued before the fence is done."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "Fence") -> float:
        """Device time between two fences that are ready; 0 on CPU."""
        if self._event is None or earlier._event is None:
            return 0.0
        return earlier._event.elapsed_time(self._event) / 1000
