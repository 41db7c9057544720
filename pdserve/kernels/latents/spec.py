"""Attention over latents takes these values: how a layer attends, and by which matrices its heads
make their own of a latent."""

from dataclasses import dataclass

from torch import Tensor

from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.norm.ops import Norm


@dataclass(frozen=True)
class LatentAttentionSpec:
    """How a layer attends over latents. attends: how it does in the latent's space, where a query
    head and the latent have `head_dim` columns: first the latent's own (`attends.value_width`),
    then those that are rotated. nope_dim, v_dim: of a head outside of it. is_interleaved:
    neighbours are rotated together, not halves."""

    attends: AttentionSpec
    nope_dim: int
    v_dim: int
    is_interleaved: bool

    @property
    def rank(self) -> int:
        """Columns of the latent itself."""
        return self.attends.out_width

    @property
    def rope_dim(self) -> int:
        return self.attends.head_dim - self.rank


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """norm: of the latent, before everything. Matrices by which heads make their own of a latent of
    `rank` columns: keys `[H, nope_dim, rank]`, values `[H, v_dim, rank]`."""

    norm: Norm
    keys: Tensor
    values: Tensor
