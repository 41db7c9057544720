"""e4m3, floating numbers of 8 bits without infinities (Micikevicius et al. 2022)."""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST_CAPABILITY = (9, 0)


def to_codes(x: Tensor) -> Tensor:
    """Round x to e4m3; what is past the largest number becomes it. (Casts of that differ by device:
    some make a NaN of it.)"""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def check_device(device: torch.device) -> None:
    """ValueError for a GPU that has no products in e4m3, or too little shared memory for ours."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < LEAST_CAPABILITY:
            raise ValueError(
                f"fp8 is computed on GPUs of compute capability {_said(LEAST_CAPABILITY)} (Hopper) "
                f"or above, and {torch.cuda.get_device_name(device)} has {_said(capability)}: use "
                "the model's 16-bit weights and set engine.kv_cache_dtype to auto"
            )


def _said(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
