"""The CUDA runtime that torch has loaded, for what torch does not offer. Knows no kernel."""

import ctypes
from functools import cache

import torch


@cache
def cudart() -> ctypes.CDLL:
    """By its soname, so that no second one is loaded."""
    assert torch.version.cuda is not None, "this torch was built without CUDA"
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")


def check(what: str, error: int) -> None:
    """RuntimeError unless the call `what` went well."""
    if error:
        cudart().cudaGetLastError()  # else the next kernel launch is blamed for it
        raise RuntimeError(f"{what} failed with CUDA error {error}")
