"""A weight matrix as products take it, however it is stored: one value that goes whole to the ops.

Knows no product and no file. Made by a scheme's `finish`, once a weight is loaded.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """Which part of a matrix a rank has: part `index` of `count` equal ones along an axis. axis:
    "out" (rows), "in" (columns), or None for all of it."""

    axis: Literal["out", "in"] | None = None
    index: int = 0
    count: int = 1


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Matrix:
    """data: of a dense matrix `[out, in]`; scales, zeros and data of another: see its scheme. bias
    `[out]`."""

    data: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    zeros: Tensor | None = None
    shard: Shard = WHOLE
