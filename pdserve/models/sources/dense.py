"""Reads numbers of 16, 32 or 64 bits: `weight [out, in]`."""

from collections.abc import Mapping

from torch import Tensor

from pdserve.kernels.linear.schemes.scheme import Cut, Pieces
from pdserve.models.formats.source_format import DENSE
from pdserve.models.sources.source import Window


class DenseSource:
    format = DENSE

    def windows(self, cut: Cut) -> Mapping[str, Window]:
        return {"weight": (cut.rows, cut.columns)}

    def pieces(self, raw: Mapping[str, Tensor], cut: Cut) -> Pieces:
        return Pieces(raw["weight"])
