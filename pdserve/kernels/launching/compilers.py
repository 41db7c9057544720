"""Threads that compile what some work would launch. Triton lets go of Python while it compiles.

Torch's operations do run, over results that no kernel has written. These are filled with zeros,
because 0 is a valid token, row and expert everywhere.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode

from pdserve.kernels.launching.launch import not_launching

MAX_THREADS = 8  # of a rank's captures, and as many of its sampler
UNWRITTEN = (
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
)


def compile_in_threads(work: Callable[[], None]) -> None:
    """Do what `compile_ahead` does on CUDA. Raises what the compiler raises."""
    threads = _Compilers(min(MAX_THREADS, len(os.sched_getaffinity(0))))
    with threads, triton.AsyncCompileMode(threads), not_launching(), _Zeros():
        work()


class _Compilers(ThreadPoolExecutor):
    """Triton 3.6 also has a C compiler build what launches a kernel, which takes as long as its
    assembler. Without these threads it would do so at the first launch."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_with_launcher, fn, *args, **kwargs)


def _with_launcher(compiles: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kernel = compiles(*args, **kwargs)
    triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


class _Zeros(TorchFunctionMode):
    """Inside, new tensors that torch would leave unwritten are zeros."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in UNWRITTEN else made
