"""A second stream of a device, on which work goes on beside what the current stream is given next.

In a CUDA graph it becomes a branch, which must be joined before the capture ends. Knows no kernel.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class Aside:
    """Does up to `count` pieces of work at a time, one after another; each has a number, by which
    it is waited for. On a CPU everything is done at once."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._held: list[Tensor | None] = [None] * count
        if device.type == "cuda":
            # its programs are few and come before those of a product that wait for room
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._given = torch.cuda.Event()
            self._done = [torch.cuda.Event() for _ in range(count)]

    def do(self, number: int, work: Callable[[], None], reads: Tensor) -> None:
        """Work comes after all that the current stream has been given. What it reads is kept from
        others until the current stream has joined it."""
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
        """What the current stream is given next comes after this work, if there was any since it
        was joined last."""
        if self._held[number] is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done[number])
            self._held[number] = None

    def is_captured(self) -> bool:
        """Whether a CUDA graph is being made of the current stream."""
        return self._stream is not None and torch.cuda.is_current_stream_capturing()
