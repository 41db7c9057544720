"""Paged attention of one step: the `attend` callable that a model's layers call.

Rotates the step's q and k, writes its K and V rows into the pool, then attends: single-query sequences (decodes) by the
decode kernel, the others (prefill chunks) by the varlen prefill kernel. Knows the pool's layout through tensors only;
built anew each step by the model runner.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pdserve.kernels.ops import Ops


@dataclass(frozen=True)
class AttentionBatch:
    """Where a step's rows lie. Rows are ordered: decodes (one query each), prefill chunks, then padding to the null
    block.

    positions: int64 `[rows]`, each row's position in its own sequence. slots: int64 `[rows]`, block * block_size +
    offset of each row. block_tables: int32 `[sequences, max_blocks]`;
    context_lens: int32 `[sequences]`, KV length including this step's rows; query_starts: int32 `[prefills + 1]`,
    offsets into the prefill rows.
    """

    num_decodes: int
    num_prefill_rows: int
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    context_lens: Tensor
    query_starts: Tensor
    max_decode_context: int
    max_query_len: int

    @cached_property
    def table_rows(self) -> Tensor:
        """int32 `[sequences]`: the row of block_tables that each sequence has."""
        return torch.arange(len(self.context_lens), dtype=torch.int32, device=self.context_lens.device)


class PagedAttention:
    """`attend(layer, q, k, v, rope) -> out` over the pool `[blocks, kv_heads, layers, 2, block_size, head_dim]`."""

    def __init__(self, pool: Tensor, ops: Ops, scale: float, batch: AttentionBatch) -> None:
        self._pool = pool
        self._ops = ops
        self._scale = scale
        self._batch = batch

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """q `[rows, heads, head_dim]`, k and v `[rows, kv_heads, head_dim]`, not rotated -> `[rows, heads, head_dim]`.

        rope: the model's cos and sin tables, float32 `[max_position, head_dim // 2]`.
        """
        b = self._batch
        kv = self._pool[:, :, layer]
        q, k = self._ops.rope_write_kv(q, k, v, *rope, b.positions, kv, b.slots)
        d, p = b.num_decodes, b.num_prefill_rows
        outs = []
        if d:
            outs.append(
                self._ops.paged_decode(
                    q[:d],
                    kv,
                    b.block_tables,
                    b.table_rows[:d],
                    b.context_lens[:d],
                    self._scale,
                    b.max_decode_context,
                )
            )
        if p:
            outs.append(
                self._ops.paged_prefill(
                    q[d : d + p],
                    kv,
                    b.block_tables,
                    b.table_rows[d:],
                    b.context_lens[d:],
                    b.query_starts,
                    b.max_query_len,
                    self._scale,
                )
            )
        if d + p < len(q):
            outs.append(q.new_zeros(q[d + p :].shape))
        return outs[0] if len(outs) == 1 else torch.cat(outs)
