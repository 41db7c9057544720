"""Moves heads into and out of the latent's space: their queries go in, their values come out
(DeepSeek-V2, section 2.1, absorbed).

It uses batched products of torch on every device. On CPU a row gets the same bits for every number
of rows that is a multiple of ROW_MULTIPLE.
"""

import torch
from torch import Tensor

from pdserve.kernels.latents.spec import LatentHeads


def into_latent(nope: Tensor, heads: LatentHeads, out: Tensor) -> None:
    """Moves `[T, H, nope_dim]` to out `[T, H, rank]`, which may be columns of a wider tensor."""
    torch.bmm(nope.transpose(0, 1), heads.keys, out=out.transpose(0, 1))


def out_of_latent(out: Tensor, heads: LatentHeads) -> Tensor:
    """Moves `[T, H, rank]` to `[T, H, v_dim]`, which is returned."""
    return (out.transpose(0, 1) @ heads.values.mT).transpose(0, 1)
