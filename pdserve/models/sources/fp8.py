"""Reads weights in e4m3, with a scale for the whole module, for each row, or for blocks
(DeepSeek-V3, Qwen3-FP8).

A scale of calibrated activations (`input_scale`) is not used: activations are scaled by row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.linear.schemes.scheme import Cut, Pieces
from pdserve.models.formats.source_format import SourceFormat
from pdserve.models.sources.source import (
    DOWNLOAD,
    TensorError,
    Window,
    checked_scales,
    steps,
)

SIGNLESS = 0x7F  # the bits of an e4m3 code without its sign; all of them set: not a number
CHECKED_CODES = 1 << 18  # number of codes that are checked at once, so that they stay in a cache


@dataclass(frozen=True)
class Fp8Source:
    """Reads `weight`, which is e4m3 `[out, in]`, and its scales. These are one number, or `[out]`,
    or `[out, 1]`, or for blocks `[out / 128, in / 128]`, rounded up. Numbers are multiplied by
    them, even if DeepSeek calls them "inv"."""

    format: SourceFormat

    def windows(self, cut: Cut) -> Mapping[str, Window]:
        rows, columns = self.format.group
        scales: Window = ()
        if columns:
            scales = (steps(cut.rows, rows), steps(cut.columns, columns))
        elif rows:
            scales = (cut.rows,)
        return {"weight": (cut.rows, cut.columns), self._scale: scales}

    def pieces(self, raw: Mapping[str, Tensor], cut: Cut) -> Pieces:
        _check_codes(raw["weight"])
        scales = checked_scales(raw, self._scale)
        rows, columns = self.format.group
        if columns:
            offset = cut.rows.start % rows
            return Pieces(raw["weight"], scales, group=(rows, columns), offset=offset)
        return Pieces(raw["weight"], scales.reshape(-1, 1).expand(cut.num_rows, 1))

    @property
    def _scale(self) -> str:
        return self.format.tensors[1]


def _check_codes(codes: Tensor) -> None:
    """Raises TensorError if a code e4m3 `[rows, columns]` is not a number."""
    for some in codes.view(torch.uint8).split(max(CHECKED_CODES // codes.shape[1], 1)):
        if int((some & SIGNLESS).max()) == SIGNLESS:
            raise TensorError(
                "weight",
                f"has codes that are not numbers (NaN): {DOWNLOAD}, or quantise the model again",
            )
