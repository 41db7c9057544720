"""Rows that stages send into each other's memory: the kernels in Triton's interpreter, each stage a
process, over memory that they share."""

import ctypes
import mmap
import os
import time
import traceback
from collections.abc import Callable

import pytest
import torch

from pdserve.kernels.collective.faults import Faults
from pdserve.kernels.collective.peer_pipe import PeerPipe, PipeLayout

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="its stages share memory of the host, in the interpreter"
)

WIDTH, MOST, STAGES = 48, 20, 3
ROWS = (1, MOST, 3, 3, 17, 1, MOST, MOST, 5)
LAYOUT = PipeLayout(WIDTH, torch.bfloat16, MOST, chunk=256)


class Stages:
    """Memory that the stages of this machine share, as they would their GPUs'."""

    def __init__(self) -> None:
        self._regions = [mmap.mmap(-1, LAYOUT.num_bytes) for _ in range(STAGES)]
        self._addresses = torch.tensor(
            [ctypes.addressof(ctypes.c_char.from_buffer(region)) for region in self._regions]
        )

    def pipe(self, stage: int, limit: int = 40_000, fault: int = 0) -> PeerPipe:
        faults = Faults(torch.tensor([fault], dtype=torch.int32), torch.device("cpu"))
        next_one = self._addresses[stage + 1] if stage + 1 < STAGES else None
        previous = self._addresses[stage - 1] if stage else None
        made = PeerPipe(LAYOUT, self._addresses[stage], next_one, previous, faults, memory=self)
        made.limit = limit
        return made


def rows_of(call: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(call)
    return torch.randn(ROWS[call], WIDTH, generator=chance).to(torch.bfloat16)


def started(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def test_rows_go_from_stage_to_stage_and_nobody_overtakes() -> None:
    """The last stage is slow: the others wait for what it has not read."""
    stages = Stages()

    def first() -> None:
        pipe = stages.pipe(0)
        for call in range(len(ROWS)):
            pipe.send(rows_of(call))
        pipe.check()

    def middle() -> None:
        pipe = stages.pipe(1)
        for rows in ROWS:
            pipe.send(pipe.recv(rows) * 2)
        pipe.check()

    children = [started(first), started(middle)]
    try:
        pipe = stages.pipe(2)
        for call, rows in enumerate(ROWS):
            time.sleep(0.02)
            assert torch.equal(pipe.recv(rows), rows_of(call) * 2), call
        pipe.check()
    finally:
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]


def test_a_stage_that_sends_nothing_or_takes_nothing_is_noticed() -> None:
    stages = Stages()
    taking = stages.pipe(2, limit=200)
    taking.recv(2)
    with pytest.raises(RuntimeError, match="did not answer in time"):
        taking.check()
    sending = stages.pipe(0, limit=200)
    sending.send(rows_of(0))
    sending.check()  # one call ahead
    sending.send(rows_of(2))
    with pytest.raises(RuntimeError, match="did not answer in time"):
        sending.check()
    before = bytes(stages._regions[1])
    sending.send(rows_of(1))
    assert bytes(stages._regions[1]) == before, "who has missed a stage sends no more"


def test_the_host_ends_a_wait() -> None:
    pipe = Stages().pipe(1, limit=1 << 40)
    pipe.call_off()
    pipe.recv(3)
    with pytest.raises(RuntimeError, match="did not answer"):
        pipe.check()


def test_what_does_not_fit_is_refused() -> None:
    pipe = Stages().pipe(1)
    with pytest.raises(ValueError, match=r"48 wide and at most 20, not torch.bfloat16 \[21, 48\]"):
        pipe.send(torch.zeros(MOST + 1, WIDTH, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"must be torch.bfloat16, .* not torch.float32 \[1, 48\]"):
        pipe.send(torch.zeros(1, WIDTH))
    with pytest.raises(ValueError, match="at most 20"):
        pipe.recv(MOST + 1)
