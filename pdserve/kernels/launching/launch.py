# mypy: allow-untyped-defs
"""Launches Triton kernels at a fraction of the host time of `kernel[grid](...)`. Steps with prefill
chunks are not captured in CUDA graphs: for short prompts their hundreds of launches would take
longer than the device's work.

JITFunction finds out anew at every call which compiled kernel the arguments mean; `launch` keeps
the answer of the first such call. "Such" is by value: the layers of a step launch the same numbers
again, so no rule of Triton's about numbers (1, multiples of 16, int32) is repeated here; of a
pointer it must know that alignment to 16 bytes counts. Relied on in Triton 3.6 and 3.7:
`kernel[grid](...)` returns its CompiledKernel, whose `run` takes grid, stream, `function`,
`packed_metadata`, launch metadata and two hooks (none here: Triton's own profiler misses these
launches), then all arguments in order, a pointer as integer too. Knows no kernel. Called by the
launchers.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

POINTER_ALIGNMENT = 16  # bytes
MAX_KEPT = 16384


@lru_cache
def is_hopper(device: torch.device) -> bool:
    """Whether `device` is a GPU with TMA and launches that overlap (compute capability 9 or
    above)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class _Kept(NamedTuple):
    """A compiled kernel and what its launches have in common; tail: the numbers and constants,
    behind the pointers."""

    run: Callable[..., None]
    function: int
    metadata: object
    tail: tuple[object, ...]


_kept: dict[tuple[object, ...], _Kept] = {}


def launch(
    kernel,
    grid: tuple[int, ...],
    pointers: Sequence[Tensor | TensorDescriptor | None],
    numbers: tuple[int | float, ...],
    **options: Any,
) -> None:
    """`kernel[grid](*pointers, *numbers, **options)` on the current device and stream.

    The kernel's parameters stand in the order pointers, numbers, constants. The first pointer is a
    tensor; a descriptor (host-side TMA) and None may stand for others. Of one parameter all numbers
    are of one type. options: constants by name, num_warps and the like; hashable.
    """
    if not isinstance(kernel, triton.JITFunction):
        kernel[grid](*pointers, *numbers, **options)  # Triton's interpreter
        return
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
    kept = _kept.get(key)
    if kept is None:
        _keep(
            key,
            kernel,
            kernel[grid](*pointers, *numbers, **options),
            len(pointers),
            numbers,
            options,
        )
    else:
        x, y, z = (*grid, 1, 1)[:3]
        stream = triton.runtime.driver.active.get_current_stream(device)
        kept.run(
            x, y, z, stream, kept.function, kept.metadata, None, None, None, *arguments, *kept.tail
        )


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up. (triton.cdiv, made for kernels too, costs the host 1.4 µs;
    triton.next_power_of_2 too.)"""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """The smallest that is at least x >= 1."""
    return 1 << (x - 1).bit_length()


def power_of_2_below(x: int) -> int:
    """The largest that is at most x, and 1 if there is none: of a constant that follows from a
    step's rows, so that few kernels are compiled."""
    return 1 << (max(x, 1).bit_length() - 1)


def _keep(
    key,
    kernel,
    compiled,
    num_pointers: int,
    numbers: tuple[int | float, ...],
    options: dict[str, Any],
) -> None:
    """Past MAX_KEPT all are forgotten: it would take thousands of different numbers of rows."""
    if len(_kept) >= MAX_KEPT:
        _kept.clear()
    constants = kernel.arg_names[num_pointers + len(numbers) :]
    tail = (*numbers, *(options[name] for name in constants))
    _kept[key] = _Kept(compiled.run, compiled.function, compiled.packed_metadata, tail)
