"""Ranks that come up together: values of all, errors of one, deadlines; each rank a thread."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from pdserve.parallel.bring_up import ALONE, RankFailed, RankGroup
from pdserve.parallel.dims import ParallelDims


def on_ranks(size: int, work: Callable[[RankGroup], Any]) -> list[Future[Any]]:
    """Start the work of each rank. Returns its results."""
    host = RankGroup.host(ParallelDims(tp=size))
    with ThreadPoolExecutor(size) as ranks:
        done = [ranks.submit(work, host)]
        for rank in range(1, size):
            dims = ParallelDims(tp=size, rank=rank)
            done.append(ranks.submit(_join, dims, host.address, work))
    return done


def _join(dims: ParallelDims, address: str, work: Callable[[RankGroup], Any]) -> Any:
    return work(RankGroup.join(dims, address))


def test_one_rank_agrees_with_itself() -> None:
    assert ALONE.is_alone and ALONE.agree("anything", 3) == [3]
    ALONE.check()
    with pytest.raises(OSError), ALONE.shared_fate():
        raise OSError("as it is")


def test_all_hear_the_values_of_all() -> None:
    def work(group: RankGroup) -> list[Any]:
        first = group.agree("first", {"rank": group.dims.rank})
        return [first, min(group.agree("second", 10 - group.dims.rank))]

    want = [[{"rank": rank} for rank in range(3)], 8]
    assert [found.result() for found in on_ranks(3, work)] == [want] * 3


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ValueError("engine.block_size is odd"), ValueError, "rank 1: engine.block_size is odd"),
        (OSError("no such file"), RankFailed, "rank 1: OSError: no such file"),
    ],
)
def test_an_error_of_one_is_an_error_of_all(
    error: Exception, kind: type[Exception], said: str
) -> None:
    def work(group: RankGroup) -> None:
        with group.shared_fate():
            if group.dims.rank == 1:
                raise error
            group.agree("weights")

    first, second, third = on_ranks(3, work)
    for other in (first, third):
        with pytest.raises(kind, match=said):
            other.result()
    assert second.exception() is error


def test_what_only_follows_from_another_ranks_error_gives_way_to_it() -> None:
    """A collective breaks off when the process of a rank that failed is gone."""

    def work(group: RankGroup) -> None:
        with group.shared_fate():
            if group.dims.rank:
                time.sleep(0.1)
                raise ValueError("the real one")
            raise RuntimeError("connection closed by peer")

    first, _ = on_ranks(2, work)
    # rank 0 told its own first: whoever is first is heard, and it is rank 0's here
    assert isinstance(first.exception(), RuntimeError)

    def cause_first(group: RankGroup) -> None:
        with group.shared_fate():
            if group.dims.rank:
                raise ValueError("the real one")
            time.sleep(0.2)
            raise RuntimeError("connection closed by peer")

    first, _ = on_ranks(2, cause_first)
    with pytest.raises(ValueError, match="rank 1: the real one"):
        first.result()


def test_a_rank_that_is_late_is_named() -> None:
    def work(group: RankGroup) -> None:
        if group.dims.rank != 2:
            group.agree("graphs", deadline_s=0.2)

    first, second, _ = on_ranks(3, work)
    for waiting in (first, second):
        with pytest.raises(RankFailed, match="rank 2 was not through the phase 'graphs' within"):
            waiting.result()


def test_what_is_learnt_elsewhere_ends_the_wait() -> None:
    ended = threading.Event()

    def watch() -> None:
        if ended.is_set():
            raise RankFailed("rank 1 ended with status 9")

    group = RankGroup.host(ParallelDims(tp=2), watch=watch)
    threading.Timer(0.1, ended.set).start()
    began = time.monotonic()
    with pytest.raises(RankFailed, match="status 9"):
        group.agree("config")
    assert time.monotonic() - began < 2.0
