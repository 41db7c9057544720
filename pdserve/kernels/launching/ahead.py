"""Compiles the kernels that some work needs, several at a time, before the work is done.

A start meets about sixty kernels. If none is in Triton's cache, compiling them one after another
takes 20 s. So such work is done twice: first without its kernels, which are compiled in threads
(compilers.py), and then with them. Needs Triton only on CUDA.
"""

from collections.abc import Callable
from contextvars import copy_context

import torch


def compile_ahead(device: torch.device, work: Callable[[], None]) -> None:
    """Compile the kernels that `work` would launch on this device. Does nothing on CPU.

    work: may be done twice, and launches kernels by `launch` alone, in this thread. It must not
        fail if results of kernels are zeros. What it returns would be kept until all is compiled.
    """
    if device.type == "cuda":
        from pdserve.kernels.launching.compilers import compile_in_threads

        # Triton forgets its mode only if all went well; a copy of the context forgets it anyway.
        copy_context().run(compile_in_threads, work)


def compile_and_do(device: torch.device, work: Callable[[], None]) -> None:
    """Do work on this device, after its kernels were compiled ahead."""
    compile_ahead(device, work)
    work()
