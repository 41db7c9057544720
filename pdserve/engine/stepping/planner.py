"""Turns the scheduler's plan into messages. It does everything in a step that needs counts, but no
token's value.

It advances the sequences, forks choices, and packs what the device needs to know. Work that needs
values is the collector's. A step with a row whose logit rules need values is sampled late: its
SampleWork is made after the previous step has been collected. Knows no events and no device. The
engine calls it once per step.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from pdserve.engine.requests import Requests
from pdserve.engine.sampling.row_staging import RowStaging
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.engine.scheduling.home import Home
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.scheduling.sequence import Request, Sequence, Status
from pdserve.engine.scheduling.step_plan import HomePlan, StepPlan
from pdserve.engine.step_result import EngineStats, HomeSize
from pdserve.engine.stepping.executor import Padding, StepHandle
from pdserve.engine.stepping.packing import StepInputs, step_inputs, table_changes
from pdserve.engine.stepping.work import (
    BlockCopies,
    ForwardWork,
    HomeWork,
    LogitRows,
    SampleWork,
    ScoredRows,
)
from pdserve.protocol.block_digests import BlockHasher
from pdserve.protocol.commands import Start
from pdserve.protocol.sampling_params import SamplingParams

PLAIN = SamplingParams(temperature=0, seed=0)


@dataclass(eq=False)
class PlannedStep:
    """A step, as the engine remembers it until it is collected."""

    forward: ForwardWork
    num_rows: int
    num_sequences: int
    busiest: HomeSize  # size of the home with the most prompt tokens
    # the sequences of each sampled row: a sequence, then the choices that fork off it here
    siblings: list[list[Sequence]]
    members: list[Sequence]  # all siblings, one per sample
    rows: list[SampleRow]  # the row of each member
    positions: list[int]  # the position at which each member samples
    scored: list[Request]  # requests whose prompts are scored by HomeWork.scores
    embedded: list[Sequence]  # sequences whose last rows are HomeWork.hidden_rows
    # prompts to be handed over, and how many of their rows are written when the step is done
    written_rows: list[tuple[Sequence, int]]
    is_eager: bool  # see Padding
    handle: StepHandle | None = None  # set when it has been forwarded
    host_seconds: float = 0.0  # time that the engine's thread worked for it


@dataclass(frozen=True)
class _HomePart:
    """One home's part of a step. siblings, scored, embedded: see PlannedStep."""

    work: HomeWork
    siblings: list[list[Sequence]]
    scored: list[Request]
    embedded: list[Sequence]


class StepPlanner:
    def __init__(
        self,
        staging: RowStaging,
        scheduler: Scheduler,
        hasher: BlockHasher,
        requests: Requests,
        stats: EngineStats,
    ) -> None:
        self.staging = staging
        self._scheduler = scheduler
        self._hasher = hasher
        self._requests = requests
        self._stats = stats
        self._num_steps = 0

    def plan(self, plan: StepPlan, padding: SequenceOf[Padding]) -> PlannedStep:
        """Do everything that needs only counts. padding: of each home's part."""
        for home in self._scheduler.homes:
            home.blocks.begin_step()
            for slot in home.freed_slots:
                self.staging.release(slot)
            home.freed_slots.clear()
        parts = [
            self._home_part(*each)
            for each in zip(self._scheduler.homes, plan.homes, padding, strict=True)
        ]
        members = [member for part in parts for group in part.siblings for member in group]
        rows = [self._row(seq) for seq in members]
        is_late = any(
            row.states and seq.num_pending and self.staging.needs_values(row, seq.next_position)
            for seq, row in zip(members, rows, strict=True)
        )
        positions = [seq.next_position for seq in members]
        self._num_steps += 1
        work = ForwardWork(
            number=self._num_steps,
            graph=padding[0].graph,
            homes=tuple(part.work for part in parts),
            num_samples=len(members),
            is_late=is_late,
        )
        for seq in members:
            seq.num_pending += 1
        self._stats.num_steps += 1
        self._stats.num_late_steps += is_late
        return PlannedStep(
            forward=work,
            num_rows=plan.num_rows,
            num_sequences=plan.num_sequences,
            busiest=max(sizes_of(plan), key=lambda size: size.num_more),
            siblings=[group for part in parts for group in part.siblings],
            members=members,
            rows=rows,
            positions=positions,
            scored=[request for part in parts for request in part.scored],
            embedded=[seq for part in parts for seq in part.embedded],
            written_rows=[(seq, seq.num_computed) for seq, _ in plan if seq.request.prefill_only],
            is_eager=padding[0].is_eager,
        )

    def _home_part(self, home: Home, plan: HomePlan, padding: Padding) -> "_HomePart":
        """Make one home's part. Advances its sequences and forks choices."""
        siblings = [[seq, *self._fork(seq)] for seq in self._advance(home, plan)]
        inputs = step_inputs(plan, padding, self._hasher.block_size)
        forks = (fork for group in siblings for fork in group[1:])
        scored = self._prompts_to_score(plan, inputs)
        embedded = [
            seq
            for seq, chunk in plan.chunks.items()
            if not chunk.num_samples and seq.request.kind == "embed" and seq.num_uncomputed == 0
        ]
        is_known = padding.graph > 0 and len(self._scheduler.homes) == 1
        work = HomeWork(
            packed=inputs.packed,
            lengths=inputs.lengths,
            shape=inputs.shape,
            table_changes=table_changes([*plan.chunks, *forks]),
            copies=_batches(plan.copies),
            logit_rows=_logit_rows(plan, inputs, siblings, is_known),
            scores=tuple(rows for _, rows in scored),
            hidden_rows=_hidden_rows(plan, inputs, embedded),
        )
        return _HomePart(work, siblings, [request for request, _ in scored], embedded)

    def sample_work(self, step: PlannedStep) -> SampleWork:
        """Make the step's second message. The previous step may have been collected since the plan;
        for a late step it must have been. AssertionError if a value that a late step needs is not
        known."""
        rows = [
            _over(row) if seq.status is Status.FINISHED else row
            for seq, row in zip(step.members, step.rows, strict=True)
        ]
        if step.forward.is_late:
            for seq, row, position in zip(step.members, rows, step.positions, strict=True):
                assert seq.status is Status.FINISHED or row.num_known == position, (
                    "a step is sampled late, but before the previous step was collected"
                )
        return SampleWork(step.forward.number, self.staging.stage(rows, step.positions))

    def digest_prompts(self, step: PlannedStep) -> None:
        """Compute content digests while the device works, so that the tickets of prompts to be
        handed over need not wait for them."""
        for seq, _ in step.written_rows:
            seq.request.content_digest(self._hasher)

    def _advance(self, home: Home, plan: HomePlan) -> list[Sequence]:
        """Count the planned rows as computed, commit full blocks, and return the sequences that
        sample."""
        for seq, chunk in plan.chunks.items():
            count = chunk.num_rows
            seq.num_computed += count
            self._stats.prompt_tokens += max(
                0, min(count, seq.request.num_prompt_tokens - seq.num_computed + count)
            )
            home.commit_full_blocks(seq)
            if home.window is not None:
                home.give_up_blocks(seq, count)
        return [seq for seq, chunk in plan.chunks.items() if chunk.num_samples]

    def _fork(self, seq: Sequence) -> list[Sequence]:
        """Make sequences of the pending choices; they share all blocks of `seq`."""
        forks = []
        for choice in seq.pending_forks:
            fork = self._requests.new_sequence(seq.request, Start(choice))
            fork.num_computed = seq.num_computed
            fork.num_committed = seq.num_committed
            fork.block_table = list(seq.block_table)
            fork.num_dropped = seq.num_dropped
            self._scheduler.home_of(fork).blocks.acquire(fork.owned_blocks)
            self._scheduler.run(fork)
            forks.append(fork)
        seq.pending_forks = ()
        return forks

    def _row(self, seq: Sequence) -> SampleRow:
        """The sequence's row; it is made when it first samples in its slot."""
        row = self.staging.get(seq.slot)
        if row is not None:
            return row
        request = seq.request
        return self.staging.join(
            SampleRow(
                sampling=request.sampling,
                choice=seq.choice,
                slot=seq.slot,
                token_ids=seq.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                stop_token_ids=request.stop_token_ids,
                position=seq.next_position,
                grammar=request.grammar,
            )
        )

    def _prompts_to_score(
        self, plan: HomePlan, inputs: StepInputs
    ) -> list[tuple[Request, ScoredRows]]:
        """Prompt tokens to score, each by the row before it. Tokens that were scored already are
        left out (after a preemption, or when another choice computed them).
        """
        scored = []
        for seq, chunk in plan.chunks.items():
            request = seq.request
            if not request.wants_prompt_logprobs:
                continue
            end = min(seq.num_computed, request.num_prompt_tokens - 1)
            start = request.num_scored - 1
            if start < end:
                first_row = inputs.first_row[seq] - (seq.num_computed - chunk.num_rows) + start
                targets = np.array(request.prompt_token_ids[start + 1 : end + 1], dtype=np.int32)
                num_top = request.sampling.prompt_logprobs or 0
                scored.append((request, ScoredRows(first_row, targets, num_top)))
            request.num_scored = max(request.num_scored, end + 1)
        return scored


def sizes_of(plan: StepPlan) -> list[HomeSize]:
    """The size of each home's part."""
    return [HomeSize(home.num_rows, len(home.chunks)) for home in plan.homes]


def _over(row: SampleRow) -> SampleRow:
    """Make a plain row for a sequence that ended in the previous step; its token is dropped."""
    return SampleRow(PLAIN, row.choice, row.slot, [], 0, frozenset())


def _logit_rows(
    plan: HomePlan, inputs: StepInputs, siblings: list[list[Sequence]], is_known: bool
) -> LogitRows | None:
    """The last row of each sampling sequence, once for each of its siblings. Returns None if
    is_known and these are all rows, which is nearly always so. Then the step's graph gives the
    logits of all rows, and the slots are those of the rows."""
    rows = [
        inputs.first_row[members[0]] + plan.chunks[members[0]].num_rows - 1
        for members in siblings
        for _ in members
    ]
    if is_known and rows == list(range(len(plan.chunks))):
        return None
    slots = [member.slot for members in siblings for member in members]
    return LogitRows(np.array(rows, dtype=np.int32), np.array(slots, dtype=np.int32))


def _hidden_rows(plan: HomePlan, inputs: StepInputs, embedded: list[Sequence]) -> np.ndarray | None:
    """The last row of each embedded sequence."""
    if not embedded:
        return None
    rows = [inputs.first_row[seq] + plan.chunks[seq].num_rows - 1 for seq in embedded]
    return np.array(rows, dtype=np.int32)


def _batches(copies: list[tuple[int, int]]) -> tuple[BlockCopies, ...]:
    """Batches of block copies (copy-on-write). In the rare case that a target is also a source,
    copies are made one by one, in order."""
    if not copies:
        return ()
    sources, targets = zip(*copies, strict=True)
    batches = [copies] if not set(sources) & set(targets) else [[pair] for pair in copies]
    return tuple(
        BlockCopies(*(np.array(ids, dtype=np.int64) for ids in zip(*batch, strict=True)))
        for batch in batches
    )
