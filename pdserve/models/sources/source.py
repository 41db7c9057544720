"""A source says what a rank reads of a checkpoint's tensors for its part of a matrix, and what it
means. Knows no file; `models.weights` reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from pdserve.kernels.linear.schemes.scheme import Cut, Pieces
from pdserve.models.formats.headers import UNQUANTISED_DTYPES, TensorLayout, tensor_layouts
from pdserve.models.formats.source_format import PER_WORD, SourceFormat

Window = tuple[slice, ...]
"""Of a tensor's leading dims; of the others everything is meant."""


@dataclass(frozen=True)
class Read:
    """What is read of one checkpoint tensor. shapes: that it may have. window: None for a tensor
    that belongs to the format and is used for nothing. dtypes: that it may have, as safetensors
    names them."""

    shapes: tuple[tuple[int, ...], ...]
    window: Window | None = ()
    dtypes: tuple[str, ...] = UNQUANTISED_DTYPES


class Source(Protocol):
    @property
    def format(self) -> SourceFormat: ...

    def windows(self, cut: Cut) -> Mapping[str, Window]:
        """Of the tensors that it needs, by the checkpoint's names after the module's. They may
        cover more than the cut. ValueError for a cut that cannot be read."""
        ...

    def pieces(self, raw: Mapping[str, Tensor], cut: Cut) -> Pieces:
        """The cut, from these windows. ValueError for numbers that cannot be right."""
        ...


@runtime_checkable
class HasLayouts(Protocol):
    """A source whose tensors are other than its format says."""

    def layouts(self, cut: Cut) -> Mapping[str, TensorLayout]: ...


def reads_of(source: Source, cut: Cut) -> dict[str, Read]:
    """All tensors of a module, by name after the module's."""
    windows = source.windows(cut)
    if isinstance(source, HasLayouts):
        layouts = source.layouts(cut)
    else:
        layouts = tensor_layouts(source.format, cut.of_rows, cut.of_columns)
    return {
        name: Read(layout.shapes, windows.get(name), layout.dtypes)
        for name, layout in layouts.items()
    }


def steps(numbers: slice, size: int) -> slice:
    """The groups of `size` numbers that these touch; 0: there is one group."""
    if not size:
        return slice(0, 1)
    return slice(numbers.start // size, -(-numbers.stop // size))


def words(numbers: slice) -> slice:
    """The words of 4-bit numbers that these touch."""
    return steps(numbers, PER_WORD)


def checked_scales(raw: Mapping[str, Tensor], name: str) -> Tensor:
    """float32."""
    scales = raw[name].float()
    if not bool((scales.isfinite() & (scales >= 0)).all()):
        raise ValueError(
            f"{name} holds numbers that are no scales (not finite, or below 0): is the file "
            "damaged?"
        )
    return scales
