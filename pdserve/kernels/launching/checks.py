"""Checks of tensors before kernels read them by pointer, and the number of programs that fill a
device. Launchers call them. This file knows no kernel."""

from functools import lru_cache

import torch
from torch import Tensor

from pdserve.kernels.e4m3 import E4M3

INTERPRETER_SMS = 8


@lru_cache
def num_sms(device: torch.device) -> int:
    """Number of multiprocessors that a GPU has; a small number in Triton's interpreter."""
    if device.type != "cuda":
        return INTERPRETER_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def check_rows(**tensors: Tensor) -> None:
    """Raises ValueError for a tensor whose rows are not contiguous."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} has stride {tensor.stride(-1)} in its last dim: make it contiguous there"
            )


def check_ids(**tensors: Tensor) -> None:
    """Raises ValueError for a tensor that is not contiguous. A kernel would read a column of a
    table as the table's first rows."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous: call .contiguous() on it")


def check_kv(kv: Tensor) -> None:
    """Raises ValueError for a tensor that is not a layer of a KV cache."""
    block_size, head_dim = kv.shape[3:]
    if kv.stride()[2:] != (block_size * head_dim, head_dim, 1) or block_size & (block_size - 1):
        raise ValueError(
            "kv must be kv_cache[:, :, layer] of a contiguous KV cache whose block_size is a "
            f"power of two, not {tuple(kv.shape)} with strides {kv.stride()}"
        )


def check_kv_dtype(kv: Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError for a KV cache whose rows are neither in e4m3 nor in `dtype`, the dtype of
    the step's own rows."""
    if kv.dtype not in (E4M3, dtype):
        raise ValueError(f"kv must be in e4m3 or {dtype}, as the step's rows are, not {kv.dtype}")
