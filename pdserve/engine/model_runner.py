"""Runs the model over one step's plan, and gives the logits of the rows that are asked for. The only part of the engine
that holds tensors.

Rows are padded to a multiple of 16 (they write to the null block): the CPU's float32 matrix products give every row the
same bits for any such number of rows, which makes the CPU path batch-invariant. Called by the engine.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.attention import AttentionBatch, PagedAttention
from pdserve.engine.scheduler import Plan
from pdserve.engine.sequence import Sequence
from pdserve.kernels.ops import Ops
from pdserve.models.registry import CausalLM

ROW_MULTIPLE = 16


@dataclass(frozen=True)
class Fence:
    """Marks the end of a step on the device; `ready()` once everything the step wrote is there."""

    event: torch.cuda.Event | None = None

    def ready(self) -> bool:
        return self.event is None or self.event.query()


@dataclass(frozen=True)
class StepOutput:
    """hidden: `[rows, hidden]` of the whole step; first_row: where each sequence's rows begin."""

    hidden: Tensor
    first_row: dict[Sequence, int]
    fence: Fence


class ModelRunner:
    """One rank's model and pool."""

    def __init__(self, model: CausalLM, pool: Tensor, block_size: int, ops: Ops, device: torch.device) -> None:
        self.model = model
        self.pool = pool
        self.block_size = block_size
        self.scale = model.spec.head_dim**-0.5
        self.ops = ops
        self.device = device

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepOutput:
        """Compute the plan's rows."""
        self._copy_blocks(plan.copies)
        order = sorted(plan.num_tokens, key=lambda seq: plan.num_tokens[seq] > 1)  # decodes first; stable
        counts = [plan.num_tokens[seq] for seq in order]
        ids, batch = self._inputs(order, counts)
        attend = PagedAttention(self.pool, self.ops, self.scale, batch)
        hidden = self.model.forward(ids, attend)
        first_row = dict(zip(order, np.cumsum([0, *counts[:-1]]).tolist(), strict=True))
        return StepOutput(hidden, first_row, self._fence())

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """`[len(rows), vocab]`, in the model's dtype, of these rows of a step's hidden."""
        padded = rows + [0] * (-len(rows) % ROW_MULTIPLE)
        index = torch.tensor(padded, dtype=torch.long).to(self.device, non_blocking=True)
        return self.model.logits(hidden[index])[: len(rows)]

    def _inputs(self, order: list[Sequence], counts: list[int]) -> tuple[Tensor, AttentionBatch]:
        total = sum(counts)
        padded = total + -total % ROW_MULTIPLE
        ids = np.zeros(padded, dtype=np.int64)
        positions = np.zeros(padded, dtype=np.int64)
        slots = np.zeros(padded, dtype=np.int64)
        slots[total:] = np.arange(padded - total) % self.block_size
        width = max(len(seq.block_table) for seq in order)
        tables = np.zeros((len(order), width), dtype=np.int32)
        contexts = np.empty(len(order), dtype=np.int32)
        row = 0
        for i, (seq, count) in enumerate(zip(order, counts, strict=True)):
            start, end = seq.num_computed, seq.num_computed + count
            tables[i, : len(seq.block_table)] = seq.block_table
            contexts[i] = end
            at = np.arange(start, end)
            ids[row : row + count] = seq.token_ids[start:end]
            positions[row : row + count] = at
            slots[row : row + count] = tables[i, at // self.block_size].astype(np.int64) * self.block_size
            slots[row : row + count] += at % self.block_size
            row += count
        num_decodes = counts.count(1)
        starts = np.cumsum([0, *counts[num_decodes:]]).astype(np.int32)
        batch = AttentionBatch(
            num_decodes=num_decodes,
            num_prefill_rows=total - num_decodes,
            positions=self._tensor(positions),
            slots=self._tensor(slots),
            block_tables=self._tensor(tables),
            context_lens=self._tensor(contexts),
            query_starts=self._tensor(starts),
            max_decode_context=int(contexts[:num_decodes].max(initial=0)),
            max_query_len=max(counts[num_decodes:], default=0),
        )
        return self._tensor(ids), batch

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy-on-write; in order, one by one, in the rare case that a copied-to block is copied from as well."""
        if not copies:
            return
        sources, targets = zip(*copies, strict=True)
        batches = [copies] if not set(sources) & set(targets) else [[pair] for pair in copies]
        for batch in batches:
            src, dst = (torch.tensor(ids, dtype=torch.long).to(self.device) for ids in zip(*batch, strict=True))
            self.ops.copy_blocks(self.pool, src, dst)

    def _fence(self) -> Fence:
        if self.device.type != "cuda":
            return Fence()
        event = torch.cuda.Event()
        event.record()
        return Fence(event)

    @torch.inference_mode()
    def peak_activation_bytes(self, num_rows: int, num_logits: int) -> int:
        """Device memory (CUDA) the largest step needs beyond weights and pool, measured by running one over the null
        block.
        """
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        zeros = torch.zeros(num_rows, dtype=torch.long, device=self.device)
        hidden = self.model.forward(zeros, lambda _layer, q, *_: torch.zeros_like(q))
        self.model.logits(hidden[:num_logits])
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before
