"""Attention over a paged KV cache: reference.py implements it in plain torch, triton_ops.py in
Triton and cuDNN."""

from typing import Protocol

from torch import Tensor

from pdserve.kernels.attention.spec import AttentionSpec, Paged, Prefills


class AttentionOps(Protocol):
    """kv: one layer `[num_blocks, Hk, planes, block_size, D]` of the KV cache, which holds the
    step's own rows already; in e4m3 or in q's dtype. v_scales: float32 `[Hk]`, by which what the
    heads of each KV head get is multiplied; None: 1. sinks: float32 `[Hq]`, of a spec that has
    them, as scores that are scaled already. What is returned is `out` if given, `[...,
    spec.out_width]` and contiguous: so the parts of a mixed step need not be joined.
    """

    def decode(
        self,
        q: Tensor,
        kv: Tensor,
        paged: Paged,
        spec: AttentionSpec,
        out: Tensor | None = None,
        v_scales: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of one query a sequence, q [S, Hq, D]. A context of 0 yields zeros."""
        ...

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Tensor,
        prefills: Prefills,
        spec: AttentionSpec,
        out: Tensor | None = None,
        v_scales: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of several queries a sequence, q [T, Hq, D]; padding rows yield zeros.
        k, v [T, Hk, D]: the same rows' keys and values as they were written."""
        ...

    def warm_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, tables: Tensor, spec: AttentionSpec
    ) -> None:
        """Prepare prefill for steps of up to len(q) rows whose q, k and v lie in memory like these.
        It may be slow; call it at start, on the thread that runs the model. tables: as of Paged, of
        whose row 0 the null block is read."""
        ...
