"""The values that attention over latents takes: how a layer attends, and the matrices by which its
heads make keys and values of a latent."""

from dataclasses import dataclass

from torch import Tensor

from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.norm.ops import Norm


@dataclass(frozen=True)
class LatentAttentionSpec:
    """The way in which a layer attends over latents.

    attends: the attention in the latent's space, where a query head and the latent have `head_dim`
        columns. The latent's own columns (`attends.value_width`) come first, then the rotated ones.
    nope_dim, v_dim: columns of a head outside the latent's space: unrotated ones of its keys, and
        those of its values.
    is_interleaved: neighbours are rotated together, not halves.
    """

    attends: AttentionSpec
    nope_dim: int
    v_dim: int
    is_interleaved: bool

    @property
    def rank(self) -> int:
        """Number of columns that the latent itself has."""
        return self.attends.out_width

    @property
    def rope_dim(self) -> int:
        return self.attends.head_dim - self.rank


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """The norm of the latent, and the matrices by which heads make keys and values of it.

    norm: the norm of the latent, which is applied before everything else.
    keys: `[H, nope_dim, rank]`, where rank is the number of columns of a latent.
    values: `[H, v_dim, rank]`.
    """

    norm: Norm
    keys: Tensor
    values: Tensor
