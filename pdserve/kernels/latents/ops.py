"""Operations of attention over latents (MLA, DeepSeek-V2): reference.py implements them in plain
torch, triton_ops.py in Triton and cuDNN.

Latents lie in the KV cache as rows of one KV head with one plane. kv: one layer `[num_blocks, 1, 1,
block_size, rank + rope_dim]` of it, which holds the step's own rows when attention begins.
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
        """Rotates q [T, H, R] into `rotated` [T, H, R], which may be q. Of latent [T, W] the first
        W - R columns are normed, the others rotated, and its rows written into kv at slot_mapping
        (see kv.reference.write_kv).

        is_interleaved: columns 2i and 2i + 1 are a pair, which come out as columns i and R / 2 + i.
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
        """Attention of one query a sequence in the latent's space: q [S, H, rank + rope_dim] to
        [S, H, rank], which is `out` if given, contiguous. A context of 0 yields zeros."""
        ...

    def prefill(
        self,
        q: Tensor,
        kv: Tensor,
        prefills: Prefills,
        spec: LatentAttentionSpec,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of several queries a sequence in the latent's space, as decode; padding
        rows yield zeros."""
        ...

    def expansion_pays(self, prefills: Prefills, spec: LatentAttentionSpec, like: Tensor) -> bool:
        """Whether prompts are attended to faster by expanded_prefill. like: of the dtype and device
        of the queries."""
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
        """prefill by keys and values that the heads make of the latents: rotated q [T, H,
        nope_dim + rope_dim] to out [T, H, v_dim], contiguous."""
        ...

    def warm(
        self,
        kv: Tensor,
        tables: Tensor,
        spec: LatentAttentionSpec,
        heads: LatentHeads,
        num_rows: int,
    ) -> None:
        """Prepare decodes, and prompts for steps of up to num_rows rows. It may be slow; call it at
        start, on the thread that runs the model. tables: as of Paged, of whose row 0 the null block
        is read."""
        ...
