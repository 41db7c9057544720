"""Memory that other devices and processes read (the KV cache). It is outside PyTorch's caching
allocator and never moves.

On CUDA it is a `cudaMalloc` of its own, which torch sees as a tensor. PyTorch's caching allocator
may serve from expandable segments, virtual memory that is mapped piece by piece. A transfer library
registers those without an error, and then reads them over TCP. The allocator also rounds sizes and
shares segments. Knows bytes and devices, no layout. Called by `memory.kv_cache_size` and by the
staging ring.
"""

import ctypes
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdserve.kernels.launching.cuda_runtime import cudart

CUDA_ERROR_MEMORY_ALLOCATION = 2  # <driver_types.h>


class OutOfMemory(Exception):
    """The device or the machine does not have enough memory."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros in one contiguous piece, which lives as long as the tensor or a view of it.
    Raises OutOfMemory."""
    num_bytes = prod(shape) * dtype.itemsize
    if device.type == "cuda":
        flat = _cuda_bytes(num_bytes, device)
        tensor = flat.view(dtype).view(shape).zero_()
        # other streams and other processes may read it from now on
        torch.cuda.synchronize(device)
        return tensor
    # without this check the system kills the process when it first touches the pages
    if num_bytes > available_bytes(device):
        raise OutOfMemory
    return torch.zeros(shape, dtype=dtype, device=device)


def available_bytes(device: torch.device) -> int:
    """Number of bytes that can be allocated now. On CUDA that is the free device memory, including
    what torch caches. On CPU it is what Linux calls available; elsewhere no limit is known.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 1 << 62
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


class _CudaBytes:
    """Owner of one cudaMalloc. torch keeps it alive for every tensor made from it, and drops it
    with the last one."""

    def __init__(self, cudart: Any, num_bytes: int) -> None:
        self._cudart = cudart
        self._pointer = ctypes.c_void_p()
        error = cudart.cudaMalloc(ctypes.byref(self._pointer), ctypes.c_size_t(num_bytes))
        if error:
            self._pointer.value = None
            cudart.cudaGetLastError()  # else the next kernel launch would report this error
            if error == CUDA_ERROR_MEMORY_ALLOCATION:
                raise OutOfMemory
            raise RuntimeError(f"cudaMalloc of {num_bytes} bytes failed with CUDA error {error}")
        # Protocol: numba.readthedocs.io, "CUDA Array Interface" version 3. It has no bfloat16, so
        # this is declared as bytes.
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self._pointer.value, False),
            "version": 3,
        }

    def __del__(self) -> None:
        if self._pointer.value is not None:
            self._cudart.cudaFree(self._pointer)  # waits for the kernels that use it
            self._pointer.value = None


def _cuda_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate uint8 `[num_bytes]`, uninitialised and 256-byte aligned."""
    torch.cuda.init()
    torch.cuda.empty_cache()
    with torch.cuda.device(device):
        return torch.as_tensor(_CudaBytes(cudart(), num_bytes), device=device)
