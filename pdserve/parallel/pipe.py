"""A pipe brings rows from one stage of a pipeline to the next.

Rows come in the order that they were sent, to the rank of the next stage that has the same place in
tensor parallelism. Both sides know their number from the step's message. Knows no model.
"""

from collections import deque
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work


class Pipe(Protocol):
    """Between this rank's stage and its neighbours."""

    def send(self, rows: Tensor) -> None:
        """`[T, width]` to the next stage, waiting for nobody. The rows are not written to after."""
        ...

    def recv(self, num_rows: int) -> Tensor:
        """`[num_rows, width]` of the stage before. RuntimeError when it is gone, or does not send
        within the group's time."""
        ...

    def flush(self) -> None:
        """Return when all that was sent has been asked for; a device is waited for otherwise."""
        ...

    def call_off(self) -> None:
        """Another rank is gone: what waits for it on the device ends. From any thread."""
        ...

    def check(self) -> None:
        """RuntimeError when what was received last is not valid. To be asked when the device has
        done it, before anything of it is used."""
        ...


class _NoPipe:
    """See `Pipe`: of a rank that has all layers."""

    def send(self, rows: Tensor) -> None:
        raise AssertionError("rows for another stage, but there is none")

    def recv(self, num_rows: int) -> Tensor:
        raise AssertionError("rows of another stage, but there is none")

    def flush(self) -> None:
        """Nothing was sent."""

    def call_off(self) -> None:
        """Nobody waits."""

    def check(self) -> None:
        """Nothing was received."""


NO_PIPE: Pipe = _NoPipe()


class GroupPipe:
    """Over a process group of torch along "pp": gloo's on CPU. Ranks are counted from the last
    stage (ParallelDims), so rows go to the rank before. max_steps: in flight at most; of a step
    that many before this one the rows have been received."""

    def __init__(self, group: ProcessGroup, width: int, dtype: torch.dtype, max_steps: int) -> None:
        self._group = group
        self._width = width
        self._dtype = dtype
        self._max_steps = max_steps
        self._sending: deque[tuple[Work, Tensor]] = deque()

    def send(self, rows: Tensor) -> None:
        while len(self._sending) > self._max_steps:
            self._sending.popleft()[0].wait()  # gloo's never tells before that it is done
        sent = rows.contiguous()
        work = self._group.send([sent], self._group.rank() - 1, 0)
        self._sending.append((work, sent))  # the rows are read when they are asked for

    def flush(self) -> None:
        while self._sending:
            self._sending.popleft()[0].wait()

    def recv(self, num_rows: int) -> Tensor:
        rows = torch.empty(num_rows, self._width, dtype=self._dtype)
        self._group.recv([rows], self._group.rank() + 1, 0).wait()
        return rows

    def call_off(self) -> None:
        """gloo's own time ends what waits, and the end of the other process does."""

    def check(self) -> None:
        """`recv` has raised."""
