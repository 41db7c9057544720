"""The loop that composes an engine, a connector, both phases and the KV pool: commands in, batches of events out.

One thread, one `turn()` at a time: poll the phases, run a step, send one EventBatch per router (and before it one for
each piece of a prompt's log-probabilities, which are large). Its role is a field of
its state, and says what it is for; any worker can do any phase. Knows no sockets (worker.host carries the bytes) and no
Ray.

A command for a session that is not open is dropped; a Cancel that comes before its Submit leaves a tombstone.
"""

import logging
import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable

import msgspec

from pdserve.configs.transfer import TransferConfig
from pdserve.decode.decode_phase import DecodePhase
from pdserve.engine.engine import Engine
from pdserve.engine.step_result import StepResult
from pdserve.kvtransfer.connector import KVPool, KVReceiver, KVSender
from pdserve.prefill.prefill_phase import PrefillPhase
from pdserve.protocol.codec import PROTOCOL_VERSION
from pdserve.protocol.commands import (
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
    Event,
    EventBatch,
    Failed,
    Handoff,
    Hello,
    LegsWaiting,
    PeerStatus,
    PromptScored,
    Snapshot,
)
from pdserve.protocol.request_key import RequestKey
from pdserve.worker.cache_report import CacheReport
from pdserve.worker.leg_clock import LegClock
from pdserve.worker.load_meter import LoadMeter
from pdserve.worker.metrics import WorkerMetrics
from pdserve.worker.pool_phase import PoolPhase
from pdserve.worker.prefill_speed import PrefillSpeed, is_mostly_prompt

logger = logging.getLogger(__name__)

Session = tuple[str, int]
Send = Callable[[str, EventBatch], None]

ALL_ROUTERS = "*"
SNAPSHOT_PERIOD_S = 1.0
FRESH_SNAPSHOT_S = 0.1  # how soon after the last one a worker that has come to rest says so
REST_S = 1.0  # without work for so long, blocks are checked: that takes milliseconds no request should wait for
TOMBSTONE_S = 60.0
# Bytes a second. A short last chunk costs 8,192 tokens of Llama-8B on an H200 6.4 ms of prefill, and spares 0.8 GB.
FAST_LINK = 100e9
ANNOUNCE_FROM = 512  # tokens: D may read such a prompt at P's word, and joins it about 10 ms sooner under load


class WorkerLoop:
    """sender and receiver may be None: then the worker takes whole requests alone (aggregated mode). pool may be None:
    then there is none.

    send(target, batch): target is "router_id/session" or "*".
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
    ) -> None:
        self.engine = engine
        self.role = role
        self._overlap = config.overlap
        self._pool_name = pool_name
        self.stopped = False
        self._metrics = metrics
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._sender = sender
        self._receiver = receiver
        self._send = send
        usable = engine.blocks.num_usable
        self.pool = PoolPhase(engine, pool, config.pull_deadline_s) if pool else None
        self._compute_here = self.pool.compute if self.pool else engine.add
        max_pinned = int(usable * config.max_pinned_fraction)
        self.prefill = PrefillPhase(engine, sender, max_pinned, self._compute_here) if sender else None
        self.decode = (
            DecodePhase(
                engine,
                receiver,
                int(usable * config.max_reserved_fraction),
                int(usable * config.max_quarantined_fraction),
                config.pull_deadline_s,
                self._compute_here,
            )
            if receiver
            else None
        )
        self._sessions: set[Session] = set()
        self._cache = CacheReport(engine.blocks)
        self._speed = PrefillSpeed()
        self._load = LoadMeter(time.monotonic())
        self._keys: dict[Session, dict[RequestKey, LegClock]] = defaultdict(dict)
        self._device_seconds = 0.0
        self._turn_began: float | None = None  # of the last turn, when it computed a step
        self._tombstones: OrderedDict[RequestKey, tuple[float, tuple[int, ...] | None]] = OrderedDict()
        self._peers: dict[str, PeerStatus] = {}
        self._outgoing: dict[Session, list[Event]] = defaultdict(list)
        self._last_snapshot = 0.0
        self._last_busy = 0.0
        self._is_checked = True  # since the last work
        self._snapshot_is_stale = False
        self._num_steps_told = 0

    # --- commands ---

    def handle(self, command: Command) -> None:
        """Apply one command; its events go out with the next `turn`."""
        match command:
            case Submit():
                self._submit(command)
            case Prepare():
                self._prepare(command)
            case Cancel():
                self._cancel(command.key, command.choices)
            case ConnectPeer():
                self._connect(command)
            case DisconnectPeer():
                self._disconnect(command)
            case Subscribe():
                self._subscribe((command.router_id, command.session))
            case Resync():
                self._resync((command.router_id, command.session))
            case RouterLost():
                self._router_lost((command.router_id, command.session))
            case SetRole():
                self._set_role(command.role)
            case Stop():
                self.stopped = True

    def _submit(self, submit: Submit) -> None:
        key = submit.key
        session = (key.router_id, key.session)
        if session not in self._sessions or key in self._keys[session]:
            return
        cancelled = self._tombstones.pop(key, None)
        if cancelled is not None:
            choices = cancelled[1]
            starts = () if choices is None else tuple(s for s in submit.starts if s.choice not in choices)
            if not starts:
                return
            submit = msgspec.structs.replace(submit, starts=starts)
        self._keys[session][key] = LegClock(self._arrival(), [s.choice for s in submit.starts], submit.phase)
        try:
            self._start(submit)
        except ValueError as error:
            del self._keys[session][key]
            self._emit(key, Failed(request_id=key.request_id, attempt=key.attempt, kind="invalid", message=str(error)))

    def _prepare(self, prepare: Prepare) -> None:
        key = prepare.submit.key
        session = (key.router_id, key.session)
        is_over = key in self._tombstones or key in self._keys.get(session, ())
        if self.decode is not None and session in self._sessions and not is_over:
            self.decode.prepare(prepare)

    def _arrival(self) -> float:
        """When a command that is handled now came, in monotonic seconds. One that came during a step is read behind it:
        on the average it has waited for half of the turn."""
        now = time.monotonic()
        return now if self._turn_began is None else (self._turn_began + now) / 2

    def _start(self, submit: Submit) -> None:
        if submit.phase == "prefill" and self.prefill is not None:
            self.prefill.submit(submit)
        elif submit.phase == "decode" and self.decode is not None:
            self._emit_all(self.decode.submit(submit))
        elif submit.phase == "full":
            self._compute_here(self.engine.make_request(submit), submit.starts)
        else:
            raise ValueError(f'this worker has no connector: phase must be "full", not {submit.phase!r}')

    def _cancel(self, key: RequestKey, choices: tuple[int, ...] | None) -> None:
        if key not in self._keys.get((key.router_id, key.session), ()):
            self._bury(key, choices)
            if self.decode is not None:
                self.decode.cancel(key, choices)
            return
        self._count_cancelled(self._keys[key.router_id, key.session][key], choices)
        if self.pool is not None and self.pool.cancel(key, choices):
            return
        if self.decode is not None:
            self.decode.cancel(key, choices)
        if self.engine.abort(key, choices) and choices is None and self.prefill is not None:
            self.prefill.cancel(key)

    def _count_cancelled(self, clock: LegClock, choices: tuple[int, ...] | None) -> None:
        times = clock.cancel(choices, time.monotonic(), self._device_seconds)
        if times is not None:
            self._metrics.leg_done(times, clock.stages)

    def _bury(self, key: RequestKey, choices: tuple[int, ...] | None) -> None:
        now = time.monotonic()
        while self._tombstones and next(iter(self._tombstones.values()))[0] < now - TOMBSTONE_S:
            self._tombstones.popitem(last=False)
        known = self._tombstones.pop(key, None)
        if known is not None and choices is not None:
            choices = None if known[1] is None else (*known[1], *choices)
        self._tombstones[key] = now, choices

    def _connect(self, command: ConnectPeer) -> None:
        meta = command.meta
        if self._receiver is None:
            self._tell_peer(
                PeerStatus(
                    engine_id=meta.engine_id,
                    incarnation=meta.incarnation,
                    connected=False,
                    detail="this worker has no connector",
                )
            )
            return
        known = self._peers.get(meta.engine_id)
        if known is not None and known.connected and known.incarnation == meta.incarnation:
            self._tell_peer(known)
        else:
            self._receiver.connect(meta)

    def _disconnect(self, command: DisconnectPeer) -> None:
        """Told to every router: another one may still think that the pair is connected."""
        known = self._peers.get(command.engine_id)
        if known is None or known.incarnation != command.incarnation:
            return
        if self._receiver is not None:
            self._receiver.disconnect(command.engine_id, command.incarnation)
        self._tell_peer(msgspec.structs.replace(known, connected=False, detail="disconnected by a router"))
        del self._peers[command.engine_id]

    def _subscribe(self, session: Session) -> None:
        self._sessions.add(session)
        engine = self.engine
        self._outgoing[session].append(
            Hello(
                protocol=PROTOCOL_VERSION,
                role=self.role,
                model_fingerprint=engine.model_fingerprint,
                vocab_size=engine.spec.vocab_size,
                max_model_len=engine.max_model_len,
                max_request_tokens=engine.max_request_tokens,
                block_size=engine.config.block_size,
                kv_cache=self._sender.meta() if self._sender else None,
                peers=tuple(self._peers.values()),
                parts_from=min(ANNOUNCE_FROM, engine.scheduler.parts_from) if self._sender and self._overlap else 0,
                cut_below=FAST_LINK if self._overlap == "auto" else float("inf"),
                caches_prefixes=engine.blocks.enable_caching,
                kv_pool=self._pool_name if self.pool else "",
                pool_chunk=self.pool.chunk_tokens if self.pool else 0,
            )
        )
        self._outgoing[session] += [self._cache.begin(session), self.snapshot()]
        if self.pool is not None:
            self._outgoing[session].append(self.pool.report.everything())

    def _resync(self, session: Session) -> None:
        if session in self._sessions:
            self._outgoing[session].append(self._cache.begin(session))

    def _set_role(self, role: str) -> None:
        """The next flush tells every router, also when nothing changed: somebody waits for it."""
        if role != "both" and self._sender is None:
            logger.warning("no connector: %s stays %s, and does not become %s", self._worker_id, self.role, role)
        elif role != self.role:
            logger.info("%s was %s and becomes %s", self._worker_id, self.role, role)
            self.role = role
        self._last_snapshot = -math.inf

    def _router_lost(self, session: Session) -> None:
        self._sessions.discard(session)
        self._cache.forget(session)
        for key, clock in self._keys.pop(session, {}).items():
            self._count_cancelled(clock, None)
            if self.pool is not None:
                self.pool.cancel(key, None)
            if self.decode is not None:
                self.decode.cancel(key, None)
            self.engine.abort(key)
            if self.prefill is not None:
                self.prefill.cancel(key)
        if self.decode is not None:
            self.decode.cancel_prepared(*session)
        self._outgoing.pop(session, None)

    # --- the turn ---

    def turn(self) -> float:
        """Advance everything once and send what happened; returns how many seconds it may sleep now."""
        began = time.monotonic()
        self._poll_phases()
        busy = self.engine.has_work
        result = self._step() if busy else None
        stepped = result is not None
        if stepped:
            self._poll_phases()  # what came in meanwhile leaves with this step's events, not a step later
        prompts = result is not None and is_mostly_prompt(result.num_rows, result.num_sequences)
        self._load.turned(began, time.monotonic(), stepped, prompts)
        self._check_at_rest(busy)
        self._turn_began = began if stepped else None
        self._forget_finished()
        self._flush()
        if stepped or self._cache.has_parts:
            return 0.0
        polls = busy or (self.decode and self.decode.waits_for_blocks)
        return 0.002 if polls else max(0.0, min(self._next_snapshot(), self._cache.due()) - time.monotonic())

    def _check_at_rest(self, busy: bool) -> None:
        now = time.monotonic()
        if busy:
            self._last_busy, self._is_checked = now, False
        elif not self._is_checked and now >= self._last_busy + REST_S:
            self._is_checked = True
            self.check_integrity()

    def check_integrity(self) -> None:
        """AssertionError when blocks are lost or owned twice."""
        phases = [phase for phase in (self.decode, self.pool) if phase is not None]
        self.engine.check_integrity([blocks for phase in phases for blocks in phase.owned])

    def snapshot(self) -> Snapshot:
        engine, scheduler = self.engine, self.engine.scheduler
        return Snapshot(
            role=self.role,
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            queue_tokens=scheduler.num_queued_tokens(),
            free_blocks=engine.blocks.num_free,
            total_blocks=engine.blocks.num_usable,
            pinned_blocks=self.prefill.num_pinned_blocks if self.prefill else 0,
            quarantined_blocks=engine.blocks.num_quarantined,
            metrics=self._metrics.families(),
            cache_number=self._cache.number,
            prefill_tokens_per_s=self._speed.tokens_per_s,
            busy=self._load.busy(time.monotonic()),
            token_interval_s=self._load.token_interval_s if scheduler.running else 0.0,
        )

    def _step(self) -> StepResult | None:
        """None: nothing was computed."""
        began = time.monotonic()
        result = self.engine.step()
        self._note_admitted(began)
        if not result.num_rows:
            return None
        seconds = result.device_seconds or result.host_seconds  # on CPU the host is the device
        self._device_seconds += seconds
        self._metrics.step_seconds.observe(seconds)
        self._speed.observe(result.num_rows, result.num_sequences, seconds)
        self._emit_all(result.events)
        self._snapshot_is_stale = True
        if self.prefill is not None:
            self._emit_all(self.prefill.on_step(result))
        if self.pool is not None:
            self.pool.on_step(result)
        return result

    def _note_admitted(self, now: float) -> None:
        """Requests whose first rows went into a step."""
        admitted = self.engine.scheduler.admitted
        while admitted:
            key = admitted.popleft()
            clock = self._keys.get((key.router_id, key.session), {}).get(key)
            if clock is not None:
                clock.planned(now, self._device_seconds)

    def _poll_phases(self) -> None:
        if self.pool is not None:
            self._emit_all(self.pool.poll())
        if self.prefill is not None:
            self.prefill.poll()
        if self.decode is not None:
            events, peers = self.decode.poll()
            self._emit_all(events)
            for status in peers:
                self._tell_peer(status)

    def _tell_peer(self, status: PeerStatus) -> None:
        known = self._peers.get(status.engine_id)
        if known is None or status.incarnation >= known.incarnation:
            self._peers[status.engine_id] = status
        for session in self._sessions:
            self._outgoing[session].append(status)

    def _emit_all(self, events: list[tuple[RequestKey, Event]]) -> None:
        for key, event in events:
            self._emit(key, event)

    def _emit(self, key: RequestKey, event: Event) -> None:
        is_large = False
        if isinstance(event, Arrived):
            self._metrics.arrived(event)
        elif isinstance(event, Handoff):
            self._metrics.handoffs.inc()
        elif isinstance(event, PromptScored):
            is_large = event.logprobs is not None
            event = self._timed(key, event)
        elif isinstance(event, Delta) and (event.finish_reason or not event.position):
            event = self._timed(key, event)
        session = (key.router_id, key.session)
        if session in self._sessions:
            self._outgoing[session].append(event)
            if is_large:
                self._send_outgoing(session, self._outgoing.pop(session))

    def _timed(self, key: RequestKey, event: Delta | PromptScored) -> Event:
        """The event, with the leg's times when it is the last of a choice."""
        clock = self._keys.get((key.router_id, key.session), {}).get(key)
        times = clock.see(event, time.monotonic(), self._device_seconds) if clock is not None else None
        if clock is None or times is None:
            return event
        if clock.done:
            self._metrics.leg_done(times, clock.stages)
        return msgspec.structs.replace(event, times=times)

    def _flush(self) -> None:
        now = time.monotonic()
        part = self._cache.next_part()
        if part is not None:
            self._outgoing[part[0]].append(part[1])
        is_due = now >= self._next_snapshot()
        if is_due:
            self._tell_waiting()
        for session, events in self._outgoing.items():
            self._send_outgoing(session, events)
        self._outgoing.clear()
        for change in self._cache.changes(now, bool(self._sessions)):
            self._send_to(ALL_ROUTERS, [change])
        if not is_due:
            return
        self._last_snapshot = now
        self._snapshot_is_stale = False
        if self._sessions:
            pooled = self.pool.report.changes() if self.pool is not None else None
            self._send_to(ALL_ROUTERS, [self.snapshot(), *([pooled] if pooled is not None else [])])

    def _tell_waiting(self) -> None:
        """Routers measure how long a leg says nothing: tell each of them which of its legs wait."""
        phases = [phase for phase in (self.decode, self.pool) if phase is not None]
        kept: set[RequestKey] = set().union(*(phase.keys() for phase in phases))  # within deadlines of their own
        goes_on = self.engine.stats.num_steps > self._num_steps_told
        self._num_steps_told = self.engine.stats.num_steps
        for session, clocks in self._keys.items():
            legs = tuple(
                (key.request_id, key.attempt)
                for key, clock in clocks.items()
                if key in kept or self._is_in_order(key, clock, goes_on)
            )
            if legs:
                self._outgoing[session].append(LegsWaiting(legs=legs))

    def _is_in_order(self, key: RequestKey, clock: LegClock, goes_on: bool) -> bool:
        """Whether a leg at the engine waits in a queue that moves, or its prompt got further than it ever was."""
        if self.engine.waits(key):
            return goes_on
        return clock.advanced(self.engine.num_prompt_rows(key))

    def _next_snapshot(self) -> float:
        """Monotonic seconds. Once a second; soon when the work is done, so that what clients look at next is true."""
        rests = self._snapshot_is_stale and not self.engine.has_work
        return self._last_snapshot + (FRESH_SNAPSHOT_S if rests else SNAPSHOT_PERIOD_S)

    def _send_outgoing(self, session: Session, events: list[Event]) -> None:
        self._send_to(f"{session[0]}/{session[1]}", events)

    def _send_to(self, target: str, events: list[Event]) -> None:
        batch = EventBatch(worker_id=self._worker_id, incarnation=self._incarnation, events=tuple(events))
        self._send(target, batch)

    def _forget_finished(self) -> None:
        """Keys of requests that neither the engine nor a phase holds any more."""
        phases = [phase for phase in (self.prefill, self.decode, self.pool) if phase is not None]
        kept: set[RequestKey] = set().union(*(phase.keys() for phase in phases))
        for keys in self._keys.values():
            for key in [key for key in keys if key not in kept and not self.engine.knows(key)]:
                del keys[key]
