"""Completes a step: waits for its end and does everything that needs the tokens' values.

It appends tokens, emits events and ends sequences. Prompts that others will read are held until
they are released. Knows no device beyond a step's handle. The engine calls it once per step.
"""

import time
from collections.abc import Callable

import numpy as np

from pdserve.configs.kv_layout import KVLayout
from pdserve.engine.requests import Requests
from pdserve.engine.sampling.sampled_tokens import Sampled
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.scheduling.sequence import Request, Sequence, Status
from pdserve.engine.step_result import (
    EngineStats,
    FinishedRows,
    HeldPrompt,
    StepResult,
    WrittenPrompt,
)
from pdserve.engine.stepping.planner import PlannedStep
from pdserve.protocol.block_digests import BlockHasher
from pdserve.protocol.events import Delta, Embedded, Failed, PromptScored
from pdserve.protocol.request_key import FinishReason, RequestKey

# Log-probabilities in one PromptScored: 230 KB, which a router decodes in 2 ms.
SCORES_PER_EVENT = 1 << 14


class StepCollector:
    """Completes steps.

    - held: prompts whose blocks stay owned until `release_held`.
    - keeps_finished_rows: give full blocks of ended sequences to the caller, in
      `StepResult.finished`.
    - clock: the engine's, for the times of first tokens.
    """

    def __init__(
        self,
        hasher: BlockHasher,
        layout: KVLayout,
        scheduler: Scheduler,
        requests: Requests,
        stats: EngineStats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._hasher = hasher
        self._layout = layout
        self._scheduler = scheduler
        self._requests = requests
        self._stats = stats
        self.held: dict[RequestKey, HeldPrompt] = {}
        self.keeps_finished_rows = False

    def collect(self, step: PlannedStep) -> StepResult:
        """Wait for the step's end, then do everything that needs the tokens' values."""
        handle = step.handle
        assert handle is not None, "a step is collected that was never forwarded"
        handle.wait()
        ended_at = time.time()
        began = time.perf_counter()
        for home in self._scheduler.homes:
            home.blocks.end_step()
        result = StepResult(
            num_rows=step.num_rows,
            num_sequences=step.num_sequences,
            busiest=step.busiest,
            device_seconds=handle.seconds(),
            ended_at=ended_at,
        )
        result.written = [
            self._written(seq, rows)
            for seq, rows in step.written_rows
            if seq.status is Status.RUNNING
        ]
        for request, scores in zip(step.scored, handle.scores(), strict=True):
            request.prompt_logprobs += scores
        samples = iter(handle.samples())
        self._fail_rows(step, result)
        for members in step.siblings:
            self._accept(members, [next(samples) for _ in members], result)
        if step.embedded:
            for seq, values in zip(step.embedded, handle.hidden(), strict=True):
                self._embed(seq, values, result)
        result.host_seconds = step.host_seconds + time.perf_counter() - began
        return result

    def release_held(self, key: RequestKey) -> None:
        """Free the blocks of a held prompt; idempotent."""
        held = self.held.pop(key, None)
        if held is not None:
            self._scheduler.homes[held.home].blocks.release(held.block_ids)

    def _fail_rows(self, step: PlannedStep, result: StepResult) -> None:
        """End all choices of requests with a row for which nothing could be drawn."""
        for seq, row in zip(step.members, step.rows, strict=True):
            if not row.error or seq.status is Status.FINISHED:
                continue
            key = seq.request.key
            failed = Failed(
                request_id=key.request_id, attempt=key.attempt, kind="invalid", message=row.error
            )
            result.events.append((key, failed))
            self._requests.abort(key)

    def _embed(self, seq: Sequence, values: np.ndarray, result: StepResult) -> None:
        """Report the embedding of a computed prompt, and end the sequence."""
        if seq.status is Status.FINISHED:
            return
        request = seq.request
        event = Embedded(
            request_id=request.key.request_id,
            attempt=request.key.attempt,
            cached_tokens=request.cached_tokens,
            values=values.astype("<f4").tobytes(),
        )
        result.events.append((request.key, event))
        self._keep_rows(seq, result)
        self._requests.finish(seq)

    def _written(self, seq: Sequence, num_rows: int) -> WrittenPrompt:
        """The written part of a prompt. num_rows: counted when the step was queued, because
        seq.num_computed includes steps in flight."""
        blocks = tuple(seq.block_table[: num_rows // self._layout.block_size])
        content = seq.request.content_digest(self._hasher)
        return WrittenPrompt(seq.request.key, blocks, content, seq.home)

    def _accept(self, members: list[Sequence], sampled: list[Sampled], result: StepResult) -> None:
        """Append the tokens of a sequence and of the choices that forked off it in this step, and
        emit their events. Samples of sequences that have ended meanwhile are dropped.
        """
        live = [
            (seq, token)
            for seq, token in zip(members, sampled, strict=True)
            if seq.status is not Status.FINISHED
        ]
        if not live:
            return
        request = live[0][0].request
        self._report_prompt(request, result)
        reasons = [self._append(seq, token, result) for seq, token in live]
        if request.prefill_only and not all(reasons):
            self._hold(live[0][0], result)
        for (seq, _), reason in zip(live, reasons, strict=True):
            if reason or request.prefill_only:
                self._scheduler.home_of(seq).commit_full_blocks(seq)
                self._keep_rows(seq, result)
                self._requests.finish(seq)

    def _keep_rows(self, seq: Sequence, result: StepResult) -> None:
        """Keep the full blocks of a sequence that ends. Its last token has no row. A prompt with
        content parts is not kept, because readers name rows by tokens."""
        full = (len(seq.token_ids) - 1) // self._layout.block_size
        if not self.keeps_finished_rows or not full or seq.request.parts or seq.num_dropped:
            return
        blocks = tuple(seq.block_table[:full])
        hashes = tuple(seq.hashes(self._hasher)[:full])
        self._scheduler.home_of(seq).blocks.acquire(blocks)
        tokens = tuple(seq.token_ids[: full * self._layout.block_size])
        result.finished.append(FinishedRows(tokens, seq.request.tenant, blocks, hashes, seq.home))

    def _append(self, seq: Sequence, sampled: Sampled, result: StepResult) -> FinishReason | None:
        """Append the sampled tokens, up to one that ends the choice. Returns why it ends, if so."""
        request = seq.request
        position = seq.num_generated
        seq.num_pending -= 1
        tokens: list[int] = []
        reason: FinishReason | None = None
        for token in sampled.token_ids:
            seq.token_ids.append(token)
            tokens.append(token)
            reason = seq.finish_reason_after(token)
            if reason:
                break
        if not tokens:
            return None
        self._stats.generation_tokens += len(tokens)
        if not position:
            seq.first_token_at = self._clock()
        delta = Delta(
            request.key.request_id,
            request.key.attempt,
            seq.choice,
            position,
            tuple(tokens),
            reason,
            tokens[-1]
            if reason == "stop" and tokens[-1] in request.sampling.stop_token_ids
            else None,
            sampled.logprobs[: len(tokens)] if sampled.logprobs is not None else None,
        )
        result.events.append((request.key, delta))
        return reason

    def _hold(self, seq: Sequence, result: StepResult) -> None:
        request = seq.request
        count = self._layout.num_blocks_for(request.num_prompt_tokens)
        blocks = tuple(seq.block_table[:count])
        held = HeldPrompt(
            request.key,
            blocks,
            request.num_prompt_tokens,
            request.content_digest(self._hasher),
            seq.home,
        )
        self._scheduler.home_of(seq).blocks.acquire(held.block_ids)
        self.held[request.key] = held
        result.held.append(held)

    def _report_prompt(self, request: Request, result: StepResult) -> None:
        if request.prompt_reported:
            return
        scored = request.prompt_logprobs if request.wants_prompt_logprobs else []
        request.prompt_reported = True
        # number of positions per event
        step = max(1, SCORES_PER_EVENT // (1 + (request.sampling.prompt_logprobs or 0)))
        for start in range(0, max(len(scored), 1), step):
            event = PromptScored(
                request_id=request.key.request_id,
                attempt=request.key.attempt,
                cached_tokens=request.cached_tokens,
                start=start,
                logprobs=tuple(scored[start : start + step]) if scored else None,
                final=start + step >= len(scored),
            )
            result.events.append((request.key, event))
