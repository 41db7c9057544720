"""The loop that combines an engine, a connector, both phases and the KV pool: commands in, batches
of events out.

One thread runs one `turn()` at a time: poll the phases, run a step, send one EventBatch per router.
The worker's role says what it is for, but any worker can do any phase. `legs.py` knows who has
which legs here, `outbox.py` what goes to whom, `peers.py` the links, and `status.py` what the
worker reports of itself. Knows no sockets (worker.hosts carries the bytes) and no Ray.

A command for a session that is not open is dropped.
"""

import logging
import math
import time

from pdserve.configs.transfer import TransferConfig
from pdserve.engine.engine import Engine
from pdserve.engine.grammars.builder import GrammarBuilder
from pdserve.engine.grammars.grammar import Grammar
from pdserve.engine.step_result import StepResult
from pdserve.kvtransfer.connector import KVPool, KVReceiver, KVSender
from pdserve.protocol.commands import (
    AskExpertLoad,
    Cancel,
    Command,
    ConnectPeer,
    DisconnectPeer,
    Prepare,
    Resync,
    RouterLost,
    SetRole,
    Stop,
    Submit,
    Subscribe,
)
from pdserve.protocol.events import (
    Arrived,
    Delta,
    Embedded,
    Event,
    Failed,
    Handoff,
    PromptScored,
    Snapshot,
)
from pdserve.protocol.request_key import RequestKey
from pdserve.worker.cache_report import CacheReport
from pdserve.worker.hosts.engine_load import EngineLoad
from pdserve.worker.legs import WorkerLegs
from pdserve.worker.metrics import WorkerMetrics
from pdserve.worker.outbox import Outbox, Send, Session
from pdserve.worker.peers import PeerStatuses
from pdserve.worker.phases.all_phases import Phases
from pdserve.worker.phases.grammar_phase import Refused, grammar_text
from pdserve.worker.status import WorkerStatus

logger = logging.getLogger(__name__)

# After this time without work, blocks are checked. That takes milliseconds, and no request waits.
REST_S = 1.0


class WorkerLoop:
    """The loop of one worker.

    If sender and receiver are None, the worker has no connector, and takes only whole requests.
    `pool` may be None, `grammars` too without a tokenizer, and `experts` with one rank. `send`:
    `Outbox`. `hands_over`: `WorkerConfig`.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: WorkerMetrics,
        config: TransferConfig,
        role: str,
        worker_id: str,
        incarnation: int,
        sender: KVSender | None,
        receiver: KVReceiver | None,
        send: Send,
        pool: KVPool | None = None,
        pool_name: str = "",
        grammars: GrammarBuilder | None = None,
        experts: EngineLoad | None = None,
        hands_over: bool = True,
    ) -> None:
        self.engine = engine
        self.stopped = False
        self._metrics = metrics
        self._worker_id = worker_id
        self._sender = sender
        self._outbox = Outbox(send, worker_id, incarnation)
        self._legs = WorkerLegs(engine, metrics)
        self._peers = PeerStatuses(receiver, self._outbox.add_to_all)
        self._phases = Phases(
            engine,
            config,
            sender,
            receiver,
            pool,
            grammars,
            self._peers,
            lambda: self._status.prefill_tokens_per_s,
            metrics.registry,
        )
        self.pool = self._phases.pool
        self.decode = self._phases.decode
        self.fetch = self._phases.fetch
        self.prefill = self._phases.prefill
        self.grammars = self._phases.grammars
        self._experts = experts or EngineLoad(engine.expert_load)
        self._cache = CacheReport([home.blocks for home in engine.homes])
        self._status = WorkerStatus(
            engine,
            metrics,
            role,
            config.overlap,
            sender,
            self.prefill,
            self.pool,
            pool_name,
            self.fetch,
            self.grammars,
            hands_over,
        )
        self._read_at = time.monotonic()  # when commands were read last: before the turn
        self._turn_began: float | None = None  # start of the last turn, if it computed a step
        self._spare_s = 0.0  # of the last step, see StepResult
        self._last_busy = 0.0
        self._is_checked = True  # True if blocks were checked since the last work

    # --- commands ---

    def handle(self, command: Command) -> None:
        """Applies one command; its events go out with the next `turn`."""
        match command:
            case Submit():
                self._submit(command)
            case Prepare():
                self._prepare(command)
            case Cancel():
                self._cancel(command.key, command.choices)
            case ConnectPeer():
                self._peers.connect(command)
            case DisconnectPeer():
                self._peers.disconnect(command)
            case Subscribe():
                self._subscribe((command.router_id, command.session))
            case Resync():
                self._resync((command.router_id, command.session))
            case RouterLost():
                self._router_lost((command.router_id, command.session))
            case SetRole():
                self._set_role(command)
            case AskExpertLoad():
                self._experts.ask((command.router_id, command.session))
            case Stop():
                self.stopped = True

    def _submit(self, submit: Submit) -> None:
        key = submit.key
        if not self._outbox.is_open((key.router_id, key.session)) or self._legs.is_here(key):
            return
        wanted = self._legs.without_cancelled(submit)
        if wanted is None:
            return
        arrived = self._arrival()
        self._legs.begin(wanted, arrived)
        wanted = wanted.aged(time.monotonic() - arrived)
        if grammar_text(wanted) is None:
            self._start(wanted)
            return
        try:
            self.grammars.submit(wanted)
        except ValueError as error:
            self._refuse(key, Refused("invalid", str(error)))
        self._start_built()

    def _start_built(self) -> None:
        """Goes on with the requests whose grammars are built, or cannot be built."""
        for submit, answer in self.grammars.poll():
            if isinstance(answer, Refused):
                self._refuse(submit.key, answer)
            else:
                self._start(submit, answer)

    def _refuse(self, key: RequestKey, why: Refused) -> None:
        self._legs.forget(key)
        self._phases.cancel_import(key, None)  # something may have been prepared for it
        failed = Failed(
            request_id=key.request_id, attempt=key.attempt, kind=why.kind, message=why.message
        )
        self._emit([(key, failed)])

    def _prepare(self, prepare: Prepare) -> None:
        key = prepare.submit.key
        is_known = self._legs.is_over(key) or self._legs.is_here(key)
        if (
            self.decode is not None
            and self._outbox.is_open((key.router_id, key.session))
            and not is_known
        ):
            self.decode.prepare(prepare)
            self.grammars.prepare(prepare.submit)

    def _arrival(self) -> float:
        """Returns when a command that is handled now came, in monotonic seconds.

        A command that came during a step is read after it. On average it has waited for half of the
        turn.
        """
        now = time.monotonic()
        return now if self._turn_began is None else (self._turn_began + now) / 2

    def _start(self, submit: Submit, grammar: Grammar | None = None) -> None:
        try:
            if submit.phase == "prefill" and self.prefill is not None:
                self.prefill.submit(submit, grammar)
            elif submit.phase == "decode" and self.decode is not None:
                self._emit(self.decode.submit(submit, grammar))
            elif submit.phase == "full":
                self._phases.compute_here(self.engine.make_request(submit, grammar), submit.starts)
            else:
                raise ValueError(
                    f'this worker has no connector: phase must be "full", not {submit.phase!r}'
                )
        except ValueError as error:
            self._refuse(submit.key, Refused("invalid", str(error)))

    def _cancel(self, key: RequestKey, choices: tuple[int, ...] | None) -> None:
        if self._legs.is_here(key):
            self._legs.cancelled(key, choices)
            self._phases.cancel(key, choices)
        else:
            self._legs.bury(key, choices)
            self._phases.cancel_import(key, choices)

    def _subscribe(self, session: Session) -> None:
        self._outbox.open(session)
        self._outbox.add_to(
            session,
            self._status.hello(self._peers.statuses),
            self._cache.begin(session),
            self.snapshot(),
        )
        if self.pool is not None:
            self._outbox.add_to(session, self.pool.report.everything())

    def _resync(self, session: Session) -> None:
        if self._outbox.is_open(session):
            self._outbox.add_to(session, self._cache.begin(session))

    def _set_role(self, command: SetRole) -> None:
        """Changes the role. The next flush reports it to every router, even if nothing changed.

        Somebody waits for that report.
        """
        role = command.role
        if role != "both" and not self._status.hands_over:
            own = self._status.role
            logger.warning("%s hands nothing over, so it stays %s", self._worker_id, own)
        else:
            if role != self._status.role:
                logger.info("%s was %s and becomes %s", self._worker_id, self._status.role, role)
            self._status.set_role(role, command.by)
        self._status.hurry()

    def _router_lost(self, session: Session) -> None:
        self._outbox.close(session)
        self._cache.forget(session)
        for key in self._legs.lose(session):
            self._phases.cancel(key, None)
        if self.decode is not None:
            self.decode.cancel_prepared(*session)

    # --- the turn ---

    def turn(self) -> float:
        """Advances everything once and sends the events. Returns how many seconds to sleep."""
        began = self._read_at = time.monotonic()
        self._poll_phases()
        busy = self.engine.has_work
        result = self._step() if busy else None
        stepped = result is not None
        if stepped:
            # What arrived meanwhile then goes out with this step's events, not one step later.
            self._poll_phases()
        self._status.turned(began, result)
        self._check_at_rest(busy)
        self._turn_began = began if stepped else None
        self._legs.forget_finished(self._phases.keys())
        self._flush()
        self.engine.send_held()
        if stepped or self._cache.has_parts:
            return 0.0
        waits = self.decode is not None and self.decode.waits_for_blocks
        polls = busy or waits or self._experts.is_asked
        fetch_due = self.fetch.due if self.fetch else math.inf
        due = min(self._status.due, self._cache.due(), fetch_due, self.grammars.due)
        rest = max(0.0, due - time.monotonic())
        return (min(self._spare_s, rest) or 0.002) if polls else rest

    def _check_at_rest(self, busy: bool) -> None:
        now = time.monotonic()
        if busy:
            self._last_busy = now
            self._is_checked = False
        elif not self._is_checked and now >= self._last_busy + REST_S:
            self._is_checked = True
            self.check_integrity()

    def check_integrity(self) -> None:
        """Raises AssertionError if blocks are lost or owned twice."""
        self.engine.check_integrity(self._phases.owned)

    def snapshot(self) -> Snapshot:
        return self._status.snapshot(self._cache.number, self._read_at)

    def _step(self) -> StepResult | None:
        """Runs a step. Returns None if nothing was computed."""
        began = time.monotonic()
        result = self.engine.step(is_patient=False)
        while self.engine.scheduler.admitted:
            self._legs.admitted(self.engine.scheduler.admitted.popleft(), began)
        self._spare_s = result.spare_s
        if not result.num_rows:
            return None
        seconds = result.device_seconds or result.host_seconds  # on CPU the host is the device
        self._legs.computed(seconds)
        self._status.stepped(result, seconds)
        self._emit(result.events)
        if self.prefill is not None:
            self._emit(self.prefill.on_step(result))
        if self.pool is not None:
            self.pool.on_step(result)
        return result

    def _poll_phases(self) -> None:
        self._start_built()
        for session, counts in self._experts.poll():
            if self._outbox.is_open(session):
                self._outbox.add_to(session, counts)
        if self.pool is not None:
            self._emit(self.pool.poll())
        if self.prefill is not None:
            self.prefill.poll()
        if self.decode is not None:
            events, peers = self.decode.poll()
            self._emit(events)
            for status in peers:
                self._peers.heard(status)
            if self.fetch is not None:
                self._emit(self.fetch.poll(self.decode.waits_for_blocks))

    def _emit(self, events: list[tuple[RequestKey, Event]]) -> None:
        for key, event in events:
            # Most events are plain, and need no further work.
            is_plain = type(event) is Delta and event.position and not event.finish_reason
            self._outbox.add(key, event if is_plain else self._noted(key, event))

    def _noted(self, key: RequestKey, event: Event) -> Event:
        """Counts the event and returns it, with its leg's times if it has any."""
        if isinstance(event, Arrived):
            self._metrics.arrived(event)
        elif isinstance(event, Handoff):
            self._metrics.handoffs.inc()
        elif isinstance(event, PromptScored | Delta | Embedded):
            return self._legs.timed(key, event)
        return event

    def _flush(self) -> None:
        now = time.monotonic()
        part = self._cache.next_part()
        if part is not None:
            self._outbox.add_to(*part)
        is_due = now >= self._status.due
        if is_due:
            self._tell_waiting()
        for session, legs in self._legs.waiting_new():
            self._outbox.add_to(session, legs)
        self._outbox.flush()
        for change in self._cache.changes(now, self._outbox.has_readers):
            self._outbox.broadcast(change)
        if not is_due:
            if self._outbox.has_readers and (load := self._status.load_change(now, self._read_at)):
                self._outbox.broadcast(load)
            return
        self._status.told(now)
        if self._outbox.has_readers:
            pooled = self.pool.report.changes() if self.pool is not None else None
            self._outbox.broadcast(self.snapshot(), *([pooled] if pooled is not None else []))

    def _tell_waiting(self) -> None:
        """Reports which legs wait, since routers measure how long a leg is silent."""
        for session, legs in self._legs.waiting(self._phases.waiting_keys()):
            self._outbox.add_to(session, legs)
