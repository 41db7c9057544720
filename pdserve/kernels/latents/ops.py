"""The interface of attention over latents (MLA, DeepSeek-V2). reference.py implements it in plain
torch, triton_ops.py in Triton and cuDNN.

Latents are stored in the KV cache as rows of one KV head with one plane. In all methods, kv is one
layer of it, `[num_blocks, 1, 1, block_size, rank + rope_dim]`. When attention begins, it already
holds the step's own rows.
"""

from typing import Protocol

from torch import Tensor

from pdserve.kernels.attention.spec import Paged, Prefills
from pdserve.kernels.latents.spec import LatentAttentionSpec, LatentHeads
from pdserve.kernels.norm.ops import Norm


class LatentOps(Protocol):
    def rope_write(
        self,
        q: Tensor,
        rotated: Tensor,
        latent: Tensor,
        norm: Norm,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        kv: Tensor,
        slot_mapping: Tensor,
        is_interleaved: bool,
    ) -> None:
        """Rotates q [T, H, R] into `rotated` [T, H, R], which may be q. Norms the first W - R
        columns of latent [T, W], and rotates the others. Writes the resulting rows into kv at
        slot_mapping (see kv.reference.write_kv).

        is_interleaved: columns 2i and 2i + 1 are a pair, which become columns i and R / 2 + i.
        """
        ...

    def decode(
        self,
        q: Tensor,
        kv: Tensor,
        paged: Paged,
        spec: LatentAttentionSpec,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of one query per sequence in the latent's space: from q [S, H, rank + rope_dim]
        to [S, H, rank], contiguous. If `out` is given, it is used. A context of 0 yields zeros."""
        ...

    def prefill(
        self,
        q: Tensor,
        kv: Tensor,
        prefills: Prefills,
        spec: LatentAttentionSpec,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of several queries per sequence in the latent's space, like decode.
        Padding rows yield zeros."""
        ...

    def expansion_pays(self, prefills: Prefills, spec: LatentAttentionSpec, like: Tensor) -> bool:
        """True if expanded_prefill is faster for these prompts. like: a tensor with the dtype and
        device of the queries."""
        ...

    def expanded_prefill(
        self,
        q: Tensor,
        kv: Tensor,
        prefills: Prefills,
        spec: LatentAttentionSpec,
        heads: LatentHeads,
        out: Tensor,
    ) -> None:
        """Runs prefill with keys and values that the heads make of the latents: from rotated q
        [T, H, nope_dim + rope_dim] to out [T, H, v_dim], contiguous."""
        ...

    def warm(
        self,
        kv: Tensor,
        tables: Tensor,
        spec: LatentAttentionSpec,
        heads: LatentHeads,
        num_rows: int,
    ) -> None:
        """Prepares decodes, and prompts of steps of up to num_rows rows. It may be slow; call it at
        start, on the thread that runs the model. tables: like those of Paged; row 0 must name the
        null block, which is read."""
        ...
