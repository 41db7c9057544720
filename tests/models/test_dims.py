"""ParallelDims: one rank works, everything else is refused with the number and the name."""

import dataclasses

import pytest

from pdserve.parallel.dims import ParallelDims


def test_one_rank() -> None:
    dims = ParallelDims()
    assert (dims.world_size, dims.tp_rank) == (1, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        dims.tp = 2  # type: ignore[misc]


@pytest.mark.parametrize("name", ["tp", "pp", "dp", "ep"])
def test_other_degrees_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=2 is not supported yet"):
        ParallelDims(**{name: 2})
    with pytest.raises(ValueError, match=f"{name}=0"):
        ParallelDims(**{name: 0})


def test_rank_outside_the_world() -> None:
    with pytest.raises(ValueError, match="rank=1 is outside the 1 rank"):
        ParallelDims(rank=1)
