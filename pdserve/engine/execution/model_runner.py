"""Runs the model over one step's plan and gives the logits of the rows that sample. Queues its work
on the device and never waits for it; sampling is the sampler's.

Keeps on the device what steps have in common: block tables and newest tokens by slot. A step sends
small integers and what changed. Steps of decodes alone replay CUDA graphs (cuda_graphs.py), others
run eagerly. On CPU rows are padded to a multiple of 16 (they write to the null block): float32
products give every row the same bits for any such number of rows, which makes the CPU path
batch-invariant. Called by the engine.
"""

import contextlib
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.execution.attention import AttentionBatch, PagedAttention, StepShape
from pdserve.engine.execution.cuda_graphs import DecodeGraphs
from pdserve.engine.execution.step_inputs import (
    Arrays,
    StepInputs,
    lengths_of,
    pack,
    step_inputs,
    table_changes,
    to_device,
    unpack,
)
from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.step_plan import StepPlan
from pdserve.kernels.ops import Ops
from pdserve.models.registry import CausalLM
from pdserve.protocol.start_progress import Report

ROW_MULTIPLE = 16


class Fence:
    """Marks a moment of the device's work; made when that work is queued. On CPU it has passed
    already."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def ready(self) -> bool:
        """Whether everything queued before is done."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "Fence") -> float:
        """Device time between two fences that are ready; 0 on CPU."""
        if self._event is None or earlier._event is None:
            return 0.0
        return earlier._event.elapsed_time(self._event) / 1000


@dataclass(frozen=True)
class StepOutput:
    """hidden: `[rows, hidden]` of the whole step. first_row: where each sequence's rows begin in
    it. logits: `[samples, vocab]`, and sample_slots int32 `[samples]` the slots they are for.
    """

    hidden: Tensor
    first_row: dict[Sequence, int]
    logits: Tensor
    sample_slots: Tensor


class ModelRunner:
    """One rank's model and KV cache, which `use_kv_cache` gives it. num_slots: rows of the tables
    beside row 0, the null one. max_blocks: of one sequence.
    """

    def __init__(
        self,
        model: CausalLM,
        block_size: int,
        num_slots: int,
        max_blocks: int,
        ops: Ops,
        device: torch.device,
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.scale = model.spec.head_dim**-0.5
        self.ops = ops
        self.device = device
        self.tables = torch.zeros(num_slots + 1, max_blocks, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self._graphs: DecodeGraphs | None = None

    def use_kv_cache(self, kv_cache: Tensor) -> None:
        """`[blocks, kv_heads, layers, 2, block_size, head_dim]`; after peak_activation_bytes, which
        tells its size."""
        self.kv_cache = kv_cache
        self._layers = kv_cache.unbind(2)

    @torch.inference_mode()
    def capture_graphs(self, sizes: SequenceOf[int], report: Report) -> None:
        """Capture the decode step at these batch sizes; every later step of decodes alone, up to
        the largest, uses one. report: is called after each.
        """
        self._graphs = DecodeGraphs(self._decode, self.device)
        self._graphs.capture(sizes, report)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, siblings: SequenceOf[SequenceOf[Sequence]]) -> StepOutput:
        """Queue the plan's rows, whose sequences have advanced by it already.

        siblings: for each planned sequence that samples, itself and the choices that fork off it;
        each gets logits.
        """
        self._copy_blocks(plan.copies)
        changes = table_changes(
            [*plan.num_tokens, *(member for members in siblings for member in members[1:])]
        )
        if changes is not None:
            self.ops.update_tables(self.tables, to_device(changes, self.device))
        size = (
            self._graphs.size_for(len(plan.num_tokens)) if self._graphs and plan.is_decode else None
        )
        if size is not None:
            assert self._graphs is not None
            inputs = step_inputs(plan, size, size, self.block_size)
            hidden, logits, slots = self._graphs.replay(size, pack(inputs.arrays))
            return self._pick(
                inputs, _sample_rows(plan, inputs, siblings), siblings, hidden, logits, slots
            )
        return self._eager(plan, siblings)

    def feed_back(self, output: StepOutput, token_ids: Tensor) -> None:
        """What was sampled is the newest token of its slots."""
        self.ops.store_tokens(self.last_token, output.sample_slots, token_ids)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: SequenceOf[int]) -> Tensor:
        """`[len(rows), vocab]` of these rows of a step's hidden."""
        padded = list(rows)
        if self.device.type == "cpu":
            padded += [0] * (-len(padded) % ROW_MULTIPLE)
        index = to_device(np.array(padded, dtype=np.int32), self.device)
        return self.model.logits(hidden.index_select(0, index))[: len(rows)]

    def fence(self) -> Fence:
        """Behind everything queued so far."""
        return Fence(self.device)

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do, also when it has failed."""
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # a device error that was raised already
                torch.cuda.synchronize(self.device)

    def _eager(self, plan: StepPlan, siblings: SequenceOf[SequenceOf[Sequence]]) -> StepOutput:
        total = sum(plan.num_tokens.values())
        padded = total + -total % ROW_MULTIPLE if self.device.type == "cpu" else total
        inputs = step_inputs(plan, padded, len(plan.num_tokens), self.block_size)
        arrays = unpack(to_device(pack(inputs.arrays), self.device), lengths_of(inputs.arrays))
        hidden = self._forward(arrays, inputs.shape)
        rows = _sample_rows(plan, inputs, siblings)
        logits = (
            self.logits(hidden, rows) if rows else hidden.new_empty(0, self.model.spec.vocab_size)
        )
        return StepOutput(hidden, inputs.first_row, logits, self._sample_slots(siblings))

    def _pick(
        self,
        inputs: StepInputs,
        rows: list[int],
        siblings: SequenceOf[SequenceOf[Sequence]],
        hidden: Tensor,
        logits: Tensor,
        slots: Tensor,
    ) -> StepOutput:
        """The logits of a graph's rows that sample: nearly always all of them."""
        if rows == list(range(len(inputs.first_row))):
            return StepOutput(hidden, inputs.first_row, logits[: len(rows)], slots[: len(rows)])
        picked = logits.index_select(0, to_device(np.array(rows, dtype=np.int32), self.device))
        return StepOutput(hidden, inputs.first_row, picked, self._sample_slots(siblings))

    def _sample_slots(self, siblings: SequenceOf[SequenceOf[Sequence]]) -> Tensor:
        slots = np.array(
            [member.slot for members in siblings for member in members], dtype=np.int32
        )
        return to_device(slots, self.device)

    def _decode(self, arrays: Arrays[Tensor]) -> tuple[Tensor, Tensor]:
        """What a graph captures: hidden and logits of one row a sequence, whatever the contexts."""
        longest = self.tables.shape[1] * self.block_size
        hidden = self._forward(arrays, StepShape(len(arrays.ids), longest))
        return hidden, self.model.logits(hidden)

    def _forward(self, arrays: Arrays[Tensor], shape: StepShape) -> Tensor:
        ids, slot_mapping = self.ops.gather_inputs(
            arrays.ids,
            arrays.positions,
            arrays.slots,
            self.last_token,
            self.tables,
            self.block_size,
        )
        batch = AttentionBatch(
            shape=shape,
            positions=arrays.positions,
            slot_mapping=slot_mapping,
            block_tables=self.tables,
            table_rows=arrays.table_rows,
            context_lens=arrays.context_lens,
            query_starts=arrays.query_starts,
        )
        return self.model.forward(ids, PagedAttention(self._layers, self.ops, self.scale, batch))

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy-on-write; in order, one by one, in the rare case that a copied-to block is copied
        from as well."""
        if not copies:
            return
        sources, targets = zip(*copies, strict=True)
        batches = [copies] if not set(sources) & set(targets) else [[pair] for pair in copies]
        for batch in batches:
            src, dst = (
                to_device(np.array(ids, dtype=np.int64), self.device)
                for ids in zip(*batch, strict=True)
            )
            self.ops.copy_blocks(self.kv_cache, src, dst)

    @torch.inference_mode()
    def warm_dense_prefill(self, num_rows: int) -> None:
        """Prepares attention of prompts for steps of up to so many rows, by one over the null
        block."""
        zeros = torch.zeros(num_rows, dtype=torch.int32, device=self.device)

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, rope: tuple[Tensor, Tensor]
        ) -> Tensor:
            if layer == 0:
                q, k = self.ops.rope_write_kv(q, k, v, *rope, zeros, self._layers[0], zeros.long())
                self.ops.warm_dense_prefill(q, k, v, self.scale)
                self._chunk_behind_a_piece(q, k, v)
            return torch.zeros_like(q)

        self.model.forward(zeros, attend)

    def _chunk_behind_a_piece(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Launches what such a chunk needs beside attention, over the null block."""
        num_rows = len(q)
        fits = 2 * num_rows <= self.tables.shape[1] * self.block_size
        if fits and self.ops.chunk_prefill_pays(q, k, v, num_rows, self.block_size):
            rows, lens, starts = (
                torch.tensor(ids, dtype=torch.int32, device=self.device)
                for ids in ([0], [2 * num_rows], [0, num_rows])
            )
            paged = self._layers[0], self.tables, rows, lens, starts
            self.ops.chunk_prefill(q, k, v, *paged, num_rows, self.scale)

    @torch.inference_mode()
    def peak_activation_bytes(self, num_rows: int, num_logits: int) -> int:
        """Device memory (CUDA) the largest step needs beyond weights and KV cache, measured by
        running one over the null block.
        """
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        zeros = torch.zeros(num_rows, dtype=torch.int32, device=self.device)

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, rope: tuple[Tensor, Tensor]
        ) -> Tensor:
            """With as much memory as attention/dense.py holds: three outputs, and keys and values
            for all rows."""
            held = q.new_zeros(3, *q.shape), k.new_zeros(2, *k.shape)
            return held[0][0]

        hidden = self.model.forward(zeros, attend)
        self.model.logits(hidden[:num_logits])
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


def _sample_rows(
    plan: StepPlan, inputs: StepInputs, siblings: SequenceOf[SequenceOf[Sequence]]
) -> list[int]:
    """The last row of each sampling sequence, once for each of its siblings."""
    last = {
        members[0]: inputs.first_row[members[0]] + plan.num_tokens[members[0]] - 1
        for members in siblings
    }
    return [last[members[0]] for members in siblings for _ in members]
