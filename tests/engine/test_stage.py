"""How rows reach and leave a stage, with a pipe that CUDA graphs can hold and with one that they
cannot."""

import pytest
import torch
from torch import Tensor

from pdserve.engine.execution.stage import ALL_LAYERS, Stage
from pdserve.parallel.dims import ParallelDims

WIDTH = 4


class Recorded:
    """A pipe that receives ones and notes what is sent."""

    def __init__(self, landing: Tensor | None) -> None:
        self.landing = landing
        self.received: list[int] = []
        self.sent: list[Tensor] = []

    def send(self, rows: Tensor) -> None:
        self.sent.append(rows)

    def recv(self, num_rows: int) -> Tensor:
        self.received.append(num_rows)
        rows = torch.ones(num_rows, WIDTH) if self.landing is None else self.landing[:num_rows]
        return rows.fill_(1.0)

    def flush(self) -> None: ...

    def call_off(self) -> None: ...

    def check(self) -> None: ...


def middle(landing: Tensor | None) -> tuple[Stage, Recorded]:
    pipe = Recorded(landing)
    return Stage(ParallelDims(pp=3, rank=1), pipe), pipe


@pytest.mark.parametrize("landing", [None, torch.zeros(8, WIDTH)])
def test_a_step_without_a_graph_takes_and_gives(landing: Tensor | None) -> None:
    stage, pipe = middle(landing)
    rows = stage.take(3)
    assert rows is not None and torch.equal(rows, torch.ones(3, WIDTH))
    stage.give(rows)
    assert pipe.received == [3] and pipe.sent == [rows]


def test_a_graph_holds_what_its_pipe_does() -> None:
    stage, pipe = middle(None)
    rows = stage.take_in_graph(5)
    assert rows is not None
    stage.give_in_graph(rows)
    assert pipe.received == [5] and len(pipe.sent) == 1
    stage.before_replay(5)
    stage.after_replay(rows)
    assert pipe.received == [5] and len(pipe.sent) == 1, "they are in the graph"


def test_rows_come_before_a_replay_and_leave_after_it() -> None:
    landing = torch.zeros(8, WIDTH)
    stage, pipe = middle(landing)
    rows = stage.take_in_graph(5)
    assert rows is not None and rows.data_ptr() == landing.data_ptr() and rows.shape == (5, WIDTH)
    hidden = torch.full((5, WIDTH), 2.0)
    stage.give_in_graph(hidden)
    assert pipe.received == [] and pipe.sent == [], "nothing moves while a graph is captured"
    stage.before_replay(5)
    assert pipe.received == [5] and torch.equal(rows, torch.ones(5, WIDTH))
    stage.after_replay(hidden)
    hidden.fill_(3.0)  # the next replay
    assert torch.equal(pipe.sent[0], torch.full((5, WIDTH), 2.0))


def test_the_ends_of_the_pipeline_take_nothing_and_give_nothing() -> None:
    landing = torch.zeros(0, WIDTH)
    first, last = (Recorded(landing) for _ in range(2))
    begins = Stage(ParallelDims(pp=2, rank=1), first)
    ends = Stage(ParallelDims(pp=2, rank=0), last)
    assert begins.take(2) is None and begins.take_in_graph(2) is None
    begins.before_replay(2)
    ends.give(torch.ones(2, WIDTH))
    ends.after_replay(torch.ones(2, WIDTH))
    assert first.received == [] and last.sent == []
    assert ALL_LAYERS.take(2) is None
    ALL_LAYERS.give(torch.ones(2, WIDTH))
