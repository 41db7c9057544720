"""The CUDA runtime that torch has loaded, for functions that torch lacks. It knows no kernel."""

import ctypes
from functools import cache

import torch


@cache
def cudart() -> ctypes.CDLL:
    """Loads the library by its soname, so that no second one is loaded."""
    assert torch.version.cuda is not None, "this torch was built without CUDA"
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")


def check(what: str, error: int) -> None:
    """Raises RuntimeError if the call named `what` failed."""
    if error:
        cudart().cudaGetLastError()  # clears it; else the next kernel launch would report it
        raise RuntimeError(f"{what} failed with CUDA error {error}")
