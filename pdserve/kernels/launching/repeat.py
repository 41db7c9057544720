"""Repeats what some work has launched, with other tensors in the place of those it was given.

The attention of a step launches the same kernels in each layer; only addresses differ. To find out
tiles, grids and arguments takes Python some 250 µs a layer on the host of an H200, and a launch 8.
So a step does this for one layer, notes its launches, and repeats them for the other layers.

Each pointer of a noted launch is either in a tensor that the work was given, and moves with that
tensor, or it stays: the tables of the step, and scratch memory, which the repetitions use one after
another. With any other pointer nothing is repeated, for it might be a result that each layer must
compute. This file knows no kernel. The attention of a step (engine.execution.attention) uses it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pdserve.kernels.launching.notes import POINTER_ALIGNMENT, Launched, Notes

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor

_numbers = count()


class Memory:
    """Where some tensors lie; None where there is none. addresses: in bytes; 0 for None."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self.tensors = tuple(tensors)
        self.addresses = tuple(0 if each is None else each.data_ptr() for each in tensors)
        sizes = map(_extent, tensors)
        self.ends = tuple(at + size for at, size in zip(self.addresses, sizes, strict=True))

    def holder(self, pointer: Tensor) -> int | None:
        """The number of a tensor in which the pointer lies; None if it lies in none."""
        at = pointer.data_ptr()
        for number, (start, end) in enumerate(zip(self.addresses, self.ends, strict=True)):
            if start <= at < end:
                return number
        return None


class Given(Memory):
    """The tensors that some work is given.

    likeness: equal if launches with some tensors can be repeated with others. They are laid out
        alike and aligned alike, and where the memory of two overlaps, as of the columns of one
        matrix, they are equally far apart.
    """

    def __init__(self, *tensors: Tensor | None) -> None:
        super().__init__(tensors)
        self._descriptors: dict[object, TensorDescriptor] = {}
        layouts = tuple(
            each if each is None else (each.shape, each.stride(), each.dtype) for each in tensors
        )
        spans = list(zip(self.addresses, self.ends, strict=True))
        apart = tuple(
            other - at if at < other_end and other < end else None
            for at, end in spans
            for other, other_end in spans
        )
        aligned = tuple(at % POINTER_ALIGNMENT for at in self.addresses)
        self.likeness: tuple[object, ...] = layouts, aligned, apart

    def view(self, number: int, pointer: Tensor, offset: int) -> Tensor:
        """A tensor laid out like `pointer`, so many bytes after the start of tensor `number`."""
        tensor = self.tensors[number]
        assert tensor is not None and tensor.dtype == pointer.dtype, "tensors are alike"
        start = tensor.storage_offset() + offset // tensor.element_size()
        return torch.as_strided(tensor, pointer.shape, pointer.stride(), start)

    def descriptor(
        self, number: int, pointer: "TensorDescriptor", offset: int
    ) -> "TensorDescriptor":
        """Makes a descriptor of such a view, and keeps it for later steps."""
        key = number, offset, (*pointer.shape,), (*pointer.block_shape,)
        kept = self._descriptors.get(key)
        if kept is None:
            kept = replace(pointer, base=self.view(number, pointer.base, offset))
            self._descriptors[key] = kept
        return kept


@cache
def number_of(kind: object) -> int:
    """A number for a value, always the same one. Its hash costs less than that of the value."""
    return next(_numbers)


class _Moved(NamedTuple):
    """A pointer of a repeated launch that moves. place: its place among the launch's pointers."""

    place: int
    of: Callable[[Given], object]


class _Repeated(NamedTuple):
    """A launch to repeat. pointers: all of its pointers, of which `moved` replaces some."""

    again: Callable[[Sequence[object]], None]
    pointers: list[object]
    moved: list[_Moved]


class Repeatable:
    """The launches of some work, which was given `given`.

    notes: of the work. stays: tensors that it reads, and that are the same for all repetitions.
    """

    def __init__(self, notes: Notes, given: Given, stays: Memory) -> None:
        self._kept = notes
        self._launches: list[_Repeated] = []
        scratch = Memory(notes.scratch)
        for launched in notes.launches:
            repeated = _repeated(launched, given, (stays, scratch))
            if repeated is None:
                self._launches.clear()
                notes.give_up()
                break
            self._launches.append(repeated)

    def repeat(self, given: Given) -> bool:
        """Launches the same with other tensors, of the same likeness, on the current stream.
        Returns False, and does nothing, if that would not do all of the work."""
        for again, pointers, moved in self._launches:
            arguments = pointers.copy()
            for place, of in moved:
                arguments[place] = of(given)
            again(arguments)
        return bool(self._launches)


def _repeated(launched: Launched, given: Given, fixed: Sequence[Memory]) -> _Repeated | None:
    """Returns None if a pointer is nobody's."""
    pointers: list[object] = list(launched.pointers)
    moved: list[_Moved] = []
    for place, pointer in enumerate(launched.pointers):
        if pointer is None:
            continue
        memory = pointer if isinstance(pointer, Tensor) else pointer.base
        number = given.holder(memory)
        if number is not None:
            moved.append(_Moved(place, _mover(launched, pointer, number, given)))
        elif isinstance(pointer, Tensor) and any(
            each.holder(pointer) is not None for each in fixed
        ):
            pointers[place] = pointer.data_ptr() if launched.takes_addresses else pointer
        else:
            return None
    return _Repeated(launched.again, pointers, moved)


def _mover(
    launched: Launched, pointer: "Tensor | TensorDescriptor", number: int, given: Given
) -> Callable[[Given], object]:
    if not isinstance(pointer, Tensor):
        offset = pointer.base.data_ptr() - given.addresses[number]
        return lambda other: other.descriptor(number, pointer, offset)
    offset = pointer.data_ptr() - given.addresses[number]
    if launched.takes_addresses:
        return lambda other: other.addresses[number] + offset
    return lambda other: other.view(number, pointer, offset)


def _extent(tensor: Tensor | None) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    if tensor is None or not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()
