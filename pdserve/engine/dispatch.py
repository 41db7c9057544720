"""Queues a planned step on the device: all of a step that needs counts alone, and no token's value.

Advances the sequences, forks choices, runs the model, scores prompts, samples. Knows no events and
waits for nothing: what needs values is `engine.collect`. Called by the engine, once a step.
"""

import time
from dataclasses import dataclass

from pdserve.engine.execution.model_runner import Fence, ModelRunner, StepOutput
from pdserve.engine.memory.block_manager import BlockManager
from pdserve.engine.requests import Requests
from pdserve.engine.sampling.sample_rows import SampleRow
from pdserve.engine.sampling.sampled_tokens import SampledTokens, Scores
from pdserve.engine.sampling.sampler import Sampler
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.scheduling.sequence import Request, Sequence
from pdserve.engine.scheduling.step_plan import StepPlan
from pdserve.engine.step_result import EngineStats
from pdserve.protocol.block_digests import BlockHasher
from pdserve.protocol.commands import Start

# prompt positions whose logits are held at once: a whole chunk's would fill gigabytes
SCORED_ROWS = 256


@dataclass(frozen=True)
class StepInFlight:
    """A step that is queued on the device. siblings: the sequences of each sampled row, in the
    order of `sampled`. written_rows: prompts to be handed over, and how many of their rows are
    written behind it.
    """

    began: Fence
    ended: Fence
    num_rows: int
    num_sequences: int
    siblings: list[list[Sequence]]
    sampled: SampledTokens | None
    scored: list[tuple[Request, Scores]]
    written_rows: list[tuple[Sequence, int]]
    host_seconds: float


class StepDispatcher:
    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        scheduler: Scheduler,
        blocks: BlockManager,
        hasher: BlockHasher,
        requests: Requests,
        stats: EngineStats,
    ) -> None:
        self.runner = runner
        self._sampler = sampler
        self._scheduler = scheduler
        self._blocks = blocks
        self._hasher = hasher
        self._requests = requests
        self._stats = stats

    def dispatch(self, plan: StepPlan, started: float) -> StepInFlight:
        """Do all that needs counts alone, and queue the step on the device."""
        self._blocks.begin_step()
        for slot in self._scheduler.freed_slots:
            self._sampler.release(slot)
        self._scheduler.freed_slots.clear()
        siblings = [[seq, *self._fork(seq)] for seq in self._advance(plan)]
        began = self.runner.fence()
        output = self.runner.execute(plan, siblings)
        for seq in plan.num_tokens:
            if seq.request.prefill_only:
                # now, beside the device's work: its tickets shall not wait for it
                seq.request.content_digest(self._hasher)
        scored = self._score_prompts(plan, output)
        sampled = self._sample(output, [member for members in siblings for member in members])
        self._stats.num_steps += 1
        return StepInFlight(
            began=began,
            ended=self.runner.fence(),
            num_rows=sum(plan.num_tokens.values()),
            num_sequences=len(plan.num_tokens),
            siblings=siblings,
            sampled=sampled,
            scored=scored,
            written_rows=[
                (seq, seq.num_computed) for seq in plan.num_tokens if seq.request.prefill_only
            ],
            host_seconds=time.perf_counter() - started,
        )

    def _advance(self, plan: StepPlan) -> list[Sequence]:
        """Count the planned rows as computed, remember full blocks, and return the sequences that
        sample."""
        for seq, count in plan.num_tokens.items():
            seq.num_computed += count
            self._stats.prompt_tokens += max(
                0, min(count, seq.request.num_prompt_tokens - seq.num_computed + count)
            )
            self._scheduler.commit_full_blocks(seq)
        return [seq for seq in plan.num_tokens if seq.num_uncomputed == 0]

    def _fork(self, seq: Sequence) -> list[Sequence]:
        """The pending choices as sequences of their own, sharing all blocks of `seq`."""
        forks = []
        for choice in seq.pending_forks:
            fork = self._requests.new_sequence(seq.request, Start(choice))
            fork.num_computed = seq.num_computed
            fork.num_committed = seq.num_committed
            fork.block_table = list(seq.block_table)
            self._blocks.acquire(fork.block_table)
            self._scheduler.start_fork(fork)
            forks.append(fork)
        seq.pending_forks = ()
        return forks

    def _score_prompts(self, plan: StepPlan, output: StepOutput) -> list[tuple[Request, Scores]]:
        """Log-probabilities of prompt tokens, each from the row before it; those that are scored
        already are left out (after a preemption, or when another choice computed them).
        """
        scored = []
        for seq, count in plan.num_tokens.items():
            request = seq.request
            if not request.wants_prompt_logprobs:
                continue
            end = min(seq.num_computed, request.num_prompt_tokens - 1)
            first_row = output.first_row[seq] - (seq.num_computed - count)
            for start in range(request.num_scored - 1, end, SCORED_ROWS):
                positions = range(start, min(start + SCORED_ROWS, end))
                logits = self.runner.logits(output.hidden, [first_row + p for p in positions])
                targets = [request.prompt_token_ids[p + 1] for p in positions]
                scored.append(
                    (
                        request,
                        self._sampler.score(logits, targets, request.sampling.prompt_logprobs or 0),
                    )
                )
            request.num_scored = max(request.num_scored, end + 1)
        return scored

    def _sample(self, output: StepOutput, members: list[Sequence]) -> SampledTokens | None:
        if not members:
            return None
        sampled = self._sampler.sample(output.logits, [sample_row(seq) for seq in members])
        self.runner.feed_back(output, sampled.token_ids)
        for seq in members:
            seq.num_pending += 1
        return sampled


def sample_row(seq: Sequence) -> SampleRow:
    request = seq.request
    return SampleRow(
        sampling=request.sampling,
        choice=seq.choice,
        slot=seq.slot,
        position=seq.next_position,
        token_ids=seq.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        stop_token_ids=request.stop_token_ids,
    )
