"""Paged attention of one step: the `attend` callable that a model's layers call.

Rotates the step's q and k, writes its K and V rows into the KV cache, then attends: single-query
sequences (decodes) by the decode kernel, the others (prefill chunks) by the varlen prefill kernel
or, where it pays, by cuDNN. Knows the KV cache's layout through tensors only; built anew each step
by the model runner.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.stepping.work import StepShape
from pdserve.kernels.ops import Ops


@dataclass(frozen=True)
class AttentionBatch:
    """Where a step's rows lie. Rows are ordered: decodes (one query each), prefill chunks, then
    padding to the null block.

    positions: int32 `[rows]`, each row's position in its own sequence. slot_mapping: int64
    `[rows]`, block * block_size plus offset of each row. block_tables: int32 `[num_slots,
    max_blocks]`, of all slots. table_rows, context_lens: int32 `[sequences]`, the row of
    block_tables, and KV length including this step's rows. query_starts: int32 `[prefills + 1]`,
    offsets into the prefill rows.
    """

    shape: StepShape
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    table_rows: Tensor
    context_lens: Tensor
    query_starts: Tensor


class PagedAttention:
    """`attend(layer, q, k, v, rope) -> out`. layers: each layer `[blocks, kv_heads, 2, block_size,
    head_dim]` of the KV cache.
    """

    def __init__(
        self, layers: Sequence[Tensor], ops: Ops, scale: float, batch: AttentionBatch
    ) -> None:
        self._layers = layers
        self._ops = ops
        self._scale = scale
        self._batch = batch
        num_decodes = batch.shape.num_decodes
        self._decodes = batch.table_rows[:num_decodes], batch.context_lens[:num_decodes]
        self._prefills = (
            batch.table_rows[num_decodes:],
            batch.context_lens[num_decodes:],
            batch.query_starts,
        )

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        """q `[rows, heads, head_dim]`, k and v `[rows, kv_heads, head_dim]`, not rotated -> `[rows,
        heads, head_dim]`.

        rope: the model's cos and sin tables, float32 `[max_position, head_dim // 2]`.
        """
        kv = self._layers[layer]
        q, k = self._ops.rope_write_kv(
            q, k, v, *rope, self._batch.positions, kv, self._batch.slot_mapping
        )
        num_decodes = self._batch.shape.num_decodes
        if num_decodes == len(q):
            return self._decode(q, kv)
        if num_decodes == 0:
            return self._prefill(q, k, v, kv)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._decode(q[:num_decodes], kv, out[:num_decodes])
        self._prefill(q[num_decodes:], k[num_decodes:], v[num_decodes:], kv, out[num_decodes:])
        return out

    def _decode(self, q: Tensor, kv: Tensor, out: Tensor | None = None) -> Tensor:
        longest = self._batch.shape.max_decode_context
        return self._ops.paged_decode(
            q, kv, self._batch.block_tables, *self._decodes, self._scale, longest, out
        )

    def _prefill(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """The prefill chunks, and zeros for padding rows behind them."""
        shape = self._batch.shape
        tables = self._batch.block_tables
        if shape.fresh_lens and self._ops.fresh_prefill_pays(q, k, v, shape.fresh_lens):
            fresh = self._ops.fresh_prefill(q, k, v, shape.fresh_lens, self._scale)
            return fresh if out is None else out.copy_(fresh)
        if shape.prefix_len and self._ops.chunk_prefill_pays(
            q, k, v, shape.prefix_len, kv.shape[3]
        ):
            return self._ops.chunk_prefill(
                q, k, v, kv, tables, *self._prefills, shape.prefix_len, self._scale, out
            )
        return self._ops.paged_prefill(
            q, kv, tables, *self._prefills, shape.max_query_len, self._scale, out
        )
