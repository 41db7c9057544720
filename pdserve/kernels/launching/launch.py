# mypy: allow-untyped-defs
"""Launches Triton kernels in a fraction of the host time of `kernel[grid](...)`. Steps with prefill
chunks are not captured in CUDA graphs: for short prompts, hundreds of slow launches would take
longer than the device's work.

JITFunction finds out at every call which compiled kernel fits the arguments; `launch` keeps the
answer of the first such call. Two calls are such if their numbers are equal, because the layers of
a step launch the same numbers again. So this file does not repeat Triton's rules about numbers (1,
multiples of 16, int32). It only has to know that the alignment of pointers to 16 bytes counts.

It relies on these facts of Triton 3.6 and 3.7. `kernel[grid](...)` returns its CompiledKernel. The
`run` of that takes grid, stream, `function`, `packed_metadata`, launch metadata and two hooks, and
then all arguments in order, where a pointer may be an integer. (There are no hooks here, so
Triton's own profiler misses these launches.) Inside `not_launching` kernels are compiled only; a
set has the launches whose kernels were asked for. Each launch is also noted for those who ask
(notes.py). This file knows no kernel. The launchers call it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pdserve.kernels.launching.notes import POINTER_ALIGNMENT, Launched, noted

MAX_KEPT = 16384


@lru_cache
def is_hopper(device: torch.device) -> bool:
    """True if `device` is a GPU with TMA and overlapping launches (compute capability >= 9)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class _Kept(NamedTuple):
    """A compiled kernel and what its launches have in common. tail: the numbers and constants,
    which come after the pointers."""

    run: Callable[..., None]
    function: int
    metadata: object
    tail: tuple[object, ...]


_Key = tuple[object, ...]

_kept: dict[_Key, _Kept] = {}
_compiled: ContextVar[set[_Key] | None] = ContextVar("compiled", default=None)


@contextmanager
def not_launching() -> Iterator[None]:
    """Inside, `launch` has kernels compiled and launches none, not even those that it has
    launched before: kernels of several ranks wait for each other."""
    token = _compiled.set(set())
    try:
        yield
    finally:
        _compiled.reset(token)


def launch(
    kernel,
    grid: tuple[int, ...],
    pointers: Sequence[Tensor | TensorDescriptor | None],
    numbers: tuple[int | float, ...],
    **options: Any,
) -> None:
    """Does `kernel[grid](*pointers, *numbers, **options)` on the current device and stream.

    The kernel's parameters must come in the order pointers, numbers, constants. The first pointer
    is a tensor; the others may also be a descriptor (host-side TMA) or None. All numbers of one
    parameter must have the same type.
    options: constants by name, num_warps and the like; they must be hashable.
    """
    notes = noted.get()
    if not isinstance(kernel, triton.JITFunction):  # Triton's interpreter
        _interpret(kernel, grid, numbers, options, pointers)
        if notes is not None:
            again = partial(_interpret, kernel, grid, numbers, options)
            notes.add(Launched(again, pointers, takes_addresses=False))
        return
    if (compiled := _compiled.get()) is not None:
        _compile(compiled, kernel, grid, pointers, numbers, options)
        return
    key, arguments = _key_of(kernel, pointers, numbers, options)
    kept = _kept.get(key)
    if kept is None:
        compiled = kernel[grid](*pointers, *numbers, **options)
        kept = _keep(key, kernel, compiled, len(pointers), numbers, options)
    else:
        _run(kept, grid, key[1], arguments)
    if notes is not None:
        again = partial(_run, kept, grid, key[1])
        notes.add(Launched(again, pointers, takes_addresses=True))


def cdiv(x: int, y: int) -> int:
    """Returns x / y, rounded up. (triton.cdiv and triton.next_power_of_2, which also serve in
    kernels, cost the host 1.4 µs each.)"""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """Returns the smallest power of two that is at least x >= 1."""
    return 1 << (x - 1).bit_length()


def power_of_2_below(x: int) -> int:
    """Returns the largest power of two that is at most x, or 1 if there is none. It is used for
    constants that follow from a step's rows, so that few kernels are compiled."""
    return 1 << (max(x, 1).bit_length() - 1)


def _key_of(
    kernel,
    pointers: Sequence[Tensor | TensorDescriptor | None],
    numbers: tuple[int | float, ...],
    options: dict[str, Any],
) -> tuple[_Key, list[object]]:
    """Returns a key that launches of one compiled kernel share, and the kernel's pointers. The
    key's second entry is the device."""
    device = pointers[0].get_device()  # type: ignore[union-attr]
    kinds: list[object] = []
    arguments: list[object] = []
    address_bits = 0
    for pointer in pointers:
        if isinstance(pointer, Tensor):
            address = pointer.data_ptr()
            address_bits |= address
            kinds.append(pointer.dtype)
            arguments.append(address)
        else:
            kinds.append(pointer and (pointer.base.dtype, *pointer.block_shape))
            arguments.append(pointer)
    key = (id(kernel), device, *kinds, *numbers, *options, *options.values())
    if address_bits % POINTER_ALIGNMENT:
        key += tuple(isinstance(x, int) and x % POINTER_ALIGNMENT for x in arguments)
    return key, arguments


def _run(kept: _Kept, grid: tuple[int, ...], device: object, arguments: Sequence[object]) -> None:
    assert _compiled.get() is None, "nothing is launched inside `not_launching`"
    x, y, z = (*grid, 1, 1)[:3]
    stream = triton.runtime.driver.active.get_current_stream(device)
    kept.run(
        x, y, z, stream, kept.function, kept.metadata, None, None, None, *arguments, *kept.tail
    )


def _interpret(
    kernel,
    grid: tuple[int, ...],
    numbers: tuple[int | float, ...],
    options: dict[str, Any],
    pointers: Sequence[object],
) -> None:
    kernel[grid](*pointers, *numbers, **options)


def _compile(
    compiled: set[_Key],
    kernel,
    grid: tuple[int, ...],
    pointers: Sequence[Tensor | TensorDescriptor | None],
    numbers: tuple[int | float, ...],
    options: dict[str, Any],
) -> None:
    """Has a kernel compiled, if it is not among `compiled`. A mode of torch would look at each
    address and dtype, so it is switched off meanwhile."""
    with torch._C.DisableTorchFunction():
        key, _ = _key_of(kernel, pointers, numbers, options)
        if key not in compiled and key not in _kept:
            compiled.add(key)
            kernel.run(*pointers, *numbers, grid=grid, warmup=True, **options)


def _keep(
    key: _Key,
    kernel,
    compiled,
    num_pointers: int,
    numbers: tuple[int | float, ...],
    options: dict[str, Any],
) -> _Kept:
    """Keeps a compiled kernel and returns it. Past MAX_KEPT all are forgotten; that many need
    thousands of different numbers of rows."""
    if len(_kept) >= MAX_KEPT:
        _kept.clear()
    constants = kernel.arg_names[num_pointers + len(numbers) :]
    tail = (*numbers, *(options[name] for name in constants))
    kept = _Kept(compiled.run, compiled.function, compiled.packed_metadata, tail)
    _kept[key] = kept
    return kept
