"""Opens, hands over and ends the legs of one prompt: the Submits that its workers have.

    begin --split--> P leg, and D's beside it when the prompt is long --hand_over--> D leg --> ended
      '-----whole-----------------------------------------------------------------> D leg --> ended

All sends are in the background, so nothing here waits for a worker. Chooses no worker and reads no
event: `router.request.request_run`, which has one `Legs` per prompt, says what to open and to end.
"""

import time
from collections.abc import Callable
from functools import partial

import msgspec

from pdserve.protocol.commands import Cancel, PrefixHint, Prepare, Start, Submit
from pdserve.protocol.handoff import Source, Ticket
from pdserve.protocol.request_key import Phase, RequestKey
from pdserve.router.choosing.choose import Assignment, note_sent
from pdserve.router.choosing.holders import PrefixFetch
from pdserve.router.choosing.predict import Predictor
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.fleet.inbox import Inbox
from pdserve.router.fleet.prefix_index import PromptBlocks
from pdserve.router.fleet.worker_state import Leg, WorkerState
from pdserve.router.request.job import Job
from pdserve.router.request.record import RequestRecord
from pdserve.router.request.request_clock import RequestClock
from pdserve.router.request.timeline import Timeline

# A decoding sequence weighs its context plus this number of tokens, as its real length is not known
# beforehand.
DECODE_WEIGHT = 128


class Legs:
    """The legs of one prompt. `open` holds those that have not ended, in the order of opening."""

    def __init__(
        self,
        fleet: Fleet,
        job: Job,
        prompt: PromptBlocks,
        record: RequestRecord,
        timeline: Timeline,
        clock: RequestClock,
        inbox: Inbox[Leg],
    ) -> None:
        """Starts without legs. The events of all legs go to `inbox`."""
        self.open: list[Leg] = []
        self._fleet = fleet
        self._job = job
        self._prompt = prompt
        self._record = record
        self._timeline = timeline
        self._clock = clock
        self._inbox = inbox
        self._prefill: WorkerState | None = None  # P of the last assignment
        self._awaiting: WorkerState | None = None  # planned D, from P's start to the hand-off

    def begin(self, assignment: Assignment) -> None:
        """Opens an attempt's first legs."""
        prefill = assignment.prefill
        decode = assignment.decode
        self._prefill = prefill
        self._await(decode if prefill is not None else None)
        if prefill is None:
            self._submit(decode, "full")
        elif 0 < prefill.hello.parts_from <= self._prompt.num_tokens:
            link = decode.peer_status(prefill)
            is_slow = link is not None and link.bytes_per_s < prefill.hello.cut_below
            self._prepare(decode, prefill, self._submit(prefill, "prefill", overlap=is_slow))
        else:
            self._submit(prefill, "prefill")

    def is_prefill(self, leg: Leg) -> bool:
        return leg.worker is self._prefill

    def hand_over(self, worker: WorkerState, ticket: Ticket) -> None:
        """Sends the unfinished choices to this D.

        It uses the leg that was prepared there, or opens a new one.
        """
        prepared = next((leg for leg in self.open if leg.prepared), None)
        if prepared is not None and prepared.worker is worker:
            self._timeline.submitted(prepared.key.attempt, time.perf_counter())
            submit = self._command("decode", ticket, False, self._starts(), prepared.key)
            self._fleet.submit_prepared(prepared, submit)
        else:
            if prepared is not None:
                self._end(prepared, cancel=True)
            self._submit(worker, "decode", ticket)
        self._await(None)

    def stop_choice(self, leg: Leg, choice: int) -> None:
        """Ends a choice at the worker that still generates it, because a stop string matched.

        P's leg ends by itself or as a whole.
        """
        if choice in leg.pending and not self.is_prefill(leg):
            leg.pending.discard(choice)
            self._timeline.owes_times(leg.key.attempt)
            self._fleet.post(leg.worker, Cancel(key=leg.key, choices=(choice,)))

    def end_handed_over(self, cancel: bool) -> None:
        """Ends P's legs, because the decode worker no longer needs their blocks.

        `cancel` must be set if the decode worker did not tell P so.
        """
        for leg in [leg for leg in self.open if leg.handed_off]:
            self._timeline.ended(leg.key.attempt, "handed over", time.perf_counter())
            self._end(leg, cancel)

    def end_early(self, leg: Leg, cancel: bool) -> None:
        """Ends a leg before its worker is done; timings since its last report are lost."""
        if leg.pending and not leg.handed_off and not leg.prepared:
            self._timeline.owes_times(leg.key.attempt)
        self._end(leg, cancel)

    def give_up(self, reason: str) -> None:
        """Ends the attempt, and cancels its legs for this reason."""
        for leg in list(self.open):
            self._timeline.ended(leg.key.attempt, "cancelled", time.perf_counter(), reason)
            self.end_early(leg, cancel=True)

    def close(self) -> None:
        """Ends all legs and cancels them at every worker that may hold something. Idempotent."""
        for leg in list(self.open):
            self._end(leg, cancel=True)
        self._await(None)

    def _await(self, decode: WorkerState | None) -> None:
        """Keeps the planned D until the hand-off even if it leaves; None ends that."""
        before = self._awaiting
        self._awaiting = decode
        if decode is not None:
            self._fleet.expect_leg(decode)
        if before is not None:
            self._fleet.unexpect_leg(before)

    def _submit(
        self, worker: WorkerState, phase: Phase, ticket: Ticket | None = None, overlap: bool = False
    ) -> Leg:
        fetch = self._fetch(worker) if phase != "decode" else None
        prefix = fetch.hint if fetch is not None else None
        make_command = partial(self._command, phase, ticket, overlap, self._starts(), prefix=prefix)
        leg = self._open(worker, phase, make_command)
        if fetch is not None:
            fetch.note_sent(time.monotonic())
        self._timeline.submitted(leg.key.attempt, time.perf_counter())
        return leg

    def _fetch(self, worker: WorkerState) -> PrefixFetch | None:
        """Returns what the worker should fetch of the prompt before it computes the rest.

        If another holder would be better but is not connected, a connection is asked for, and this
        request does without.
        """
        if self._job.sampling.prompt_logprobs is not None and not self._record.is_scored:
            return None
        fleet = self._fleet
        now = time.monotonic()
        predictor = Predictor(fleet.workers, self._prompt, self._prompt.num_tokens, now)
        wished = predictor.wished_holder(worker)
        if wished is not None:
            fleet.introducer.wish(worker, wished)
        return predictor.prefix_fetch(worker)

    def _prepare(self, worker: WorkerState, prefill: WorkerState, leg: Leg) -> None:
        """Lets D pull what P has computed of a long prompt while P computes the rest."""
        assert prefill.kv_cache is not None
        source = Source(prefill.kv_cache.engine_id, prefill.kv_cache.incarnation, leg.key)
        starts = self._record.starts()

        def make_command(key: RequestKey) -> Prepare:
            return Prepare(submit=self._command("decode", None, False, starts, key), source=source)

        announced = self._open(worker, "decode", make_command)
        self._timeline.prepared(announced.key.attempt, time.perf_counter())

    def _open(
        self,
        worker: WorkerState,
        phase: Phase,
        make_command: Callable[[RequestKey], Submit | Prepare],
    ) -> Leg:
        attempt = self._record.open_leg()
        weight = self._weight(phase)
        name = self._job.request_id, attempt
        note_sent(self._fleet.workers, worker, self._prompt, phase, name)
        self._timeline.opened(attempt, worker.worker_id, worker.role, phase)
        leg = self._fleet.submit(
            worker, self._job.request_id, attempt, self._inbox, weight, make_command
        )
        self.open.append(leg)
        return leg

    def _weight(self, phase: Phase) -> int:
        prompt = self._prompt.num_tokens
        if phase == "prefill":
            return prompt
        return prompt + sum(DECODE_WEIGHT + len(start.forced) for start in self._record.starts())

    def _command(
        self,
        phase: Phase,
        ticket: Ticket | None,
        overlap: bool,
        starts: tuple[Start, ...],
        key: RequestKey,
        prefix: PrefixHint | None = None,
    ) -> Submit:
        sampling = self._job.sampling
        if self._record.is_scored:
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
            kind=self._job.kind,
            waited_ms=self._clock.waited_ms,
            prefix=prefix,
        )

    def _starts(self) -> tuple[Start, ...]:
        """Returns the unfinished choices, with the time that each has used of its promise."""
        return tuple(
            msgspec.structs.replace(start, first_ms_ago=self._clock.first_ms_ago(start.choice))
            for start in self._record.starts()
        )

    def _end(self, leg: Leg, cancel: bool) -> None:
        """Ends a leg.

        `cancel` is False if the worker has nothing left. A decode leg whose choices all ended there
        has nothing left either.
        """
        ran_out = not leg.prepared and (self._record.finished or not leg.pending)
        self._timeline.ended(
            leg.key.attempt, "finished" if ran_out else "cancelled", time.perf_counter()
        )
        self.open.remove(leg)
        self._record.close_leg(leg.key.attempt)
        self._fleet.end(leg, cancel and (bool(leg.pending) or self.is_prefill(leg)))
