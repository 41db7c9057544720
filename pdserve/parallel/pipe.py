"""A pipe brings rows from one stage of a pipeline to the next.

Rows arrive in the order in which they were sent, at the rank of the next stage with the same place
in tensor parallelism. Both sides know the number of rows from the step's message. Knows no model.
"""

from collections import deque
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work


class Pipe(Protocol):
    """Connects this rank's stage with its neighbours.

    landing: `[rows, width]`, whose first rows are those of the last `recv`, for CUDA graphs that
        read them, because such a graph cannot send or receive. None: it can.
    """

    landing: Tensor | None

    def send(self, rows: Tensor) -> None:
        """Send `[T, width]` to the next stage, waiting for nobody. The rows must not be written to
        afterwards."""
        ...

    def recv(self, num_rows: int) -> Tensor:
        """Receive `[num_rows, width]` from the previous stage. RuntimeError if it is gone, or does
        not send within the group's time."""
        ...

    def flush(self) -> None:
        """Return when everything that was sent has been received. Does not wait for a device."""
        ...

    def call_off(self) -> None:
        """End what waits on the device for another rank, which is gone. May be called from any
        thread."""
        ...

    def check(self) -> None:
        """RuntimeError if what was received last is not valid. Call it when the device has done
        the step, before anything of it is used."""
        ...


class _NoPipe:
    """The Pipe of a rank that has all layers."""

    landing: Tensor | None = None

    def send(self, rows: Tensor) -> None:
        raise AssertionError("rows for another stage, but there is none")

    def recv(self, num_rows: int) -> Tensor:
        raise AssertionError("rows of another stage, but there is none")

    def flush(self) -> None:
        """Do nothing, because nothing was sent."""

    def call_off(self) -> None:
        """Do nothing, because nobody waits."""

    def check(self) -> None:
        """Do nothing, because nothing was received."""


NO_PIPE: Pipe = _NoPipe()


class GroupPipe:
    """A Pipe over a process group of torch along "pp", which is gloo's on CPU. Ranks are counted
    from the last stage (ParallelDims), so rows go to the rank one lower. max_steps: maximum number
    of steps in flight. The rows of a step max_steps earlier have been received."""

    landing: Tensor | None = None

    def __init__(self, group: ProcessGroup, width: int, dtype: torch.dtype, max_steps: int) -> None:
        self._group = group
        self._width = width
        self._dtype = dtype
        self._max_steps = max_steps
        self._sending: deque[tuple[Work, Tensor]] = deque()

    def send(self, rows: Tensor) -> None:
        while len(self._sending) > self._max_steps:
            self._sending.popleft()[0].wait()  # gloo does not report the end of a send earlier
        sent = rows.contiguous()
        work = self._group.send([sent], self._group.rank() - 1, 0)
        self._sending.append((work, sent))  # gloo reads the rows when they are asked for

    def flush(self) -> None:
        while self._sending:
            self._sending.popleft()[0].wait()

    def recv(self, num_rows: int) -> Tensor:
        rows = torch.empty(num_rows, self._width, dtype=self._dtype)
        self._group.recv([rows], self._group.rank() + 1, 0).wait()
        return rows

    def call_off(self) -> None:
        """Do nothing. gloo's own timeout ends what waits, and so does the end of the other
        process."""

    def check(self) -> None:
        """Do nothing, because `recv` has already raised."""
