"""Runs one prompt through the fleet: chooses workers, hands over, fails over, and cleans up.

    choose --split--> P leg --Handoff--> D leg --> finished     (long prompt: prepared beside P's)
      |  --whole-------------------------^  |
      +<---- recover: cancel all legs, exclude the failed worker, resume with forced tokens ----+

Every new token goes through the record first. The only wait for a worker is the inbox, and `close`
works from a cancelled task. This module decides what happens, and others do it: `legs` (what
workers have), `chunks` (text), `request_clock` and `run_report`. Knows no HTTP. Made by
`router.request.service`, one per prompt, and read by `router.request.generation`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator

from pdserve.protocol.block_digests import Tenant
from pdserve.protocol.events import Arrived, Delta, Embedded, Failed, Handoff, PackedScores
from pdserve.protocol.handoff import Ticket
from pdserve.router.admission import Seat
from pdserve.router.choosing.choose import Assignment, Chooser, Demand, NoWorker
from pdserve.router.choosing.predict import Forecast, Predictor
from pdserve.router.errors import FailureKind, RequestFailed
from pdserve.router.fleet.inbox import JOINED_BYTES, Inbox, LegEvent, Lost, Silent
from pdserve.router.fleet.prefix_index import PromptBlocks
from pdserve.router.fleet.worker_state import Leg, WorkerState
from pdserve.router.held_bytes import Account
from pdserve.router.request.chunks import ChoiceTexts, OutputChunk
from pdserve.router.request.job import Dispatcher, Job
from pdserve.router.request.legs import Legs
from pdserve.router.request.record import Accepted, LegError, RequestRecord
from pdserve.router.request.request_clock import RequestClock
from pdserve.router.request.run_report import RunReport
from pdserve.router.request.timeline import Failover, Timeline

DRAINED_EVENTS = 256
DRAINED_BYTES = 8 * JOINED_BYTES  # a joined event may have been made of hundreds


class _LegFailed(Exception):
    def __init__(self, worker: WorkerState, kind: FailureKind, reason: str, message: str) -> None:
        super().__init__(message)
        self.worker = worker
        self.kind = kind
        self.reason = reason


class RequestRun:
    def __init__(
        self, dispatcher: Dispatcher, job: Job, seat: Seat, account: Account | None = None
    ) -> None:
        """Tokens that wait for a slow reader count in `account`."""
        self._shared = dispatcher
        self._job = job
        self._seat = seat
        self._account = account
        sampling = job.sampling
        self.record = record = RequestRecord(sampling.n, sampling.logprobs is not None)
        self._texts = ChoiceTexts(
            dispatcher.tokenizer, sampling, job.stops, job.prompt, record, job.reading
        )
        self._prompt = prompt = PromptBlocks(job.prompt_token_ids, Tenant(job.cache_salt))
        self._clock = clock = RequestClock(dispatcher.metrics, sampling.n, job.received)
        self._timeline = timeline = Timeline()
        self._inbox: Inbox[Leg] = Inbox(account)
        self._legs = Legs(dispatcher.fleet, job, prompt, record, timeline, clock, self._inbox)
        self.report = RunReport(dispatcher, job, prompt, record, clock, timeline)
        self._assignment: Assignment | None = None
        self._excluded: set[str] = set()
        self._fingerprint: str | None = None

    async def stream(self) -> AsyncGenerator[list[OutputChunk], None]:
        """Yields new chunks as they come, until every choice is finished. Raises RequestFailed.

        Whoever stops early must call `close`; closing the iterator does that.
        """
        failures = 0
        accepted_before = 0
        outcome = "internal"
        self._clock.begin(self._prompt.num_tokens)
        if self._job.trace is not None:
            self._job.trace.began()
        turn = self._shared.pacer.turn
        try:
            await turn()  # many prompts may begin together, and end with one message
            self._begin(self._choose())
            while not self.record.finished:
                if self._inbox.num_taken_bytes:
                    self._inbox.done()
                await self._inbox.wait()
                chunks, failure = self._drain()
                if chunks:
                    yield chunks
                    if self._inbox:
                        # the reader was slow, so others have a turn before the rest
                        await asyncio.sleep(0)
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
            outcome = error.failure
            error.logged = self._shared.request_log.wanted
            raise
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        finally:
            self.close()
            self._inbox.close()
            self._clock.end(outcome, self.record)
            self.report.judge(outcome)
            self.report.tell()
            self._job.forget_prompt()
            self._prompt.forget()

    def forecast(self, chooser: Chooser, share_ahead: float, unsent_tokens: int) -> Forecast | None:
        """Predicts the first token, if the run began now where `chooser` says. Raises NoWorker.

        `unsent_tokens` wait in this router, for all workers. Returns None if nobody has measured a
        worker's speed yet.
        """
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

    def fail(self, error: RequestFailed) -> None:
        """Drops what waits, and ends with this error as soon as somebody reads."""
        self._inbox.fail(error)

    def close(self) -> None:
        """Ends all legs, and cancels them at every worker that may hold something.

        Idempotent; never waits.
        """
        self._seat.leave()
        self._inbox.clear()
        self._legs.close()

    def _choose(self) -> Assignment:
        return self._shared.chooser.choose(self._shared.fleet.workers, self._demand(self._excluded))

    def _demand(self, excluded: set[str]) -> Demand:
        sampling = self._job.sampling
        num_prompt = self._prompt.num_tokens
        if self._job.kind == "embed":
            wanted = 0
        elif self._job.open_ended:
            wanted = max(sampling.min_tokens, self.record.num_tokens_longest + 1)
        else:
            wanted = sampling.max_tokens or 1
        num_tokens = num_prompt + wanted
        resumed = self.record.num_tokens > 0
        return Demand(
            num_prompt,
            num_tokens,
            resumed,
            frozenset(excluded),
            self._fingerprint,
            self._prompt,
            self._job.session_id,
            None if self._job.open_ended else sampling.max_tokens,
            needs_grammar="grammar" in (sampling.logit_rules or ()),
            kind=self._job.kind,
        )

    def _begin(self, assignment: Assignment) -> None:
        self._assignment = assignment
        computing = assignment.prefill or assignment.decode
        self._seat.sent(computing.worker_id)
        self._fingerprint = assignment.decode.hello.model_fingerprint
        kind = "split" if assignment.prefill is not None else "whole"
        self._shared.metrics.split_decisions.labels(kind, assignment.reason).inc()
        self._legs.begin(assignment)

    def _drain(self) -> tuple[list[OutputChunk], _LegFailed | None]:
        """Handles what has arrived, but only as much as takes a moment.

        Several messages about one choice become one OutputChunk.
        """
        chunks: dict[int, OutputChunk] = {}
        for _ in range(DRAINED_EVENTS):
            if (
                not self._inbox
                or self.record.finished
                or self._inbox.num_taken_bytes >= DRAINED_BYTES
            ):
                break
            leg, event = self._inbox.pop()
            try:
                if leg in self._legs.open:
                    self._handle(leg, event, chunks)
            except LegError as error:
                self._timeline.ended(leg.key.attempt, "lost", time.perf_counter(), str(error))
                return list(chunks.values()), _LegFailed(
                    leg.worker, "internal", "protocol", str(error)
                )
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
        elif isinstance(event, Embedded):
            self._embed(leg, event)
        elif isinstance(event, PackedScores):
            self._score(event)
        elif isinstance(event, Arrived):
            self._arrived(event)
        else:
            self._broken(leg, event)

    def _score(self, event: PackedScores) -> None:
        """Holds log-probabilities of the prompt until the answer is made, or until they come again
        from the start."""
        before = self.record.num_score_bytes
        self.record.score(event)
        self._seat.computed()
        if self._account is not None:
            self._account.add(self.record.num_score_bytes - before)

    def _embed(self, leg: Leg, event: Embedded) -> None:
        """Holds the row until the answer is made."""
        if event.times is not None:
            self._timeline.told(leg.key.attempt, event.times)
        if not self.record.embed(event):
            return
        leg.pending.clear()
        self._seat.computed()
        self._clock.accepted(0, 0)
        if self._account is not None:
            self._account.add(len(event.values))

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens generated so far, over all choices."""
        return self._texts.num_reasoning_tokens

    def pass_on(self) -> int:
        """Returns the bytes of the last batch; the caller must take them off the account.

        Without this call they count until the next batch is asked for.
        """
        return self._inbox.pass_on()

    def _accept(self, leg: Leg, accepted: Accepted, chunks: dict[int, OutputChunk]) -> None:
        self._clock.accepted(accepted.choice, len(accepted.token_ids))
        if accepted.finish_reason is not None:
            leg.pending.discard(accepted.choice)
        if self._texts.show(accepted, chunks):
            self._legs.stop_choice(leg, accepted.choice)

    def _hand_off(self, leg: Leg, ticket: Ticket) -> None:
        """Sends the unfinished choices to D, as P is done. P's leg stays open until D has the
        blocks."""
        if not self._legs.is_prefill(leg) or leg.handed_off or ticket.key != leg.key:
            raise LegError("a hand-off that was not expected")
        if not all(start.forced for start in self.record.starts()):
            raise LegError("a hand-off before every choice's first token")
        leg.handed_off = True
        self._shared.fleet.unload(leg)
        assert self._assignment is not None
        self._legs.hand_over(self._decode_of(self._assignment, leg), ticket)

    def _decode_of(self, assignment: Assignment, prefill_leg: Leg) -> WorkerState:
        """Returns the planned D even if it leaves, or another one if it is gone or not connected
        any more."""
        workers = self._shared.fleet.workers
        if assignment.decode in workers and assignment.decode.is_connected_to(prefill_leg.worker):
            return assignment.decode
        try:
            return self._shared.chooser.choose_decode(
                workers, self._demand(self._excluded), prefill_leg.worker
            )
        except NoWorker as error:
            raise _LegFailed(prefill_leg.worker, "internal", "lost", str(error)) from error

    def _arrived(self, event: Arrived) -> None:
        """Ends P's legs, as D no longer needs P's blocks.

        D has told P so, if the two have a living connection; a Cancel needs none.
        """
        self._shared.metrics.arrivals.labels(event.source).inc()
        self._timeline.arrived(event)
        self._legs.end_handed_over(cancel=event.source == "recompute")

    def _broken(self, leg: Leg, event: Failed | Lost | Silent) -> None:
        if isinstance(event, Silent):
            message = f"no sign of progress for {event.seconds:g} s"
            self._timeline.ended(leg.key.attempt, "lost", time.perf_counter(), message)
            raise _LegFailed(leg.worker, "internal", "silent", message)
        reason = event.reason if isinstance(event, Lost) else f"{event.kind}: {event.message}"
        self._timeline.ended(leg.key.attempt, "lost", time.perf_counter(), reason)
        self._legs.end_early(leg, cancel=False)
        if leg.handed_off or leg.prepared:
            # the decode worker notices this itself and recomputes; if a prepared leg was lost,
            # another decode worker is found at the hand-off
            return
        if isinstance(event, Lost):
            what = "its worker was lost" if event.cause == "lost" else "its worker was drained"
            raise _LegFailed(leg.worker, "unavailable", event.cause, f"{what} ({event.reason})")
        if event.kind == "invalid":
            raise RequestFailed("invalid", event.message)
        raise _LegFailed(leg.worker, event.kind, event.kind, event.message)

    async def _recover(self, failure: _LegFailed, failures: int) -> list[OutputChunk]:
        """Begins the next attempt, on other workers if there are some.

        Returns the ends of choices that no worker can go on with. Raises RequestFailed if one more
        attempt is not worth it.
        """
        self._legs.give_up(f"{failure.reason}: {failure}")
        if failures >= self._shared.config.max_attempts:
            raise RequestFailed(failure.kind, f"gave up after {failures} attempts: {failure}")
        self._shared.metrics.failovers.labels(failure.reason).inc()
        self._timeline.failovers.append(
            Failover(time.perf_counter(), failure.reason, failure.worker.worker_id)
        )
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
        """Ends open-ended choices that are as long as any worker has room for.

        This happens when their worker was lost and no other has more room than they have tokens.
        """
        sampling = self._job.sampling
        workers = self._shared.fleet.decode_workers
        limits = [
            worker.token_limit
            for worker in workers
            if worker.hello.model_fingerprint == self._fingerprint
        ]
        if not self._job.open_ended or not limits:
            return []
        room = max(limits) - self._prompt.num_tokens
        chunks: dict[int, OutputChunk] = {}
        for choice, record in enumerate(self.record.choices):
            if record.finish_reason is None and len(record.tokens) >= max(
                room, sampling.min_tokens, 1
            ):
                self._texts.show(self.record.fill(choice), chunks)
        return list(chunks.values())

    async def _choose_again(self, failure: _LegFailed) -> Assignment:
        """Chooses another worker; else the failed one, if it lives; else one that joins in time."""
        deadline = time.monotonic() + self._shared.resume_wait_s
        while True:
            try:
                return self._choose()
            except NoWorker:
                self._excluded.clear()
            try:
                return self._choose()
            except NoWorker as error:
                if self._shared.fleet.is_closed:
                    raise RequestFailed("unavailable", f"the server stops: {failure}") from None
                try:
                    await asyncio.wait_for(self._shared.fleet.change(), deadline - time.monotonic())
                except TimeoutError:
                    raise RequestFailed("unavailable", f"{failure}, and {error}") from None
