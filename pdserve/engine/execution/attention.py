"""Paged attention of one step: the `attend` callable that a model's layers call.

One op normalises the step's q and k (if the model's heads have norms), rotates them, and writes the
K and V rows into the KV cache. Then one op attends for single-query sequences (decodes), and
another for the others (prefill chunks). Of the KV cache this module knows the layers and the size
of the blocks. The model runner makes a new `PagedAttention` for each step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pdserve.engine.execution.piecewise_graphs import AttentionCall, Cut
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.engine.stepping.work import StepShape
from pdserve.kernels.attention.spec import AttentionSpec, Paged, Prefills
from pdserve.kernels.kv.ops import NO_SCALES, HeadNorms, RowScales
from pdserve.kernels.latents.space import into_latent, out_of_latent
from pdserve.kernels.latents.spec import LatentAttentionSpec, LatentHeads
from pdserve.kernels.launching.notes import noting
from pdserve.kernels.launching.repeat import Memory, Repeatable
from pdserve.kernels.ops import Ops


@dataclass(frozen=True)
class AttentionBatch:
    """Where a step's rows lie. Rows are ordered: decodes (one query each), prefill chunks, then
    padding to the null block.
    """

    shape: StepShape
    positions: Tensor  # int32 [rows], each row's position in its own sequence
    slot_mapping: Tensor  # int64 [rows], block * block_size + offset of each row
    block_tables: Tensor  # int32 [num_slots, max_blocks], tables of all slots
    table_rows: Tensor  # int32 [sequences], each sequence's row of block_tables
    context_lens: Tensor  # int32 [sequences], KV length including this step's rows
    query_starts: Tensor  # int32 [prefills + 1], offsets into the prefill rows


class PagedAttention:
    """The `attend` of one step. scales: row scales of the layers where they are not all 1."""

    def __init__(
        self,
        kv_cache: KVCache,
        ops: Ops,
        batch: AttentionBatch,
        scales: Mapping[int, RowScales] = NO_SCALES,
    ) -> None:
        self._layers = kv_cache.layers
        self._scales = scales
        self._ops = ops
        self._batch = batch
        shape = batch.shape
        num = self._num_decodes = shape.num_decodes
        tables, rows, lens = batch.block_tables, batch.table_rows, batch.context_lens
        self._decodes = Paged(tables, rows[:num], lens[:num], shape.max_decode_context)
        self._prefills = Prefills(
            Paged(tables, rows[num:], lens[num:], tables.shape[1] * kv_cache.layout.block_size),
            batch.query_starts,
            max((rows for _, rows in shape.chunks), default=0),
            shape.chunks,
        )
        self._repeatable: dict[int, Repeatable] = {}

    def __call__(
        self,
        layer: int,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: tuple[Tensor, Tensor],
        norms: HeadNorms | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See models.step_context.Attend. rope: the model's cos and sin tables, float32
        `[max_position, head_dim // 2]`.
        """
        kv = self._layers[layer]
        scales = self._scales.get(layer)
        q, k, v = self._ops.kv.rope_write_kv(
            q, k, v, *rope, self._batch.positions, kv, self._batch.slot_mapping, norms, scales
        )
        return self._attend(spec, q, k, v, kv, None if scales is None else scales.v, sinks)

    def latent(
        self,
        layer: int,
        spec: LatentAttentionSpec,
        q: Tensor,
        latent: Tensor,
        heads: LatentHeads,
        rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        """See models.step_context.AttendLatent.

        If prompts do not get keys and values of their own, all rows go into the latent's space and
        come out of it together. So on CPU their bits do not depend on which of them decode."""
        kv = self._layers[layer]
        num = self._num_decodes
        ops = self._ops.latents
        expands = num < len(q) and ops.expansion_pays(self._prefills, spec, q)
        wide = q.new_empty(num if expands else len(q), q.shape[1], spec.attends.head_dim)
        nope, rotated = q.split((spec.nope_dim, spec.rope_dim), 2)
        ops.rope_write(
            rotated,
            rotated if expands else wide[:, :, spec.rank :],
            latent,
            heads.norm,
            *rope,
            self._batch.positions,
            kv,
            self._batch.slot_mapping,
            spec.is_interleaved,
        )
        into_latent(nope[: len(wide)], heads, wide[:, :, : spec.rank])
        if not expands:
            return out_of_latent(self._attend_inside(spec, wide, kv), heads)
        out = q.new_empty(*q.shape[:2], spec.v_dim)
        ops.expanded_prefill(q[num:], kv, self._prefills, spec, heads, out[num:])
        if num:
            wide[:, :, spec.rank :] = rotated[:num]
            attended = ops.decode(wide, kv, self._decodes, spec)
            out[:num] = out_of_latent(attended, heads)
        return out

    def _attend_inside(self, spec: LatentAttentionSpec, q: Tensor, kv: Tensor) -> Tensor:
        """Attends in the latent's space, for decodes and prompts."""
        num = self._num_decodes
        ops = self._ops.latents
        if num == len(q):
            return ops.decode(q, kv, self._decodes, spec)
        out = q.new_empty(*q.shape[:2], spec.rank)
        if num:
            ops.decode(q[:num], kv, self._decodes, spec, out[:num])
        ops.prefill(q[num:], kv, self._prefills, spec, out[num:])
        return out

    def carry_out(self, call: AttentionCall) -> None:
        """Attends for a call between two graphs. Rows of padding become zeros.

        What the first call of a kind launches is repeated for the others of this step."""
        repeatable = self._repeatable.get(call.kind)
        if repeatable is None:
            with noting() as notes:
                self._attend_rows(call)
            batch = self._batch
            tables = batch.block_tables, batch.table_rows, batch.context_lens, batch.query_starts
            self._repeatable[call.kind] = Repeatable(notes, call.given, Memory(tables))
        elif not repeatable.repeat(call.given):
            self._attend_rows(call)
        num = self._batch.shape.num_rows
        if num < len(call.out):
            call.out[num:].zero_()

    def _attend_rows(self, call: AttentionCall) -> None:
        num = self._batch.shape.num_rows
        q, k, v, out = call.q[:num], call.k[:num], call.v[:num], call.out[:num]
        self._attend(call.spec, q, k, v, call.kv, call.v_scales, call.sinks, out)

    def _attend(
        self,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Tensor,
        v_scales: Tensor | None,
        sinks: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        num = self._num_decodes
        attention = self._ops.attention
        if num == len(q):
            return attention.decode(q, kv, self._decodes, spec, out, v_scales, sinks)
        if num == 0:
            return attention.prefill(q, k, v, kv, self._prefills, spec, out, v_scales, sinks)
        rows = q[num:], k[num:], v[num:]
        if out is None:
            out = q.new_empty(*q.shape[:2], spec.out_width)
        attention.decode(q[:num], kv, self._decodes, spec, out[:num], v_scales, sinks)
        attention.prefill(*rows, kv, self._prefills, spec, out[num:], v_scales, sinks)
        return out


class CutAttention(PagedAttention):
    """The `attend` of a step that is captured: it prepares the rows of a layer, and leaves their
    attention to `cut`."""

    def __init__(
        self,
        kv_cache: KVCache,
        ops: Ops,
        batch: AttentionBatch,
        scales: Mapping[int, RowScales],
        cut: Cut,
    ) -> None:
        super().__init__(kv_cache, ops, batch, scales)
        self._cut = cut

    def _attend(
        self,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Tensor,
        v_scales: Tensor | None,
        sinks: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        given = q.new_empty(*q.shape[:2], spec.out_width) if out is None else out
        self._cut(AttentionCall(spec, q, k, v, kv, v_scales, sinks, given))
        return given
