"""The engine: requests in, protocol events out, one `step()` at a time.

Owns scheduler, block manager, KV cache, model runner and sampler, and turns sampled tokens into events. The host plans
and queues a step while the device computes the one before it (docs/engine-step.md). Serves both phases: a prefill-only
request ends with its prompt's blocks held for a hand-off; a reserved request joins with blocks that somebody else
filled. Knows no connector, no router, no text. Driven by `LLM` (in process) or by worker.loop (with hand-off).
"""

import itertools
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from pdserve.configs.schema import EngineConfig, ModelConfig
from pdserve.engine.build import make_parts
from pdserve.engine.execution.model_runner import Fence, StepOutput
from pdserve.engine.memory.block_manager import BlockManager, OutOfBlocks
from pdserve.engine.sampling.sample_rows import SampleRow
from pdserve.engine.sampling.sampled_tokens import Sampled, SampledTokens, Scores
from pdserve.engine.scheduling.request_checker import RequestChecker
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.scheduling.sequence import Request, Sequence, Status
from pdserve.engine.scheduling.step_plan import StepPlan
from pdserve.engine.warm_up import warm_up
from pdserve.kernels.launching.late_compiles import LateCompiles
from pdserve.protocol.block_digests import BlockHasher
from pdserve.protocol.commands import Start, Submit
from pdserve.protocol.events import Delta, Event, PromptScored
from pdserve.protocol.request_key import FinishReason, RequestKey
from pdserve.protocol.start_progress import StartProgress

SCORES_PER_EVENT = 1 << 14  # log-probabilities in one PromptScored: 230 KB, which a router decodes in 2 ms
SCORED_ROWS = 256  # prompt positions whose logits are held at once: a whole chunk's would fill gigabytes


@dataclass(frozen=True)
class HeldPrompt:
    """The blocks of a finished prefill-only request; they stay owned until `Engine.release_held(key)`."""

    key: RequestKey
    block_ids: tuple[int, ...]
    num_tokens: int
    content: bytes


@dataclass
class Reservation:
    """Blocks for rows that somebody else will fill. block_table: the first `num_cached` hold their rows already."""

    request: Request
    starts: tuple[Start, ...]
    block_table: list[int]
    num_cached: int

    @property
    def destination(self) -> list[int]:
        """The blocks to fill."""
        return self.block_table[self.num_cached :]


@dataclass(frozen=True)
class WrittenPrompt:
    """How far a prompt that will be handed over is written on the device: all rows of these blocks, from its first
    on. content: see HeldPrompt.
    """

    key: RequestKey
    block_ids: tuple[int, ...]
    content: bytes


@dataclass(frozen=True)
class FinishedRows:
    """The full blocks of a sequence that has ended, with the tokens that they hold rows of and their digests; whoever
    asked for them (`Engine.keeps_finished_rows`) releases the blocks.
    """

    token_ids: tuple[int, ...]
    cache_salt: str
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]


@dataclass
class StepResult:
    """What a step did that is now complete. The held prompts may be published at once, and the blocks of those written
    in part.

    num_sequences: it computed rows of. device_seconds: it took the device (0 on CPU, where all time is the host's).
    host_seconds: this thread worked for it. ended_at: seconds since the epoch when its end was known.
    """

    events: list[tuple[RequestKey, Event]] = field(default_factory=list)
    held: list[HeldPrompt] = field(default_factory=list)
    written: list[WrittenPrompt] = field(default_factory=list)
    finished: list[FinishedRows] = field(default_factory=list)
    num_rows: int = 0
    num_sequences: int = 0
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    ended_at: float = 0.0


@dataclass(frozen=True)
class _StepInFlight:
    """A step that is queued on the device. siblings: the sequences of each sampled row, in the order of `sampled`.
    written_rows: prompts to be handed over, and how many of their rows are written behind it.
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


@dataclass
class EngineStats:
    """Running totals since start."""

    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


class Engine:
    """One model on one device. Not thread-safe: one thread calls everything. progress: hears how far the start is."""

    def __init__(self, model: ModelConfig, config: EngineConfig, progress: StartProgress | None = None) -> None:
        progress = progress or StartProgress()
        parts = make_parts(model, config, progress)
        self.config, self.device, self.spec, self.layout = parts.config, parts.device, parts.spec, parts.layout
        self.runner, self.sampler = parts.runner, parts.sampler
        self.model_fingerprint = parts.fingerprint
        self.max_model_len = parts.max_model_len
        self.blocks = BlockManager(parts.num_blocks, self.config.enable_prefix_caching)
        self.hasher = BlockHasher(self.model_fingerprint, self.config.block_size)
        self.scheduler = Scheduler(
            self.blocks, self.hasher, self.config.max_num_batched_tokens, self.config.max_num_seqs
        )
        self.max_request_tokens = min(self.max_model_len, self.blocks.num_usable * self.config.block_size)
        self.admission = RequestChecker(
            self.spec.vocab_size, self.spec.eos_token_ids, self.max_request_tokens, self.config.max_num_seqs
        )
        self.stats = EngineStats()
        self.keeps_finished_rows = False
        self._arrivals = itertools.count()
        self._requests: dict[RequestKey, Request] = {}
        self._held: dict[RequestKey, HeldPrompt] = {}
        self._max_in_flight = 2 if self.config.async_scheduling else 1
        self._in_flight: deque[_StepInFlight] = deque()
        self._is_blocked = False
        self._num_reserved = 0
        self._is_torn = False  # True during a step: whatever ends it early leaves it so
        self._late_compiles: LateCompiles | None = None
        if self.device.type == "cuda":
            progress.enter("warm_up")
            warm_up(self, progress.report)
            self.stats = EngineStats()
            self._late_compiles = LateCompiles()

    @property
    def num_late_compiles(self) -> int:
        """Kernels compiled since the engine was warm."""
        return self._late_compiles.count if self._late_compiles else 0

    @property
    def kv_cache(self) -> Tensor:
        return self.runner.kv_cache

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do, be it to collect what is in flight."""
        return self.scheduler.has_work or bool(self._in_flight)

    # --- requests in and out ---

    def make_request(self, submit: Submit) -> Request:
        """Check a Submit against this engine; ValueError naming the parameter when it can never run here."""
        return self.admission.request(submit)

    def add(self, request: Request, starts: Iterable[Start]) -> None:
        """Queue a request that computes its prompt here. Fresh choices share one computation and fork behind the
        prompt.
        """
        self._require_whole()
        starts = tuple(starts)
        fresh = not any(start.forced for start in starts)
        self._register(request)
        for start in starts[:1] if fresh else starts:
            seq = self._sequence(request, start)
            if fresh:
                seq.pending_forks = tuple(s.choice for s in starts[1:])
            self.scheduler.add(seq)

    def abort(self, key: RequestKey, choices: tuple[int, ...] | None = None) -> bool:
        """Stop a request (or some of its choices) and free their blocks; idempotent. True when the request is gone."""
        request = self._requests.get(key)
        if request is None:
            return True
        for seq in list(request.sequences):
            kept = () if choices is None else tuple(c for c in seq.pending_forks if c not in choices)
            if choices is None or (seq.choice in choices and not kept):
                self._finish(seq)
            elif seq.choice in choices:
                seq.choice, seq.pending_forks = kept[0], kept[1:]  # another choice takes the prompt's computation over
            else:
                seq.pending_forks = kept
        return key not in self._requests

    def knows(self, key: RequestKey) -> bool:
        """Whether the request still has unfinished choices."""
        return key in self._requests

    def waits(self, key: RequestKey) -> bool:
        """Whether the request is here and none of its choices is in the running batch."""
        request = self._requests.get(key)
        return request is not None and all(seq.status is not Status.RUNNING for seq in request.sequences)

    def num_prompt_rows(self, key: RequestKey) -> int:
        """How many of the prompt's rows are computed, by the choice that got furthest; 0 when the request is not
        here."""
        request = self._requests.get(key)
        if request is None:
            return 0
        return min(request.num_prompt_tokens, max(seq.num_computed for seq in request.sequences))

    def release_held(self, key: RequestKey) -> None:
        """Free the blocks of a held prompt; idempotent."""
        held = self._held.pop(key, None)
        if held is not None:
            self.blocks.release(held.block_ids)

    # --- joining with blocks filled by others ---

    def reserve(self, request: Request, starts: tuple[Start, ...], num_blocks: int | None = None) -> Reservation | None:
        """Blocks for the prompt's rows, or for the first num_blocks, cached ones first; None when too few are free."""
        self._require_whole()
        cached = self.blocks.match(request.prompt_hashes(self.hasher)[:num_blocks])
        self.blocks.acquire(cached)
        missing = (num_blocks or self.layout.num_blocks_for(request.num_prompt_tokens)) - len(cached)
        try:
            fresh = self.blocks.allocate(missing, cached[-1] if cached else None)
        except OutOfBlocks:
            self.blocks.release(cached)
            return None
        self._num_reserved += 1
        return Reservation(request, starts, cached + fresh, len(cached))

    def join(self, reservation: Reservation) -> None:
        """All rows of the reservation are in place: its choices go on behind their forced tokens."""
        self._require_whole()
        self._num_reserved -= 1
        request = reservation.request
        request.prompt_reported = request.prefix_looked_up = True
        request.cached_tokens = reservation.num_cached * self.config.block_size
        self._register(request)
        rows = request.num_prompt_tokens
        for index, start in enumerate(reservation.starts):
            seq = self._sequence(request, start)
            seq.block_table = list(reservation.block_table)
            seq.num_computed = rows
            if index:
                self.blocks.acquire(seq.block_table)
            self._commit_full_blocks(seq)
            self.scheduler.add(seq)

    def cancel_reservation(self, reservation: Reservation, settled: bool, num_filled: int = 0) -> list[int]:
        """Give a reservation back. The first num_filled blocks of its destination hold their rows, and stay cached.
        settled False: the others go to quarantine; those blocks are returned.
        """
        self._num_reserved -= 1
        filled = reservation.num_cached + num_filled
        hashes = reservation.request.prompt_hashes(self.hasher)
        for block, block_hash in list(zip(reservation.block_table, hashes, strict=False))[:filled]:
            self.blocks.commit(block, block_hash)
        self.blocks.release(reservation.block_table[:filled])
        destination = reservation.block_table[filled:]
        if settled:
            self.blocks.release(destination)
            return []
        self.blocks.quarantine(destination, "transfer")
        return destination

    # --- the step ---

    def step(self) -> StepResult:
        """Queue steps until enough are in flight, then complete the oldest; empty when nothing can
        run. When it raises, the engine is half-advanced, and serves nothing until `reset`:
        RuntimeError.
        """
        self._require_whole()
        self._is_torn = True
        result = self._advance_steps()
        self._is_torn = False
        return result

    def reset(self) -> None:
        """Forget all requests, held prompts and cached content, in whatever state an interruption
        left them: the rows of a step that did not end may never have been written. It may be
        interrupted itself, and called again. AssertionError while a reservation is out: a transfer
        may still write into its blocks.
        """
        assert not self._num_reserved, f"{self._num_reserved} reservations are out: cannot reset"
        self._is_torn = True
        self.runner.synchronize()
        self._in_flight.clear()
        self._is_blocked = False
        self._requests.clear()
        self._held.clear()
        self.scheduler.reset()
        self.blocks.reset()
        self._is_torn = False

    def close(self) -> None:
        """Wait for the device: the KV cache may be unregistered and freed then. Nothing is served any
        more.
        """
        self._is_torn = True
        self.runner.synchronize()

    def _require_whole(self) -> None:
        if self._is_torn:
            raise RuntimeError("a step of this engine failed, or it is closed: make another one")

    def _advance_steps(self) -> StepResult:
        in_flight = self._in_flight
        while len(in_flight) < self._max_in_flight and not (self._is_blocked and in_flight):
            began = time.perf_counter()
            plan = self.scheduler.schedule(may_preempt=not in_flight)
            self._is_blocked = plan.blocked
            if not plan:
                break
            in_flight.append(self._dispatch(plan, began))
        return self._collect(in_flight.popleft()) if in_flight else StepResult()

    def _dispatch(self, plan: StepPlan, started: float) -> _StepInFlight:
        """Do all that needs counts alone, and queue the step on the device."""
        self.blocks.begin_step()
        for slot in self.scheduler.freed_slots:
            self.sampler.release(slot)
        self.scheduler.freed_slots.clear()
        siblings = [[seq, *self._fork(seq)] for seq in self._advance(plan)]
        began = self.runner.fence()
        output = self.runner.execute(plan, siblings)
        for seq in plan.num_tokens:
            if seq.request.prefill_only:
                self.content(seq.request)  # now, beside the device's work: its tickets shall not wait for it
        scored = self._score_prompts(plan, output)
        sampled = self._sample(output, [member for members in siblings for member in members])
        self.stats.num_steps += 1
        return _StepInFlight(
            began=began,
            ended=self.runner.fence(),
            num_rows=sum(plan.num_tokens.values()),
            num_sequences=len(plan.num_tokens),
            siblings=siblings,
            sampled=sampled,
            scored=scored,
            written_rows=[(seq, seq.num_computed) for seq in plan.num_tokens if seq.request.prefill_only],
            host_seconds=time.perf_counter() - started,
        )

    def _advance(self, plan: StepPlan) -> list[Sequence]:
        """Count the planned rows as computed, remember full blocks, and return the sequences that sample."""
        for seq, count in plan.num_tokens.items():
            seq.num_computed += count
            self.stats.prompt_tokens += max(0, min(count, seq.request.num_prompt_tokens - seq.num_computed + count))
            self._commit_full_blocks(seq)
        return [seq for seq in plan.num_tokens if seq.num_uncomputed == 0]

    def _fork(self, seq: Sequence) -> list[Sequence]:
        """The pending choices as sequences of their own, sharing all blocks of `seq`."""
        forks = []
        for choice in seq.pending_forks:
            fork = self._sequence(seq.request, Start(choice))
            fork.num_computed = seq.num_computed
            fork.num_committed = seq.num_committed
            fork.block_table = list(seq.block_table)
            self.blocks.acquire(fork.block_table)
            self.scheduler.start_fork(fork)
            forks.append(fork)
        seq.pending_forks = ()
        return forks

    def _score_prompts(self, plan: StepPlan, output: StepOutput) -> list[tuple[Request, Scores]]:
        """Log-probabilities of prompt tokens, each from the row before it; those that are scored already are left out
        (after a preemption, or when another choice computed them).
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
                scored.append((request, self.sampler.score(logits, targets, request.sampling.prompt_logprobs or 0)))
            request.num_scored = max(request.num_scored, end + 1)
        return scored

    def _sample(self, output: StepOutput, members: list[Sequence]) -> SampledTokens | None:
        if not members:
            return None
        sampled = self.sampler.sample(output.logits, [_sample_row(seq) for seq in members])
        self.runner.feed_back(output, sampled.token_ids)
        for seq in members:
            seq.num_pending += 1
        return sampled

    def _collect(self, step: _StepInFlight) -> StepResult:
        """Wait for the step's end, and do all that needs the tokens' values."""
        step.ended.wait()
        ended_at = time.time()
        began = time.perf_counter()
        self.blocks.end_step()
        seconds = step.ended.seconds_since(step.began)
        result = StepResult(
            num_rows=step.num_rows, num_sequences=step.num_sequences, device_seconds=seconds, ended_at=ended_at
        )
        result.written = [self._written(seq, rows) for seq, rows in step.written_rows if seq.status is Status.RUNNING]
        for request, scored in step.scored:
            request.prompt_logprobs += scored.fetch()
        tokens = iter(step.sampled.fetch() if step.sampled is not None else ())
        for members in step.siblings:
            self._accept(members, [next(tokens) for _ in members], result)
        result.host_seconds = step.host_seconds + time.perf_counter() - began
        return result

    def _written(self, seq: Sequence, num_rows: int) -> WrittenPrompt:
        """num_rows: as counted when the step was queued; seq.num_computed counts steps in flight too."""
        blocks = tuple(seq.block_table[: num_rows // self.config.block_size])
        return WrittenPrompt(seq.request.key, blocks, self.content(seq.request))

    def content(self, request: Request) -> bytes:
        """Digest of the prompt and its salt: what a hand-off ticket's rows hold."""
        if request.content is None:
            request.content = self.hasher.content(request.prompt_token_ids, request.cache_salt)
        return request.content

    def _accept(self, members: list[Sequence], sampled: list[Sampled], result: StepResult) -> None:
        """Append the tokens of a sequence and of the choices that forked off it in this step; emit their events. What
        was sampled for one that has ended meanwhile is dropped.
        """
        live = [(seq, token) for seq, token in zip(members, sampled, strict=True) if seq.status is not Status.FINISHED]
        if not live:
            return
        request = live[0][0].request
        self._report_prompt(request, result)
        reasons = [self._append(seq, token, result) for seq, token in live]
        if request.prefill_only and not all(reasons):
            self._hold(live[0][0], result)
        for (seq, _), reason in zip(live, reasons, strict=True):
            if reason or request.prefill_only:
                self._commit_full_blocks(seq)
                self._keep_rows(seq, result)
                self._finish(seq)

    def _keep_rows(self, seq: Sequence, result: StepResult) -> None:
        """The last token has no row."""
        full = (len(seq.token_ids) - 1) // self.config.block_size
        if not self.keeps_finished_rows or not full:
            return
        blocks, hashes = tuple(seq.block_table[:full]), tuple(seq.hashes(self.hasher)[:full])
        self.blocks.acquire(blocks)
        tokens = tuple(seq.token_ids[: full * self.config.block_size])
        result.finished.append(FinishedRows(tokens, seq.request.cache_salt, blocks, hashes))

    def _append(self, seq: Sequence, sampled: Sampled, result: StepResult) -> FinishReason | None:
        request, token = seq.request, sampled.token_id
        position = seq.num_generated
        seq.token_ids.append(token)
        seq.num_pending -= 1
        self.stats.generation_tokens += 1
        reason = seq.finish_reason_after(token)
        stopped_by = token if reason == "stop" and token in request.sampling.stop_token_ids else None
        logprobs = (sampled.logprob,) if sampled.logprob is not None else None
        delta = Delta(
            request.key.request_id,
            request.key.attempt,
            seq.choice,
            position,
            (token,),
            reason,
            stopped_by,
            logprobs,
        )
        result.events.append((request.key, delta))
        return reason

    def _hold(self, seq: Sequence, result: StepResult) -> None:
        request = seq.request
        count = self.layout.num_blocks_for(request.num_prompt_tokens)
        blocks = tuple(seq.block_table[:count])
        held = HeldPrompt(request.key, blocks, request.num_prompt_tokens, self.content(request))
        self.blocks.acquire(held.block_ids)
        self._held[request.key] = held
        result.held.append(held)

    def _report_prompt(self, request: Request, result: StepResult) -> None:
        if request.prompt_reported:
            return
        scored = request.prompt_logprobs if request.wants_prompt_logprobs else []
        request.prompt_reported = True
        step = max(1, SCORES_PER_EVENT // (1 + (request.sampling.prompt_logprobs or 0)))  # positions
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

    # --- inside ---

    def _register(self, request: Request) -> None:
        assert request.key not in self._requests, f"{request.key} was submitted twice"
        self._requests[request.key] = request
        request.arrival = next(self._arrivals)

    def _sequence(self, request: Request, start: Start) -> Sequence:
        tokens = [*request.prompt_token_ids, *start.forced]
        seq = Sequence(request, start.choice, tokens)
        request.sequences.append(seq)
        return seq

    def _finish(self, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        request = seq.request
        if all(s.status is Status.FINISHED for s in request.sequences):
            self._requests.pop(request.key, None)

    def _commit_full_blocks(self, seq: Sequence) -> None:
        """Make the full blocks whose tokens are known findable. Their rows may be in flight: whoever reads them by a
        later step reads behind the write, and nothing is published before its step is complete.
        """
        full = min(seq.num_computed, len(seq.token_ids)) // self.config.block_size
        if full > seq.num_committed:
            hashes = seq.hashes(self.hasher)
            for index in range(seq.num_committed, full):
                self.blocks.commit(seq.block_table[index], hashes[index])
            seq.num_committed = full

    def check_integrity(self, others: Iterable[list[int]] = ()) -> None:
        """AssertionError when blocks, owners and queues disagree; for tests and for idle moments. others: the blocks of
        reservations and of finished rows."""
        self.scheduler.check_integrity()
        tables = [seq.block_table for request in self._requests.values() for seq in request.sequences]
        held = [list(h.block_ids) for h in self._held.values()]
        self.blocks.check_integrity([*tables, *held, *others])


def _sample_row(seq: Sequence) -> SampleRow:
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
