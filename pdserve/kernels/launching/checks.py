"""Launchers check tensors here before kernels read them by pointer, and learn how many programs
fill a device. Knows no kernel."""

from functools import lru_cache

import torch
from torch import Tensor

from pdserve.kernels.e4m3 import E4M3

INTERPRETER_SMS = 8


@lru_cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; a small number in Triton's interpreter."""
    if device.type != "cuda":
        return INTERPRETER_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def check_rows(**tensors: Tensor) -> None:
    """ValueError for a tensor whose rows are not contiguous."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} has stride {tensor.stride(-1)} in its last dim: make it contiguous there"
            )


def check_ids(**tensors: Tensor) -> None:
    """ValueError for a tensor that is not contiguous: a column of a table would be read as its
    first rows."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous: call .contiguous() on it")


def check_kv(kv: Tensor) -> None:
    """ValueError for a tensor that is no layer of a KV cache."""
    block_size, head_dim = kv.shape[3:]
    if kv.stride()[2:] != (block_size * head_dim, head_dim, 1) or block_size & (block_size - 1):
        raise ValueError(
            "kv must be kv_cache[:, :, layer] of a contiguous KV cache whose block_size is a "
            f"power of two, not {tuple(kv.shape)} with strides {kv.stride()}"
        )


def check_kv_dtype(kv: Tensor, dtype: torch.dtype) -> None:
    """ValueError for rows of a KV cache that are neither in e4m3 nor in the `dtype` of a step's
    own."""
    if kv.dtype not in (E4M3, dtype):
        raise ValueError(f"kv must be in e4m3 or {dtype}, as the step's rows are, not {kv.dtype}")
