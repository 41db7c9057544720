"""The interface of attention over a paged KV cache. reference.py implements it in plain torch,
triton_ops.py in Triton and cuDNN."""

from typing import Protocol

from torch import Tensor

from pdserve.kernels.attention.spec import AttentionSpec, Paged, Prefills


class AttentionOps(Protocol):
    """Attention kernels. These parameters mean the same in all of them:

    kv: one layer `[num_blocks, Hk, planes, block_size, D]` of the KV cache, in e4m3 or in q's
        dtype. It already holds the step's own rows.
    v_scales: float32 `[Hk]`. The results of the heads of each KV head are multiplied by them. None:
        all are 1.
    sinks: float32 `[Hq]`, for a spec that has them; they are scores that are already scaled.
    out: `[..., spec.out_width]`, contiguous. If it is given, the result is written to it and it is
        returned, so that the parts of a mixed step need not be joined.
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
        """Attention of one query per sequence, q [S, Hq, D]. A context of 0 yields zeros."""
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
        """Causal attention of several queries per sequence, q [T, Hq, D]; padding rows yield zeros.

        k, v [T, Hk, D]: keys and values of the same rows, as they were written.
        """
        ...

    def warm_prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Tensor,
        tables: Tensor,
        spec: AttentionSpec,
        v_scales: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Prepares `prefill` for steps of up to len(q) rows whose q, k and v are laid out in memory
        like these, with or without scales and sinks as here. It may be slow; call it at start, on
        the thread that runs the model.

        tables: like those of Paged; row 0 must name the null block, which is read.
        """
        ...
