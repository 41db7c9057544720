"""What each rank of an engine stores, as tests of hand-overs lay it out: a share of the KV heads of
a share of the layers."""

from pdserve.parallel.dims import ParallelDims

Degrees = tuple[int, int]
"""Of tensor parallelism, and stages."""


def num_ranks(degrees: Degrees) -> int:
    return degrees[0] * degrees[1]


def share_of(rank: int, degrees: Degrees, num_heads: int, num_layers: int) -> tuple[slice, slice]:
    """The heads and the layers that a rank stores."""
    tp, pp = degrees
    dims = ParallelDims(tp=tp, pp=pp, rank=rank)
    share = num_heads // tp
    first = dims.tp_rank * share
    layers = dims.layers_of(num_layers)
    return slice(first, first + share), slice(layers.start, layers.stop)
