"""A source says how a checkpoint holds the matrix of a module: which tensors there are, what a rank
reads of each, and what they mean. Knows no file; `models.weights` reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdserve.kernels.linear.schemes.scheme import Cut, Pieces, Scheme

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Read:
    """What is read of one checkpoint tensor. shapes: that it may have. window: of its leading dims;
    of the others everything is read. dtypes: that it may have. optional: not missed where it is not
    there, and used for nothing where it is."""

    shapes: tuple[tuple[int, ...], ...]
    window: tuple[slice, ...] = ()
    dtypes: tuple[torch.dtype, ...] = FLOATS
    optional: bool = False


class Source(Protocol):
    def reads(self, cut: Cut) -> Mapping[str, Read]:
        """By the checkpoint's names after the module's, such as "weight". It may be more than the
        cut. ValueError for a cut that cannot be read."""
        ...

    def pieces(self, raw: Mapping[str, Tensor], cut: Cut) -> Pieces:
        """The cut, from what was read, but for what is optional. ValueError for numbers that cannot
        be right."""
        ...


@dataclass(frozen=True)
class Storage:
    """How a checkpoint holds a matrix, and how the device does."""

    source: Source
    scheme: Scheme
