"""The dtype e4m3: floating point of 8 bits without infinities (Micikevicius et al. 2022)."""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST_CAPABILITY = (9, 0)


def to_codes(x: Tensor) -> Tensor:
    """Rounds x to e4m3. Numbers past the largest one become the largest one. (Casts of such numbers
    differ by device: some make them NaN.)"""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def check_device(
    device: torch.device,
    what: str = "fp8 needs",
    cure: str = "use the model's 16-bit weights and set engine.kv_cache_dtype to auto",
) -> None:
    """Raises ValueError for a GPU that has no products in e4m3, or too little shared memory for
    these kernels. what, cure: the error's first words, and what to do instead."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < LEAST_CAPABILITY:
            raise ValueError(
                f"{what} a GPU of compute capability {_said(LEAST_CAPABILITY)} (Hopper) or above, "
                f"but {torch.cuda.get_device_name(device)} has {_said(capability)}: {cure}"
            )


def _said(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
