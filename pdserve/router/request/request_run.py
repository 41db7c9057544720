"""Runs one prompt through the fleet: choose workers, P's leg, hand-off, D's leg; fails over; leaves nothing behind.

    choose --split--> P leg --Handoff--> D leg --> finished     (D leg of a long prompt: prepared beside P's)
      |  --whole-------------------------^  |
      +<---- recover: cancel all legs, exclude the failed worker, resume with forced tokens ----+

Every new token goes through the record first. All sends are in the background, so nothing here waits for a worker but
the inbox, and `close` works from a cancelled task. Knows no HTTP. Called by `router.request.service`, one RequestRun a
prompt.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from pdserve.background.pace import Pacer
from pdserve.configs.router import RouterConfig
from pdserve.protocol.commands import Cancel, Prepare, Start, Submit
from pdserve.protocol.events import Arrived, Delta, Failed, Handoff, PackedScores, TokenLogprob
from pdserve.protocol.handoff import Source, Ticket
from pdserve.protocol.request_key import FinishReason, Phase, RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.admission import Seat
from pdserve.router.choosing.choose import Assignment, Chooser, Demand, NoWorker, note_sent
from pdserve.router.choosing.predict import Forecast, Predictor
from pdserve.router.errors import FailureKind, RequestFailed
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.fleet.prefix_index import PromptBlocks
from pdserve.router.fleet.worker_state import JOINED_BYTES, Inbox, Leg, LegEvent, Lost, Silent, WorkerState
from pdserve.router.held_bytes import Account
from pdserve.router.metrics import RouterMetrics
from pdserve.router.request.record import Accepted, LegError, RequestRecord
from pdserve.router.request.request_log import RequestLog, log_of
from pdserve.router.request.slo import Goodput
from pdserve.router.request.timeline import PromptTimeline, Timeline
from pdserve.router.times import parts_of_time, rounded
from pdserve.text.choice import ChoiceText
from pdserve.text.stop import StopStrings
from pdserve.text.tokenizer import Tokenizer

timeline_logger = logging.getLogger("pdserve.timeline")

# a sequence being decoded weighs its context plus this many tokens; its real length is not known beforehand
DECODE_WEIGHT = 128
DRAINED_EVENTS = 256
DRAINED_BYTES = 8 * JOINED_BYTES  # where one may have been made of hundreds


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of a call. sampling: as workers are told, so its seed is set, and it holds no stop strings: the router
    looks for these itself. stops: the call's, None when it has none. open_ended: a choice ends by length where its
    worker has no more room, even before max_tokens, which may be None. request_id: never used before in this process.
    prompt: its number within the call. received: perf_counter() when the call came."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    received: float
    prompt: int = 0
    priority: int = 0
    cache_salt: str = ""
    session_id: str = ""
    stops: StopStrings | None = None
    open_ended: bool = False


class OutputChunk(msgspec.Struct):
    """What became certain of one choice since its last chunk. index: prompt * n + choice. The last chunk of a choice
    has a finish_reason; stop_reason is the stop token's id or the stop string that matched."""

    index: int
    prompt: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """What all requests of a router share. resume_wait_s: how long a request that lost its worker waits for another."""

    fleet: Fleet
    chooser: Chooser
    tokenizer: Tokenizer
    config: RouterConfig
    metrics: RouterMetrics
    goodput: Goodput
    request_log: RequestLog
    pacer: Pacer
    resume_wait_s: float = 60.0


class _LegFailed(Exception):
    def __init__(self, worker: WorkerState, kind: FailureKind, reason: str, message: str) -> None:
        super().__init__(message)
        self.worker = worker
        self.kind = kind
        self.reason = reason


class RequestRun:
    def __init__(self, dispatcher: Dispatcher, job: Job, seat: Seat, account: Account | None = None) -> None:
        """account: where tokens count that wait for a reader who is slow."""
        self._shared = dispatcher
        self._job = job
        self._seat = seat
        sampling = job.sampling
        self.record = RequestRecord(sampling.n, sampling.logprobs is not None)
        self._texts = [
            ChoiceText(
                dispatcher.tokenizer,
                stops=job.stops,
                include_stop=sampling.include_stop_str_in_output,
                min_tokens=sampling.min_tokens,
                skip_special_tokens=sampling.skip_special_tokens,
            )
            for _ in range(sampling.n)
        ]
        self._prompt = PromptBlocks(job.prompt_token_ids, job.cache_salt)
        self._clock = _Clock(dispatcher.metrics, sampling.n, job.received)
        self._inbox = Inbox(account)
        self._account = account
        self._legs: list[Leg] = []
        self._timeline = Timeline()
        self._assignment: Assignment | None = None
        self._awaiting: WorkerState | None = None  # the planned D, from P's start to the hand-off
        self._excluded: set[str] = set()
        self._fingerprint: str | None = None

    async def stream(self) -> AsyncGenerator[list[OutputChunk], None]:
        """What became certain, as it comes, until every choice is finished. Raises RequestFailed. Whoever stops early
        calls `close` (closing the iterator does)."""
        failures, accepted_before, outcome = 0, 0, "internal"
        self._clock.begin(self._prompt.num_tokens)
        turn = self._shared.pacer.turn
        try:
            await turn()  # many may begin together, and end with one message
            self._begin(self._choose())
            while not self.record.finished:
                if self._inbox.num_taken_bytes:
                    self._inbox.done()
                await self._inbox.wait()
                chunks, failure = self._drain()
                if chunks:
                    yield chunks
                    if self._inbox:
                        await asyncio.sleep(0)  # the reader was slow: others have a turn before the rest
                if failure is not None and not self.record.finished:
                    progressed = self.record.num_tokens > accepted_before
                    failures = (0 if progressed else failures) + (failure.reason != "drained")
                    accepted_before = self.record.num_tokens
                    self._excluded = set() if progressed else self._excluded
                    ended = await self._recover(failure, failures)
                    if ended:
                        yield ended
            await turn()
            outcome = "ok"
        except NoWorker as error:
            outcome = "unavailable"
            failed = RequestFailed("unavailable", str(error))
            failed.logged = self._shared.request_log.wanted
            raise failed from error
        except RequestFailed as error:
            outcome, error.logged = error.failure, self._shared.request_log.wanted
            raise
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        finally:
            self.close()
            self._inbox.close()
            self._clock.end(outcome, self.record)
            self._judge(outcome)
            self._log()
            self._forget_prompt()

    def forecast(self, chooser: Chooser, share_ahead: float, unsent_tokens: int) -> Forecast | None:
        """Of its first token, if it began now where `chooser` says. unsent_tokens: that wait in this router, for all
        workers. None: nothing is known yet of how fast workers are. Raises NoWorker."""
        workers = self._shared.fleet.workers
        assignment = chooser.choose(workers, self._demand(set()))
        predictor = Predictor(workers, self._prompt, self._prompt.num_tokens, time.monotonic())
        if not predictor.is_measured:
            return None
        split = assignment.prefill is not None
        staying = [worker for worker in workers if not worker.draining]
        alike = sum(worker.can_prefill if split else worker.can_decode for worker in staying)
        return predictor.first_token(
            assignment.prefill or assignment.decode, share_ahead, unsent_tokens / max(1, alike)
        )

    def served(self, alone: bool) -> None:
        """The answer's last byte is out. alone: it was the call's only prompt; several share their time."""
        if self.record.finished:
            total_s = time.perf_counter() - self._job.received
            self._shared.metrics.e2e.observe(total_s)
            if alone:
                self._shared.metrics.took(total_s, self._admission_s, self._timeline.times, self._timeline.complete)

    def timeline(self) -> PromptTimeline:
        """Where time and bytes went up to now."""
        clock, timeline = self._clock, self._timeline
        total_s = (time.perf_counter() if clock.ended is None else clock.ended) - clock.started
        _, rest = parts_of_time(total_s, 0.0, timeline.times)
        rest = rounded(max(0.0, rest))
        return PromptTimeline(
            request_id=self._job.request_id,
            prompt=self._job.prompt,
            outcome=clock.outcome,
            prompt_tokens=self._prompt.num_tokens,
            cached_tokens=self.record.cached_tokens or 0,
            generated_tokens=self.record.num_tokens,
            admission_s=rounded(self._admission_s),
            first_token_s=None if clock.first_token_s is None else rounded(clock.first_token_s),
            total_s=rounded(total_s),
            transport_s=rest if timeline.complete else None,
            unreported_s=None if timeline.complete else rest,
            failovers=timeline.failovers,
            legs=timeline.legs(clock.started),
        )

    @property
    def _admission_s(self) -> float:
        return self._clock.started - self._job.received

    def _judge(self, outcome: str) -> None:
        clock = self._clock
        assert clock.ended is not None
        first_s = None if clock.first_token_s is None else self._admission_s + clock.first_token_s
        elapsed_s = clock.ended - self._job.received
        self._shared.goodput.ended(outcome, elapsed_s, first_s, clock.worst_tpot_s, self.record.num_tokens)

    def _log(self) -> None:
        level = logging.INFO if self._timeline.is_troubled else logging.DEBUG
        wanted, shown = self._shared.request_log.wanted, timeline_logger.isEnabledFor(level)
        if not wanted and not shown:
            return
        request_id, report = self._job.request_id, self.timeline()
        if wanted:
            reasons = [choice.finish_reason for choice in self.record.choices]
            self._shared.request_log.ended(report, reasons, self._clock.tpot_s)
        if shown:
            text = msgspec.json.encode(report).decode()
            log_of(timeline_logger, level, request_id, "timeline of %s: %s", request_id, text)

    def fail(self, error: RequestFailed) -> None:
        """End with this error, as soon as somebody reads; drop what waits."""
        self._inbox.fail(error)

    def close(self) -> None:
        """End all legs and tell every worker that may still hold something. Idempotent, never waits."""
        self._seat.leave()
        self._inbox.clear()
        for leg in list(self._legs):
            self._end(leg, cancel=True)
        self._await(None)

    def _forget_prompt(self) -> None:
        """It has ended: others of its call, which keeps it, may take long, and prompts much memory."""
        self._job = replace(self._job, prompt_token_ids=())
        self._prompt.forget()

    def _await(self, decode: WorkerState | None) -> None:
        """Have the planned D stay until the hand-off, though it leaves. None: it need not any more."""
        before, self._awaiting = self._awaiting, decode
        if decode is not None:
            self._shared.fleet.expect_leg(decode)
        if before is not None:
            self._shared.fleet.unexpect_leg(before)

    def _choose(self) -> Assignment:
        return self._shared.chooser.choose(self._shared.fleet.workers, self._demand(self._excluded))

    def _demand(self, excluded: set[str]) -> Demand:
        sampling, num_prompt = self._job.sampling, self._prompt.num_tokens
        if self._job.open_ended:
            wanted = max(sampling.min_tokens, self.record.num_tokens_longest + 1)
        else:
            wanted = sampling.max_tokens or 1
        num_tokens = num_prompt + wanted
        resumed = self.record.num_tokens > 0
        return Demand(
            num_prompt, num_tokens, resumed, frozenset(excluded), self._fingerprint, self._prompt, self._job.session_id
        )

    def _begin(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._await(assignment.decode if assignment.prefill is not None else None)
        self._seat.sent()
        self._fingerprint = assignment.decode.hello.model_fingerprint
        kind = "split" if assignment.prefill is not None else "whole"
        self._shared.metrics.split_decisions.labels(kind, assignment.reason).inc()
        if assignment.prefill is None:
            self._submit(assignment.decode, "full")
        elif 0 < assignment.prefill.hello.parts_from <= self._prompt.num_tokens:
            link = assignment.decode.peer_status(assignment.prefill)
            is_slow = link is not None and link.bytes_per_s < assignment.prefill.hello.cut_below
            self._prepare(
                assignment.decode, assignment.prefill, self._submit(assignment.prefill, "prefill", overlap=is_slow)
            )
        else:
            self._submit(assignment.prefill, "prefill")

    def _submit(self, worker: WorkerState, phase: Phase, ticket: Ticket | None = None, overlap: bool = False) -> Leg:
        make_command = partial(self._command, phase, ticket, overlap, self.record.starts())
        leg = self._open(worker, phase, make_command)
        self._timeline.submitted(leg.key.attempt, time.perf_counter())
        return leg

    def _prepare(self, worker: WorkerState, prefill: WorkerState, leg: Leg) -> None:
        """Let D pull what P has computed of a long prompt while it computes the rest."""
        assert prefill.kv_cache is not None
        source = Source(prefill.kv_cache.engine_id, prefill.kv_cache.incarnation, leg.key)
        starts = self.record.starts()

        def make_command(key: RequestKey) -> Prepare:
            return Prepare(submit=self._command("decode", None, False, starts, key), source=source)

        announced = self._open(worker, "decode", make_command)
        self._timeline.prepared(announced.key.attempt, time.perf_counter())

    def _open(self, worker: WorkerState, phase: Phase, make_command: Callable[[RequestKey], Submit | Prepare]) -> Leg:
        attempt, weight = self.record.open_leg(), self._weight(phase)
        note_sent(self._shared.fleet.workers, worker, self._prompt, phase)
        self._timeline.opened(attempt, worker.worker_id, worker.role, phase)
        leg = self._shared.fleet.submit(worker, self._job.request_id, attempt, self._inbox, weight, make_command)
        self._legs.append(leg)
        return leg

    def _weight(self, phase: Phase) -> int:
        prompt = self._prompt.num_tokens
        if phase == "prefill":
            return prompt
        return prompt + sum(DECODE_WEIGHT + len(start.forced) for start in self.record.starts())

    def _command(
        self, phase: Phase, ticket: Ticket | None, overlap: bool, starts: tuple[Start, ...], key: RequestKey
    ) -> Submit:
        sampling = self._job.sampling
        if self.record.is_scored:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return Submit(
            key=key,
            phase=phase,
            prompt_token_ids=self._job.prompt_token_ids,
            sampling=sampling,
            starts=starts,
            ticket=ticket,
            priority=self._job.priority,
            cache_salt=self._job.cache_salt,
            overlap=overlap,
        )

    def _drain(self) -> tuple[list[OutputChunk], _LegFailed | None]:
        """Handle what has arrived, at most so much that it takes a moment; what several messages say of one choice
        becomes one OutputChunk."""
        chunks: dict[int, OutputChunk] = {}
        for _ in range(DRAINED_EVENTS):
            if not self._inbox or self.record.finished or self._inbox.num_taken_bytes >= DRAINED_BYTES:
                break
            leg, event = self._inbox.pop()
            try:
                if leg in self._legs:
                    self._handle(leg, event, chunks)
            except LegError as error:
                self._timeline.ended(leg.key.attempt, "lost", time.perf_counter(), str(error))
                return list(chunks.values()), _LegFailed(leg.worker, "internal", "protocol", str(error))
            except _LegFailed as failure:
                return list(chunks.values()), failure
        return list(chunks.values()), None

    def _handle(self, leg: Leg, event: LegEvent, chunks: dict[int, OutputChunk]) -> None:
        if isinstance(event, Delta):
            accepted = self.record.accept(event)
            if event.times is not None:
                self._timeline.told(leg.key.attempt, event.times)
            if accepted is not None:
                self._accept(leg, accepted, chunks)
        elif isinstance(event, Handoff):
            self._hand_off(leg, event.ticket)
        elif isinstance(event, PackedScores):
            self._score(event)
        elif isinstance(event, Arrived):
            self._arrived(event)
        else:
            self._broken(leg, event)

    def _score(self, event: PackedScores) -> None:
        """Log-probabilities of the prompt are held until the answer is made, or come again from the start."""
        before = self.record.num_score_bytes
        self.record.score(event)
        self._seat.computed()
        if self._account is not None:
            self._account.add(self.record.num_score_bytes - before)

    def pass_on(self) -> int:
        """Bytes of the last batch, which count on until the caller takes them off the account; without this they
        count until the next batch is asked for."""
        return self._inbox.pass_on()

    def _accept(self, leg: Leg, accepted: Accepted, chunks: dict[int, OutputChunk]) -> None:
        self._clock.accepted(accepted.choice, len(accepted.token_ids))
        if accepted.finish_reason is not None:
            leg.pending.discard(accepted.choice)
        if self._show(accepted, chunks):
            self._stop_at_worker(leg, accepted.choice)

    def _show(self, accepted: Accepted, chunks: dict[int, OutputChunk]) -> bool:
        """Turn new tokens into text. Whether a stop string ended the choice."""
        choice = accepted.choice
        text, stop, length = self._texts[choice].push(accepted.token_ids, accepted.finish_reason)
        tokens, logprobs = accepted.token_ids, accepted.logprobs
        if stop is not None:
            keep = len(tokens) - (len(self.record.choices[choice].tokens) - length)
            tokens, logprobs = tokens[:keep], logprobs[:keep]
            self.record.stop(choice, stop, length)
        record = self.record.choices[choice]
        before = chunks.get(choice)
        if before is not None:
            text, tokens, logprobs = before.text + text, before.token_ids + tokens, before.logprobs + logprobs
        index = self._job.prompt * self._job.sampling.n + choice
        chunks[choice] = OutputChunk(
            index, self._job.prompt, text, tokens, logprobs, record.finish_reason, record.stop_reason
        )
        return stop is not None

    def _stop_at_worker(self, leg: Leg, choice: int) -> None:
        """A stop string ended a choice that the worker still generates. (P's leg ends by itself or as a whole.)"""
        if choice in leg.pending and not self._is_prefill(leg):
            leg.pending.discard(choice)
            self._timeline.owes_times(leg.key.attempt)
            self._shared.fleet.post(leg.worker, Cancel(key=leg.key, choices=(choice,)))

    def _is_prefill(self, leg: Leg) -> bool:
        return self._assignment is not None and leg.worker is self._assignment.prefill

    def _hand_off(self, leg: Leg, ticket: Ticket) -> None:
        """P is done: the unfinished choices go to D. P's leg stays open until D has the blocks."""
        if not self._is_prefill(leg) or leg.handed_off or ticket.key != leg.key:
            raise LegError("a hand-off that was not expected")
        if not all(start.forced for start in self.record.starts()):
            raise LegError("a hand-off before every choice's first token")
        leg.handed_off = True
        self._shared.fleet.unload(leg)
        assert self._assignment is not None
        worker = self._decode_of(self._assignment, leg)
        prepared = next((leg for leg in self._legs if leg.prepared), None)
        if prepared is not None and prepared.worker is worker:
            self._timeline.submitted(prepared.key.attempt, time.perf_counter())
            submit = self._command("decode", ticket, False, self.record.starts(), prepared.key)
            self._shared.fleet.submit_prepared(prepared, submit)
        else:
            if prepared is not None:
                self._end(prepared, cancel=True)
            self._submit(worker, "decode", ticket)
        self._await(None)

    def _decode_of(self, assignment: Assignment, prefill_leg: Leg) -> WorkerState:
        """The planned D, though it leaves by now; or another one when it is gone or lost its connection."""
        workers = self._shared.fleet.workers
        if assignment.decode in workers and assignment.decode.is_connected_to(prefill_leg.worker):
            return assignment.decode
        try:
            return self._shared.chooser.choose_decode(workers, self._demand(self._excluded), prefill_leg.worker)
        except NoWorker as error:
            raise _LegFailed(prefill_leg.worker, "internal", "lost", str(error)) from error

    def _arrived(self, event: Arrived) -> None:
        """D needs P's blocks no longer. D has told P so, but that needs a living connection between the two:
        Cancel does not."""
        self._shared.metrics.arrivals.labels(event.source).inc()
        self._timeline.arrived(event)
        for leg in [leg for leg in self._legs if leg.handed_off]:
            self._timeline.ended(leg.key.attempt, "handed over", time.perf_counter())
            self._end(leg, cancel=event.source == "recompute")

    def _broken(self, leg: Leg, event: Failed | Lost | Silent) -> None:
        if isinstance(event, Silent):
            message = f"no sign of progress for {event.seconds:g} s"
            self._timeline.ended(leg.key.attempt, "lost", time.perf_counter(), message)
            raise _LegFailed(leg.worker, "internal", "silent", message)
        reason = event.reason if isinstance(event, Lost) else f"{event.kind}: {event.message}"
        self._timeline.ended(leg.key.attempt, "lost", time.perf_counter(), reason)
        self._end_early(leg, cancel=False)
        if leg.handed_off or leg.prepared:
            return  # the decode worker notices by itself, and recomputes; another one is found at the hand-off
        if isinstance(event, Lost):
            what = "its worker was lost" if event.cause == "lost" else "its worker was drained"
            raise _LegFailed(leg.worker, "unavailable", event.cause, f"{what} ({event.reason})")
        if event.kind == "invalid":
            raise RequestFailed("invalid", event.message)
        raise _LegFailed(leg.worker, event.kind, event.kind, event.message)

    async def _recover(self, failure: _LegFailed, failures: int) -> list[OutputChunk]:
        """The next attempt, on other workers where there are some. Raises RequestFailed when it is not worth one
        more. Returns the ends of choices that no worker can go on with."""
        for leg in list(self._legs):
            self._timeline.ended(leg.key.attempt, "cancelled", time.perf_counter(), f"{failure.reason}: {failure}")
            self._end_early(leg, cancel=True)
        if failures >= self._shared.config.max_attempts:
            raise RequestFailed(failure.kind, f"gave up after {failures} attempts: {failure}")
        self._shared.metrics.failovers.labels(failure.reason).inc()
        self._timeline.failovers += 1
        self._clock.failed_over()
        self._excluded.add(failure.worker.worker_id)
        ended: list[OutputChunk] = []
        try:
            assignment = await self._choose_again(failure)
        except RequestFailed:
            ended = self._end_full()
            if not ended:
                raise
            if self.record.finished:
                return ended
            assignment = self._choose()
        self._begin(assignment)
        return ended

    def _end_full(self) -> list[OutputChunk]:
        """An open-ended choice may have as many tokens as its worker has room for. When that worker is lost and
        no other has more room than the choice has tokens, it has reached its length."""
        sampling, workers = self._job.sampling, self._shared.fleet.decode_workers
        limits = [worker.token_limit for worker in workers if worker.hello.model_fingerprint == self._fingerprint]
        if not self._job.open_ended or not limits:
            return []
        room = max(limits) - self._prompt.num_tokens
        chunks: dict[int, OutputChunk] = {}
        for choice, record in enumerate(self.record.choices):
            if record.finish_reason is None and len(record.tokens) >= max(room, sampling.min_tokens, 1):
                self._show(self.record.fill(choice), chunks)
        return list(chunks.values())

    async def _choose_again(self, failure: _LegFailed) -> Assignment:
        """Another worker; else the one that failed, if it lives; else whoever joins in time."""
        deadline = time.monotonic() + self._shared.resume_wait_s
        while True:
            try:
                return self._choose()
            except NoWorker:
                self._excluded.clear()
            try:
                return self._choose()
            except NoWorker as error:
                try:
                    await asyncio.wait_for(self._shared.fleet.change(), deadline - time.monotonic())
                except TimeoutError:
                    raise RequestFailed("unavailable", f"{failure}, and {error}") from None

    def _end_early(self, leg: Leg, cancel: bool) -> None:
        """Of what it did since its last times its worker will not tell."""
        if leg.pending and not leg.handed_off and not leg.prepared:
            self._timeline.owes_times(leg.key.attempt)
        self._end(leg, cancel)

    def _end(self, leg: Leg, cancel: bool) -> None:
        """cancel False: the worker has nothing left. A decode leg whose choices all ended there has nothing either."""
        ran_out = not leg.prepared and (self.record.finished or not leg.pending)
        self._timeline.ended(leg.key.attempt, "finished" if ran_out else "cancelled", time.perf_counter())
        self._legs.remove(leg)
        self.record.close_leg(leg.key.attempt)
        self._shared.fleet.end(leg, cancel and (bool(leg.pending) or self._is_prefill(leg)))


class _Clock:
    """Times of one request's tokens, for the metrics."""

    def __init__(self, metrics: RouterMetrics, n: int, received: float) -> None:
        self._metrics = metrics
        self._received = received
        self.started = time.perf_counter()
        self.ended: float | None = None
        self.outcome: str | None = None
        self._first: list[float | None] = [None] * n
        self._last = [0.0] * n
        self._counts = [0] * n
        self._pausing: set[int] = set()

    @property
    def first_token_s(self) -> float | None:
        """Of whichever choice was first; None: no token yet."""
        known = [first for first in self._first if first is not None]
        return min(known) - self.started if known else None

    @property
    def worst_tpot_s(self) -> float | None:
        """Of the choices with more than one token."""
        return max(self._means(), default=None)

    @property
    def tpot_s(self) -> float | None:
        """Mean over the choices that have two tokens or more; None: there is none."""
        means = self._means()
        return sum(means) / len(means) if means else None

    def accepted(self, choice: int, num_tokens: int) -> None:
        now = time.perf_counter()
        if self._first[choice] is None:
            self._first[choice] = now
            self._metrics.ttft.observe(now - self._received)
        else:
            self._metrics.itl.observe(now - self._last[choice])
        if self._pausing:
            self._resumed(choice, now)
        self._last[choice] = now
        self._counts[choice] += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)

    def failed_over(self) -> None:
        """Choices that have tokens wait for more from another worker."""
        self._pausing = {choice for choice, first in enumerate(self._first) if first is not None}

    def _resumed(self, choice: int, now: float) -> None:
        if choice in self._pausing:
            self._pausing.discard(choice)
            self._metrics.pause.observe(now - self._last[choice])

    def begin(self, num_prompt_tokens: int) -> None:
        self._metrics.running.inc()
        self._metrics.prompt_tokens.inc(num_prompt_tokens)
        self._metrics.prompt_lengths.observe(num_prompt_tokens)

    def end(self, outcome: str, record: RequestRecord) -> None:
        self.ended, self.outcome = time.perf_counter(), outcome
        metrics = self._metrics
        metrics.running.dec()
        metrics.requests.labels(outcome).inc()
        metrics.cached_tokens.inc(record.cached_tokens or 0)
        metrics.generation_lengths.observe(record.num_tokens)
        for choice in record.choices:
            unfinished = "abort" if outcome == "cancelled" else "error"
            metrics.successes.labels(choice.finish_reason or unfinished).inc()
        for mean in self._means():
            metrics.tpot.observe(mean)

    def _means(self) -> list[float]:
        """Seconds a token behind the first, of each choice that has one."""
        timed = zip(self._first, self._last, self._counts, strict=True)
        return [(last - first) / (count - 1) for first, last, count in timed if first is not None and count > 1]
