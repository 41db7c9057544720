"""ParallelDims: where a rank stands on each axis, and what is refused with number and name."""

import dataclasses
import itertools

import pytest

from pdserve.parallel.dims import AXES, ParallelDims


def test_one_rank() -> None:
    dims = ParallelDims()
    assert (dims.world_size, dims.tp_rank) == (1, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        dims.tp = 2  # type: ignore[misc]


@pytest.mark.parametrize("name", AXES)
def test_a_degree_is_at_least_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        ParallelDims(**{name: 0})


def test_rank_outside_the_world() -> None:
    with pytest.raises(ValueError, match="rank=1 is outside the 1 rank"):
        ParallelDims(rank=1)


def test_experts_are_shared_by_the_ranks_of_a_stage() -> None:
    with pytest.raises(ValueError, match=r"ep=4 must divide tp \* dp = 2"):
        ParallelDims(tp=2, ep=4)


@pytest.mark.parametrize(("tp", "pp", "dp"), itertools.product((1, 2, 3), repeat=3))
def test_ranks_are_numbered_tensor_first(tp: int, pp: int, dp: int) -> None:
    places = [
        (d.pp_rank, d.dp_rank, d.tp_rank)
        for d in (ParallelDims(tp, pp, dp, rank=rank) for rank in range(tp * pp * dp))
    ]
    assert places == list(itertools.product(range(pp), range(dp), range(tp)))


def test_ranks_along_an_axis_differ_there_alone() -> None:
    dims = ParallelDims(tp=2, pp=2, dp=3, ep=6, rank=9)  # stage 1, second of three, tp rank 1
    assert (dims.pp_rank, dims.dp_rank, dims.tp_rank) == (1, 1, 1)
    assert dims.ranks_along("tp") == (8, 9)
    assert dims.ranks_along("dp") == (7, 9, 11)
    assert dims.ranks_along("pp") == (3, 9)
    assert dims.ranks_along("ep") == (6, 7, 8, 9, 10, 11)
