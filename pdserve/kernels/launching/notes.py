"""Notes of what some work launches, so that it can be launched again (repeat.py).

`launch` notes what it does inside `noting`; work that is done in other ways says so. This file does
not need Triton.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor

POINTER_ALIGNMENT = 16  # bytes. Triton compiles other kernels for pointers that lie otherwise.


class Launched(NamedTuple):
    """A launch that was done.

    again: launches the kernel on the current stream of its device with other pointers. They must be
        aligned as these are, because the kernel may have been compiled for that.
    pointers: those that it had.
    takes_addresses: `again` takes integers in the place of tensors, as on a GPU.
    """

    again: Callable[[Sequence[object]], None]
    pointers: "Sequence[Tensor | TensorDescriptor | None]"
    takes_addresses: bool


@dataclass
class Notes:
    """The launches of some work.

    is_all: the work did nothing else on the device. Otherwise nothing is kept here.
    scratch: memory that the work took for what one of its launches hands to another.
    """

    launches: list[Launched] = field(default_factory=list)
    is_all: bool = True
    scratch: list[Tensor] = field(default_factory=list)

    def add(self, launched: Launched) -> None:
        if self.is_all:
            self.launches.append(launched)

    def give_up(self) -> None:
        self.is_all = False
        self.launches.clear()
        self.scratch.clear()


noted: ContextVar[Notes | None] = ContextVar("noted", default=None)


@contextmanager
def noting() -> Iterator[Notes]:
    """Inside, each launch of this thread is also noted."""
    notes = Notes()
    token = noted.set(notes)
    try:
        yield notes
    finally:
        noted.reset(token)


def other_work() -> None:
    """Work that queues anything on the device in another way than by `launch` says so here."""
    if (notes := noted.get()) is not None:
        notes.give_up()


def scratch(*shape: int, like: Tensor) -> Tensor:
    """Takes memory, float32 on the device of `like`, for what a launch hands to a later one. A
    repetition of the launches uses it again."""
    taken = torch.empty(shape, dtype=torch.float32, device=like.device)
    if (notes := noted.get()) is not None and notes.is_all:
        notes.scratch.append(taken)
    return taken
