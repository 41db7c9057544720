"""Runs the model over one step's ForwardWork and gives the logits of the rows that sample. Queues
its work on the device and never waits for it. Sampling is the sampler's task.

Block tables and newest tokens, by slot, stay on the device; a step sends small integers and what
changed. Steps of decodes alone replay CUDA graphs (cuda_graphs.py), and so do steps with prompts
that fit a captured number of rows (piecewise_graphs.py). Others run eagerly. On CPU, rows are
padded to a multiple of 16; padding rows write to the null block. With such a number of rows,
float32 products give every row the same bits, which makes the CPU path batch-invariant. Called by
the executor.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.execution.attention import AttentionBatch, CutAttention, PagedAttention
from pdserve.engine.execution.cuda_graphs import DecodeGraphs, capturing
from pdserve.engine.execution.piecewise_graphs import Cut, PiecewiseGraphs
from pdserve.engine.execution.stage import ALL_LAYERS, Stage
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.engine.step_result import HomeSize
from pdserve.engine.stepping.executor import Padding
from pdserve.engine.stepping.packing import Arrays, to_device, unpack
from pdserve.engine.stepping.work import ForwardWork, StepShape
from pdserve.kernels.collective.ops import Stream, finished
from pdserve.kernels.kv.ops import NO_SCALES, RowScales
from pdserve.kernels.ops import Ops
from pdserve.models.registry import CausalLM
from pdserve.models.step_context import StepContext
from pdserve.protocol.start_progress import Report

ROW_MULTIPLE = 16

Rows = Sequence[np.ndarray]
"""Row numbers of a step, int32, for each home."""


@dataclass(frozen=True)
class StepOutput:
    """Output of the last stage for one step."""

    hidden: Tensor  # [rows, hidden] of this rank's home
    logits: Tensor  # [samples, vocab] of all homes
    slots: Tensor  # int32 [samples], the slot of each row of logits


class ModelRunner:
    """One rank's model and its KV cache, which is set by `use_kv_cache`.

    - num_slots: rows of the tables in addition to row 0, the null row.
    - max_blocks: maximum number of blocks of one sequence.
    - scales: see PagedAttention.
    """

    def __init__(
        self,
        model: CausalLM,
        block_size: int,
        num_slots: int,
        max_blocks: int,
        ops: Ops,
        device: torch.device,
        stage: Stage = ALL_LAYERS,
        scales: Mapping[int, RowScales] = NO_SCALES,
    ) -> None:
        self.model = model
        self.scales = scales
        self.stage = stage
        self.block_size = block_size
        self.ops = ops
        self.device = device
        self.tables = torch.zeros(num_slots + 1, max_blocks, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self._graphs: DecodeGraphs | None = None
        self._pieces: PiecewiseGraphs | None = None

    def use_kv_cache(self, kv_cache: KVCache) -> None:
        """Set the KV cache. Its size follows from trial_steps.peak_bytes, which runs before."""
        self.kv_cache = kv_cache

    @torch.inference_mode()
    def capture_graphs(
        self, decodes: Sequence[int], prompts: Sequence[int], report: Report
    ) -> None:
        """Capture steps of decodes at these batch sizes, and steps with prompts at these numbers of
        rows. Every later step up to the largest size replays them. report: called after each
        capture.
        """
        with capturing(self.device) as memory:
            if prompts:
                self._pieces = PiecewiseGraphs(self._prompt_step, self.device, memory)
                self._pieces.capture(prompts, report)
            self._graphs = DecodeGraphs(self._decode, self.device, memory)
            self._graphs.capture(decodes, report)

    def padding(self, homes: Sequence[HomeSize]) -> list[Padding]:
        """See Executor.padding."""
        is_decode = all(home.is_decode for home in homes)
        largest = max(home.num_sequences for home in homes)
        size = self._graphs.size_for(largest) if self._graphs and is_decode else 0
        if size:
            return [Padding(size, size, size)] * len(homes)
        most = max(home.num_rows for home in homes)
        if self._pieces is not None and (rows := self._pieces.size_for(most)):
            return [Padding(0, rows, max(home.num_sequences, 1)) for home in homes]
        return [self._eager_padding(home) for home in homes]

    def _eager_padding(self, home: HomeSize) -> Padding:
        num_rows = max(home.num_rows, 1)
        num_rows += -num_rows % ROW_MULTIPLE if self.device.type == "cpu" else 0
        num_sequences = home.num_sequences if home.num_rows else num_rows
        return Padding(0, num_rows, num_sequences, is_eager=True)

    @torch.inference_mode()
    def forward(self, work: ForwardWork) -> StepOutput | None:
        """Queue the step's rows. Returns None except on the last stage."""
        own = work.homes[self.stage.dims.home]
        for copies in own.copies:
            src, dst = (to_device(ids, self.device) for ids in (copies.sources, copies.targets))
            self.ops.kv.copy_blocks(self.kv_cache.data, src, dst)
        if own.table_changes is not None:
            self.ops.batch.update_tables(self.tables, to_device(own.table_changes, self.device))
        is_last = self.stage.dims.is_last_stage
        if work.graph:
            assert self._graphs is not None, "a step for a CUDA graph, but none was captured"
            self.stage.before_replay(work.graph)
            replayed = self._graphs.replay(work.graph, own.packed)
            self.stage.after_replay(replayed[0])
            return self._pick(work, *replayed) if is_last else None
        packed = to_device(own.packed, self.device)
        arrays = unpack(packed, own.lengths)
        size = own.num_rows
        if self._pieces is not None and self._pieces.has(size) and {*work.home_rows} == {size}:
            hidden = self._replay_prompts(packed[: 3 * size].view(3, size), arrays, own.shape)
        else:
            received = self.stage.take(size)
            hidden = self._forward(arrays, own.shape, work.home_rows, received)
            self.stage.give(hidden)
        if not is_last:
            return None
        rows, slots = logit_rows_of(work)
        return StepOutput(hidden, self.logits(hidden, rows), to_device(slots, self.device))

    def share_tokens(self, slots: Tensor, token_ids: Tensor) -> None:
        """Give all ranks the tokens that rank 0 has sampled, as the newest of their slots. The
        other ranks pass an empty tensor to receive them. With stages this does nothing, because the
        next message has the tokens."""
        if self.stage.dims.pp == 1:
            shared = self.ops.exchange.broadcast(token_ids)
            self.ops.batch.store_tokens(self.last_token, slots, shared)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Logits `[N, vocab]` of these rows of each home's hidden, home after home; N may be 0."""
        picked = self.rows_of(hidden, rows)
        count = len(picked)
        if not count:
            return hidden.new_empty(0, self.model.spec.vocab_size)
        if self.device.type == "cpu":
            picked = functional.pad(picked, (0, 0, 0, -count % ROW_MULTIPLE))
        return self.model.logits(picked)[:count]

    @torch.inference_mode()
    def rows_of(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Collect `[N, hidden]`, these rows of each home's hidden, home after home, on every rank.
        hidden: rows of this rank's home. Every rank takes part even if no row is wanted, so a
        return means that the ranks of all homes have arrived."""
        own = hidden.index_select(0, to_device(_or_first(rows[self.stage.dims.home]), self.device))
        if len(rows) == 1:
            return own[: len(rows[0])]
        counts = [max(len(each), 1) for each in rows]
        gathered = self.ops.exchange.gather_rows(own, counts)
        kept = [each[: len(of)] for each, of in zip(gathered.split(counts), rows, strict=True)]
        return torch.cat(kept)

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do, even if it has failed, and until the next
        stage has received what was sent to it."""
        self.stage.pipe.flush()
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # a device error that was already raised
                torch.cuda.synchronize(self.device)

    def _pick(self, work: ForwardWork, hidden: Tensor, logits: Tensor, slots: Tensor) -> StepOutput:
        """Pick the logits of a graph's rows that sample: nearly always all of them."""
        if work.homes[0].logit_rows is None:
            return StepOutput(hidden, logits[: work.num_samples], slots[: work.num_samples])
        rows, wanted = logit_rows_of(work)
        firsts = range(0, len(rows) * work.graph, work.graph)
        picked = np.concatenate([first + of for first, of in zip(firsts, rows, strict=True)])
        index = to_device(picked.astype(np.int32), self.device)
        return StepOutput(hidden, logits.index_select(0, index), to_device(wanted, self.device))

    def check(self) -> None:
        """RuntimeError if a rank did not answer in the work that the device has done."""
        self.ops.collective.check()
        self.ops.exchange.check()
        self.stage.pipe.check()

    def call_off(self) -> None:
        """End whatever waits for other ranks on the device. May be called from any thread."""
        self.ops.collective.call_off()
        self.ops.exchange.call_off()
        self.stage.pipe.call_off()

    def _decode(self, arrays: Arrays[Tensor]) -> tuple[Tensor, Tensor]:
        """The step that a graph captures. Gives hidden, one row per sequence at any context, and
        the logits of all homes' rows. Except on the last stage, hidden stands in for logits."""
        longest = self.tables.shape[1] * self.block_size
        size = len(arrays.ids)
        home_rows = (size,) * self.stage.dims.dp
        received = self.stage.take_in_graph(size)
        hidden = self._forward(arrays, StepShape(size, longest), home_rows, received)
        self.stage.give_in_graph(hidden)
        if not self.stage.dims.is_last_stage:
            return hidden, hidden
        return hidden, self.model.logits(self.ops.exchange.gather_rows(hidden, home_rows))

    def _replay_prompts(self, rows: Tensor, arrays: Arrays[Tensor], shape: StepShape) -> Tensor:
        """Run a step whose number of rows was captured."""
        assert self._pieces is not None
        self.stage.before_replay(rows.shape[1])
        batch = self._batch(arrays, shape, arrays.positions)  # attention reads no slot_mapping
        attention = PagedAttention(self.kv_cache, self.ops, batch, self.scales)
        hidden = self._pieces.replay(rows, attention.carry_out)
        self.stage.after_replay(hidden)
        return hidden

    def _prompt_step(self, rows: Tensor, cut: Cut) -> Tensor:
        """The step that piecewise graphs capture."""
        ids, positions, slots = rows
        size = len(ids)
        none = ids[:0]
        arrays = Arrays(ids, positions, slots, none, none, ids[:1])
        received = self.stage.take_in_graph(size)
        home_rows = (size,) * self.stage.dims.dp
        hidden = self._forward(arrays, StepShape(0, 0), home_rows, received, cut)
        self.stage.give_in_graph(hidden)
        return hidden

    def _batch(
        self, arrays: Arrays[Tensor], shape: StepShape, slot_mapping: Tensor
    ) -> AttentionBatch:
        return AttentionBatch(
            shape=shape,
            positions=arrays.positions,
            slot_mapping=slot_mapping,
            block_tables=self.tables,
            table_rows=arrays.table_rows,
            context_lens=arrays.context_lens,
            query_starts=arrays.query_starts,
        )

    def _forward(
        self,
        arrays: Arrays[Tensor],
        shape: StepShape,
        home_rows: tuple[int, ...],
        received: Tensor | None,
        cut: Cut | None = None,
    ) -> Tensor:
        """Run this stage's layers over a step's rows. received: see run_layers. cut: is given the
        attention calls."""
        ids, slot_mapping = self.ops.batch.gather_inputs(
            arrays.ids,
            arrays.positions,
            arrays.slots,
            self.last_token,
            self.tables,
            self.block_size,
        )
        batch = self._batch(arrays, shape, slot_mapping)
        if cut is None:
            attend = PagedAttention(self.kv_cache, self.ops, batch, self.scales)
        else:
            attend = CutAttention(self.kv_cache, self.ops, batch, self.scales, cut)
        # rows in the null block are padding
        live = slot_mapping >= self.block_size if self.model.spec.experts else None
        step = StepContext(
            attend,
            arrays.positions,
            live=live,
            attend_latent=attend.latent,
            home_rows=home_rows,
        )
        return self.run_layers(ids, step, received)

    def run_layers(self, ids: Tensor, step: StepContext, received: Tensor | None = None) -> Tensor:
        """Returns `[T, hidden]`: after the last norm on the last stage, else the stream for the
        next stage. received: rows of the previous stage; None: their values do not matter."""
        dims = self.stage.dims
        self.ops.collective.begin()
        stream: Stream
        if dims.is_first_stage:
            stream = self.model.embed(ids, step)
        elif received is not None:
            stream = received
        else:
            width = self.model.spec.hidden_size
            dtype = self.model.weights.dtype
            stream = torch.zeros(len(ids), width, dtype=dtype, device=self.device)
        stream = self.model.forward(stream, step)
        return self.model.hidden(stream) if dims.is_last_stage else finished(stream)


def logit_rows_of(work: ForwardWork) -> tuple[list[np.ndarray], np.ndarray]:
    """The rows of each home that sample, and the slots of all of them, home after home."""
    found = [home.logit_rows for home in work.homes]
    known = [each for each in found if each is not None]
    assert len(known) == len(found), "a step without a graph must say which rows sample"
    return [each.rows for each in known], np.concatenate([each.slots for each in known])


def _or_first(rows: np.ndarray) -> np.ndarray:
    return rows if len(rows) else np.zeros(1, dtype=np.int32)
