"""The share of a model's layers that one rank has, and how rows reach and leave it.

If CUDA graphs cannot send and receive, the rows come before a replay and leave after it. Used by
the model runner.
"""

from dataclasses import dataclass, field

from torch import Tensor

from pdserve.parallel.dims import ParallelDims
from pdserve.parallel.pipe import NO_PIPE, Pipe


@dataclass(frozen=True)
class Stage:
    """A rank's stage. pipe: sends rows to the next stage and receives from the previous one."""

    dims: ParallelDims = field(default_factory=ParallelDims)
    pipe: Pipe = NO_PIPE

    def take(self, num_rows: int) -> Tensor | None:
        """Takes the rows of the previous stage, `[num_rows, width]`; None on the first stage."""
        return None if self.dims.is_first_stage else self.pipe.recv(num_rows)

    def give(self, hidden: Tensor) -> None:
        """Gives the rows to the next stage, if there is one."""
        if not self.dims.is_last_stage:
            self.pipe.send(hidden)

    def take_in_graph(self, num_rows: int) -> Tensor | None:
        """Does what `take` does, inside a graph."""
        if self.pipe.landing is None or self.dims.is_first_stage:
            return self.take(num_rows)
        return self.pipe.landing[:num_rows]

    def give_in_graph(self, hidden: Tensor) -> None:
        """Does what `give` does, inside a graph."""
        if self.pipe.landing is None:
            self.give(hidden)

    def before_replay(self, num_rows: int) -> None:
        """Takes what a graph reads but does not take itself."""
        if self.pipe.landing is not None:
            self.take(num_rows)

    def after_replay(self, hidden: Tensor) -> None:
        """Gives what a graph has computed and does not give itself. The next replay may overwrite
        `hidden`."""
        if self.pipe.landing is not None:
            self.give(hidden.clone())


ALL_LAYERS = Stage()
