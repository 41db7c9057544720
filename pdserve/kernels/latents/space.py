"""Heads over latents: their queries go into the latent's space, their values come out of it
(DeepSeek-V2, section 2.1, absorbed).

In torch alone, on every device: batched products. On CPU bit for bit the same rows for every number
of them that is a multiple of ROW_MULTIPLE.
"""

import torch
from torch import Tensor

from pdserve.kernels.latents.spec import LatentHeads


def into_latent(nope: Tensor, heads: LatentHeads, out: Tensor) -> None:
    """`[T, H, nope_dim]` -> out `[T, H, rank]`, which may be columns of something wider."""
    torch.bmm(nope.transpose(0, 1), heads.keys, out=out.transpose(0, 1))


def out_of_latent(out: Tensor, heads: LatentHeads) -> Tensor:
    """`[T, H, rank]` -> `[T, H, v_dim]`."""
    return (out.transpose(0, 1) @ heads.values.mT).transpose(0, 1)
