"""Lays out what each rank of an engine stores, for tests of hand-offs.

In each home it is a share of the KV heads of a share of the layers.
"""

from typing import NamedTuple

from pdserve.parallel.dims import ParallelDims


class Degrees(NamedTuple):
    """Holds the degrees of tensor parallelism, the number of stages, and the number of homes."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    def __str__(self) -> str:
        names = [f"{name}{count}" for name, count in zip(self._fields, self, strict=True)]
        return "".join(name for name, count in zip(names, self, strict=True) if count > 1) or "one"


ONE_RANK = Degrees()


def num_ranks(degrees: Degrees) -> int:
    return degrees.tp * degrees.pp * degrees.dp


def dims_of(rank: int, degrees: Degrees) -> ParallelDims:
    return ParallelDims(tp=degrees.tp, pp=degrees.pp, dp=degrees.dp, rank=rank)


def share_of(rank: int, degrees: Degrees, num_heads: int, num_layers: int) -> tuple[slice, slice]:
    """The heads and the layers that a rank stores. With fewer heads than ranks, several of them
    store the same one."""
    dims = dims_of(rank, degrees)
    first = dims.tp_rank * num_heads // degrees.tp
    layers = dims.layers_of(num_layers)
    return slice(first, first + max(num_heads // degrees.tp, 1)), slice(layers.start, layers.stop)
