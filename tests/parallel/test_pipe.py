"""Rows from stage to stage: in order, of any number, ahead of whoever takes them; each rank a
thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pdserve.parallel.bring_up import RankGroup
from pdserve.parallel.dims import ParallelDims
from pdserve.parallel.groups import cpu_group
from pdserve.parallel.pipe import GroupPipe

WIDTH = 8
MAX_STEPS = 3


def on_stages(pp: int, work: Callable[[GroupPipe, ParallelDims], Any]) -> list[Future[Any]]:
    """Start the work of each rank. Returns its results."""
    host = RankGroup.host(ParallelDims(pp=pp))
    pipes = []  # what is sent is lost with the sender's

    def join(rank: int) -> Any:
        dims = ParallelDims(pp=pp, rank=rank)
        return run(RankGroup.join(dims, host.address))

    def run(group: RankGroup) -> Any:
        along = cpu_group(group, group.dims.ranks_along("pp"), 30.0)
        pipe = GroupPipe(along, WIDTH, torch.float32, MAX_STEPS)
        pipes.append(pipe)
        found = work(pipe, group.dims)
        pipe.flush()
        return found

    with ThreadPoolExecutor(pp) as ranks:
        return [ranks.submit(run, host), *(ranks.submit(join, rank) for rank in range(1, pp))]


def rows_of(step: int) -> torch.Tensor:
    """Every step has other rows, and another number of them: up to half a megabyte."""
    return torch.full((1 + step * step % 17 * 1000, WIDTH), float(step))


@pytest.mark.parametrize("pp", [2, 3])
def test_rows_come_in_order(pp: int) -> None:
    def work(pipe: GroupPipe, dims: ParallelDims) -> None:
        for step in range(40):
            rows = rows_of(step) if dims.is_first_stage else pipe.recv(len(rows_of(step)))
            assert torch.equal(rows, rows_of(step))
            if not dims.is_last_stage:
                pipe.send(rows)

    for done in on_stages(pp, work):
        done.result()


def test_a_stage_runs_ahead_as_far_as_steps_are_in_flight() -> None:
    sent = threading.Event()

    def work(pipe: GroupPipe, dims: ParallelDims) -> None:
        if dims.is_first_stage:
            for step in range(MAX_STEPS + 1):
                pipe.send(rows_of(step))
            sent.set()
        assert sent.wait(10.0)
        if dims.is_last_stage:
            for step in range(MAX_STEPS + 1):
                assert torch.equal(pipe.recv(len(rows_of(step))), rows_of(step))

    for done in on_stages(2, work):
        done.result()
