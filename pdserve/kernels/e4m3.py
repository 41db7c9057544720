"""e4m3, floating numbers of 8 bits without infinities (Micikevicius et al. 2022)."""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


def to_codes(x: Tensor) -> Tensor:
    """Round x to e4m3; what is past the largest number becomes it. (Casts of that differ by device:
    some make a NaN of it.)"""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)
