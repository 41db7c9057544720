"""A second stream of a device, whose work goes on beside later work of the current stream.

In a CUDA graph it becomes a branch, which must be joined before the capture ends. This file knows
no kernel.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class Aside:
    """Holds up to `count` pieces of work at a time, which run one after another. Each has a number,
    by which it is waited for. On a CPU all work is done at once."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._held: list[Tensor | None] = [None] * count
        if device.type == "cuda":
            # Its programs are few, and go before those of a product that wait for room.
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._given = torch.cuda.Event()
            self._done = [torch.cuda.Event() for _ in range(count)]

    def do(self, number: int, work: Callable[[], None], reads: Tensor) -> None:
        """Does work after all that the current stream has been given. The memory of `reads`, which
        the work reads, is kept from others until the current stream has joined the work."""
        self.join(number)
        if self._stream is None:
            work()
            return
        self._given.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._given)
        self._held[number] = reads
        try:
            with torch.cuda.stream(self._stream):
                work()
        finally:
            self._done[number].record(self._stream)

    def join(self, number: int) -> None:
        """Makes the current stream wait for this work before it goes on. Does nothing if there was
        no work since the last join."""
        if self._held[number] is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done[number])
            self._held[number] = None
