"""Ops: the functions a model computes with, and the choice of who implements them.

torch_ops.py (plain torch) and triton_ops.py (Triton) are the two modules that implement it; the
`reference.py` of each room documents shapes and dtypes. Knows nothing of models. Called once a
process by the model runner, which hands the result to its model.
"""

from typing import Protocol

import torch
from torch import Tensor

from pdserve.kernels import torch_ops


class Ops(Protocol):
    """All ops on one device. Outputs are new tensors unless said otherwise; no op waits for the
    device on CUDA."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def rope_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        kv: Tensor,
        slot_mapping: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Writes into kv, and may rotate in place: use the returned q and k, and the given ones no
        more."""

    def paged_decode(
        self,
        q: Tensor,
        kv: Tensor,
        block_tables: Tensor,
        table_rows: Tensor,
        context_lens: Tensor,
        scale: float,
        max_context_len: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """Written to `out` if given, as by paged_prefill: so the parts of a mixed step need not be
        joined."""

    def paged_prefill(
        self,
        q: Tensor,
        kv: Tensor,
        block_tables: Tensor,
        table_rows: Tensor,
        context_lens: Tensor,
        query_starts: Tensor,
        max_query_len: int,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def gather_inputs(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        last_token: Tensor,
        tables: Tensor,
        block_size: int,
    ) -> tuple[Tensor, Tensor]: ...

    def update_tables(self, tables: Tensor, changes: Tensor) -> None: ...

    def store_tokens(self, last_token: Tensor, slots: Tensor, token_ids: Tensor) -> None: ...

    def warm_dense_prefill(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        """Prepares fresh_prefill and chunk_prefill for steps of up to len(q) rows whose q, k and v
        lie in memory like these. Slow; call it at start, on the thread that runs the model.
        """

    def fresh_prefill_pays(
        self, q: Tensor, k: Tensor, v: Tensor, query_lens: tuple[int, ...]
    ) -> bool:
        """Whether fresh_prefill is prepared for these prompts and faster than paged_prefill."""

    def fresh_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, query_lens: tuple[int, ...], scale: float
    ) -> Tensor: ...

    def chunk_prefill_pays(
        self, q: Tensor, k: Tensor, v: Tensor, prefix_len: int, block_size: int
    ) -> bool:
        """Whether chunk_prefill is prepared for this chunk and faster than paged_prefill."""

    def chunk_prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Tensor,
        block_tables: Tensor,
        table_rows: Tensor,
        context_lens: Tensor,
        query_starts: Tensor,
        prefix_len: int,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def copy_blocks(self, kv_cache: Tensor, src: Tensor, dst: Tensor) -> None: ...

    def repack(
        self,
        source: Tensor,
        source_ids: Tensor,
        kv_cache: Tensor,
        block_ids: Tensor,
        skip: int,
        num_rows: int,
    ) -> None: ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        """May write to residual: use what is returned, and residual no more."""

    def norm_linear(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor: ...

    def norm_linear_silu_mul(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor: ...

    def draw_tokens(
        self,
        logits: Tensor,
        temperature: Tensor | None = None,
        keys: Tensor | None = None,
        cut: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor: ...

    def cut_tokens(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    def apply_edits(
        self, logits: Tensor, slots: Tensor, counts: Tensor, ids: Tensor, values: Tensor
    ) -> None: ...

    def apply_penalties(
        self,
        logits: Tensor,
        counts: Tensor,
        slots: Tensor,
        repetition: Tensor,
        frequency: Tensor,
        presence: Tensor,
    ) -> None: ...

    def token_logprobs(
        self, logits: Tensor, tokens: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


def ops_for(device: torch.device) -> Ops:
    """The ops for tensors on `device`: plain torch on "cpu", Triton on "cuda"; ValueError for
    anything else."""
    if device.type == "cpu":
        return torch_ops
    if device.type == "cuda":
        from pdserve.kernels import triton_ops

        return triton_ops
    raise ValueError(f"device must be cpu or cuda, not {device.type!r}: set engine.device")
