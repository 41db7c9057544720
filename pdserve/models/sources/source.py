"""A source says what a rank reads of a checkpoint's tensors for its part of a matrix, and what that
means. It knows no file; `models.weights` reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from pdserve.kernels.linear.schemes.scheme import Cut, Pieces
from pdserve.models.formats.headers import UNQUANTISED_DTYPES, TensorLayout, tensor_layouts
from pdserve.models.formats.source_format import PER_WORD, SourceFormat

DOWNLOAD = "download the file again"
Window = tuple[slice, ...]
"""Slices of a tensor's leading dims. The other dims are read whole."""


class TensorError(ValueError):
    """Content of a checkpoint tensor that cannot be right.

    name: the tensor's; where a source raises it, after the module's.
    problem: the rest of a sentence that begins with the tensor's name, with the cure.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name = name
        self.problem = problem


@dataclass(frozen=True)
class Read:
    """The part of one checkpoint tensor that is read.

    shapes, dtypes: those that the tensor may have; dtypes have safetensors' names.
    window: None for a tensor that belongs to the format but is not used.
    """

    shapes: tuple[tuple[int, ...], ...]
    window: Window | None = ()
    dtypes: tuple[str, ...] = UNQUANTISED_DTYPES


class Source(Protocol):
    @property
    def format(self) -> SourceFormat: ...

    def windows(self, cut: Cut) -> Mapping[str, Window]:
        """Returns the windows of the tensors that it needs, by the checkpoint's names after the
        module's. They may cover more than the cut. Raises ValueError for a cut that cannot be read.
        """
        ...

    def pieces(self, raw: Mapping[str, Tensor], cut: Cut) -> Pieces:
        """Makes the cut from these windows. Raises TensorError for numbers that cannot be right."""
        ...


@runtime_checkable
class HasLayouts(Protocol):
    """A source whose tensors differ from those of its format."""

    def layouts(self, cut: Cut) -> Mapping[str, TensorLayout]: ...


def reads_of(source: Source, cut: Cut) -> dict[str, Read]:
    """Returns what is read of all tensors of a module, by their names after the module's."""
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
    """Returns the groups of `size` numbers that these numbers touch; 0: there is one group."""
    if not size:
        return slice(0, 1)
    return slice(numbers.start // size, -(-numbers.stop // size))


def words(numbers: slice) -> slice:
    """Returns the words of 4-bit numbers that these numbers touch."""
    return steps(numbers, PER_WORD)


def checked_scales(raw: Mapping[str, Tensor], name: str) -> Tensor:
    """Returns the scales as float32. Raises TensorError if they cannot be scales."""
    scales = raw[name].float()
    if not bool((scales.isfinite() & (scales >= 0)).all()):
        raise TensorError(
            name,
            f"has numbers that cannot be scales (not finite, or below 0): {DOWNLOAD}, or quantise "
            "the model again",
        )
    return scales
