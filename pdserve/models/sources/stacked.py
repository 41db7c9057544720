"""Reads the numbers of 16 or 32 bits of a matrix that is one of several in a tensor `[count, in,
out]`."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pdserve.kernels.linear.schemes.scheme import Cut, Pieces
from pdserve.models.formats.headers import UNQUANTISED_DTYPES, TensorLayout
from pdserve.models.formats.source_format import DENSE
from pdserve.models.sources.source import Window


@dataclass(frozen=True)
class StackedSource:
    """Reads one matrix of a stack.

    name: the tensor's, after the module's.
    number, count: which of how many matrices.
    """

    name: str
    number: int
    count: int
    format = DENSE

    def windows(self, cut: Cut) -> Mapping[str, Window]:
        return {self.name: (slice(self.number, self.number + 1), cut.columns, cut.rows)}

    def layouts(self, cut: Cut) -> Mapping[str, TensorLayout]:
        shape = (self.count, cut.of_columns, cut.of_rows)
        return {self.name: TensorLayout((shape,), UNQUANTISED_DTYPES)}

    def pieces(self, raw: Mapping[str, Tensor], cut: Cut) -> Pieces:
        return Pieces(raw[self.name][0].t())
