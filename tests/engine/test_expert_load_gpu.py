"""Copies of the load of experts on GPUs: nothing waits for them but who wants their counts."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pdserve.engine.execution.expert_load import ExpertLoad, LoadCopy

pytestmark = pytest.mark.gpu

BUSY_CYCLES = 1_000_000_000  # more than half a second
AT_ONCE_S = 0.2


def busy_counts(device: str) -> ExpertLoad:
    """Returns counts that a step in flight makes 5."""
    with torch.cuda.device(device):
        counts = torch.zeros(8, dtype=torch.int64, device=device)
        load = ExpertLoad({3: counts})
        counts += 0  # loads its kernel now: a first use waits for the device
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
        counts += 5
    return load


def assert_follows_the_step(copy: LoadCopy) -> None:
    assert not copy.ready()
    assert copy.counts()[3].tolist() == [5] * 8
    assert copy.ready()


def test_a_copy_is_queued_without_a_wait() -> None:
    load = busy_counts("cuda:0")
    began = time.perf_counter()
    copy = load.start_copy()
    assert time.perf_counter() - began < AT_ONCE_S
    assert_follows_the_step(copy)


@pytest.mark.multigpu
def test_a_thread_that_knows_no_device_copies_from_the_right_one() -> None:
    """A link's thread does so in a process that sees the GPUs of several ranks."""
    load = busy_counts("cuda:1")
    with ThreadPoolExecutor(1) as thread:
        assert_follows_the_step(thread.submit(load.start_copy).result())
