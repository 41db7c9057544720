"""Reads weights in 4 bits, eight numbers in an int32, in the three ways in which AWQ, GPTQ and
compressed-tensors pack them (`models/formats/{awq,gptq,compressed_tensors}.py`).

A rank reads whole words and whole groups, and drops the numbers outside its part.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.linear.schemes.scheme import Cut, Pieces, check_columns
from pdserve.models.formats.source_format import PER_WORD, SourceFormat
from pdserve.models.sources.source import (
    DOWNLOAD,
    TensorError,
    Window,
    checked_scales,
    steps,
    words,
)

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each of eight numbers in its word
NO_ZEROS = 8  # the zero point in a format that stores none
GPTQ_BORROW = 0x11111111  # GPTQ's older format stores words of zeros - 1, borrowing across numbers


@dataclass(frozen=True)
class AwqSource:
    format: SourceFormat

    def windows(self, cut: Cut) -> Mapping[str, Window]:
        groups = steps(cut.columns, self.format.group[1])
        return {
            "qweight": (cut.columns, words(cut.rows)),
            "qzeros": (groups, words(cut.rows)),
            "scales": (groups, cut.rows),
        }

    def pieces(self, raw: Mapping[str, Tensor], cut: Cut) -> Pieces:
        codes = _numbers(raw["qweight"], 1, cut.rows, AWQ_PLACES)
        zeros = _numbers(raw["qzeros"], 1, cut.rows, AWQ_PLACES)
        scales = checked_scales(raw, "scales")
        return _pieces(codes.t(), scales.t(), zeros.t(), self.format, cut)


@dataclass(frozen=True)
class GptqSource:
    format: SourceFormat

    def windows(self, cut: Cut) -> Mapping[str, Window]:
        groups = steps(cut.columns, self.format.group[1])
        found: dict[str, Window] = {
            "qweight": (words(cut.columns), cut.rows),
            "qzeros": (groups, words(cut.rows)),
            "scales": (groups, cut.rows),
        }
        return {**found, "g_idx": ()} if "g_idx" in self.format.tensors else found

    def pieces(self, raw: Mapping[str, Tensor], cut: Cut) -> Pieces:
        if "g_idx" in raw:
            self._check_order(raw["g_idx"])
        codes = _numbers(raw["qweight"], 0, cut.columns, IN_ORDER)
        packed = raw["qzeros"].long()
        if self.format.packing == "gptq":
            packed = packed + GPTQ_BORROW
        zeros = _numbers(packed, 1, cut.rows, IN_ORDER)
        scales = checked_scales(raw, "scales")
        return _pieces(codes.t(), scales.t(), zeros.t(), self.format, cut)

    def _check_order(self, g_idx: Tensor) -> None:
        size = self.format.group[1] or len(g_idx)
        if not torch.equal(g_idx.long(), torch.arange(len(g_idx)) // size):
            raise TensorError(
                "g_idx",
                "says that columns of a group are not neighbours (desc_act), which is not "
                "supported: quantise the model again with desc_act=False, or use its AWQ "
                "checkpoint",
            )


@dataclass(frozen=True)
class PackedSource:
    """Reads what compressed-tensors packs."""

    format: SourceFormat

    def windows(self, cut: Cut) -> Mapping[str, Window]:
        groups = steps(cut.columns, self.format.group[1])
        found: dict[str, Window] = {
            "weight_packed": (cut.rows, words(cut.columns)),
            "weight_scale": (cut.rows, groups),
            "weight_shape": (),
        }
        if self.format.has_zeros:
            found["weight_zero_point"] = (words(cut.rows), groups)
        return found

    def pieces(self, raw: Mapping[str, Tensor], cut: Cut) -> Pieces:
        shape = raw["weight_shape"].tolist()
        if shape != [cut.of_rows, cut.of_columns]:
            raise TensorError(
                "weight_shape",
                f"is {shape}, but config.json says {[cut.of_rows, cut.of_columns]}: {DOWNLOAD}, or "
                "correct config.json",
            )
        codes = _numbers(raw["weight_packed"], 1, cut.columns, IN_ORDER)
        scales = checked_scales(raw, "weight_scale")
        if self.format.has_zeros:
            zeros = _numbers(raw["weight_zero_point"], 0, cut.rows, IN_ORDER)
        else:
            zeros = torch.full(scales.shape, NO_ZEROS, dtype=torch.uint8)
        return _pieces(codes, scales, zeros, self.format, cut)


def _numbers(packed: Tensor, axis: int, wanted: slice, places: tuple[int, ...]) -> Tensor:
    """Returns the numbers `wanted` along the axis, uint8 from 0 to 15, out of the words that they
    touch.

    places: the place of each of eight numbers in its word, from the lowest four bits.
    """
    shifts = 4 * torch.tensor(places)
    spread = packed.long().movedim(axis, -1)[..., None] >> shifts & 15
    start = wanted.start % PER_WORD
    numbers = spread.to(torch.uint8).flatten(-2)
    return numbers[..., start : start + wanted.stop - wanted.start].movedim(-1, axis)


def _pieces(codes: Tensor, scales: Tensor, zeros: Tensor, format: SourceFormat, cut: Cut) -> Pieces:
    """Makes pieces of codes `[rows, columns]`, and scales and zeros `[rows, groups]`."""
    size = format.group[1]
    if size:
        check_columns(cut, size)
    return Pieces(codes, scales, zeros.float(), group=(1, size))
