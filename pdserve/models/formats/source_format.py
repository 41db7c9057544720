"""SourceFormat says how one matrix of a checkpoint is stored. TensorLayout says what is known of
each of its tensors before any is read.

This file knows no configuration and no files.
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

Kind = Literal["dense", "fp8", "fp8_block", "int4", "int4_fp8"]
Packing = Literal["plain", "awq", "gptq", "gptq_v2", "compressed"]

INT4_KINDS = ("int4", "int4_fp8")
BLOCK = 128  # rows and columns of a block of fp8 that share a scale
GROUP_SIZES = (32, 64, 128)  # inputs of int4 that share a scale; -1: all
PER_WORD = 8  # numbers of 4 bits in an int32


class SourceFormat(BaseModel):
    """The way in which a matrix [rows, columns] is stored.

    kind: what its numbers are; "int4_fp8" is int4 whose activations are rounded to e4m3.
    packing: how they are laid out in the tensors. For int4 the packings differ in the place of a
        number and in the zero point: w = (q - z) * scale, where z is 8 without has_zeros.
    group: how many rows and columns share a scale; 0 means all of them.
    has_zeros: the checkpoint has a zero point for each group (int4).
    tensors: names after the module's, without the bias.
    optional: further names that a checkpoint may have or not; empty once the headers were read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind = "dense"
    packing: Packing = "plain"
    group: tuple[int, int] = (1, 0)
    has_zeros: bool = False
    tensors: tuple[str, ...] = ("weight",)
    optional: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows, columns = self.group
        if self.kind == "dense":
            return "16 bits"
        if self.kind == "fp8_block":
            return f"fp8 in blocks of {rows} x {columns}"
        if self.kind == "fp8":
            return f"fp8 with a scale per {'row' if rows else 'tensor'}"
        names = {"awq": "AWQ", "gptq": "GPTQ", "gptq_v2": "GPTQ v2"}
        each = f"in groups of {columns}" if columns else "with a scale per row"
        activations = " with activations in fp8" if self.kind == "int4_fp8" else ""
        return f"{names.get(self.packing, 'packed')} int4 {each}{activations}"


DENSE = SourceFormat()


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a stored matrix: the shapes and dtypes that writers give it, with the names
    that safetensors has for dtypes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


SCALE_DTYPES = ("F32", "F16", "BF16")
