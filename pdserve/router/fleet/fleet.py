"""All workers this router sees: one reader a worker over its event stream, their states, and the commands to them.

    join -> (Hello) in the fleet -> leave: draining, gone when its last leg ends, or drain_s later: its legs are told
                                 -> lost: stream ended, broken, or silent (sooner, if it left); its legs are told

    leg: sent -> waits (its worker says so, once a second) -> works: events -> ended
           '-------------'---------------------------------------'--> silent: its worker lives, but said nothing of it

Knows no tokens and no policies. A lost worker is forgotten; whoever watches the running set (`cluster/`) calls `join`
again for every running worker, as often as it likes. One object a router process, used from its event loop only.
"""

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Literal
from weakref import WeakValueDictionary

import msgspec

from pdserve.background.tasks import keep, once
from pdserve.protocol.codec import PROTOCOL_VERSION, decode_routed
from pdserve.protocol.commands import Cancel, Command, Prepare, Resync, Submit
from pdserve.protocol.events import (
    CacheChange,
    CacheState,
    Delta,
    Failed,
    Hello,
    LegsWaiting,
    PeerStatus,
    PoolChange,
    RoutedBatch,
    RoutedEvent,
    Snapshot,
)
from pdserve.protocol.request_key import RequestKey
from pdserve.router.fleet.inbox import Inbox, Lost, Silent
from pdserve.router.fleet.link import WorkerLink, WorkerLost
from pdserve.router.fleet.peers import Introducer
from pdserve.router.fleet.prefix_index import PooledChunks
from pdserve.router.fleet.wakes import Wakes
from pdserve.router.fleet.worker_state import Leg, WorkerState

logger = logging.getLogger(__name__)

TICK_S = 0.5
EVENTS_AT_ONCE = 64  # of a worker, in one turn of the event loop
EVENT_BYTES = 4096  # more than nearly all events have: so much of a large one takes as long as one more

# Workers push once a second. Of one that has left the running set, silence says that it did not leave but is dead: its
# node may have vanished without closing a connection.
LEFT_SILENCE_S = 3.0

# Routers hear at slightly different times that a worker leaves: so much after drain_s none has legs there.
DRAIN_SLACK_S = 5.0


class Fleet:
    def __init__(
        self,
        worker_silence_s: float = 15.0,
        router_id: str | None = None,
        drain_s: float = 60.0,
        attempt_deadline_s: float = 300.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """worker_silence_s: a worker that pushes nothing for so long is lost. router_id: unique per process by
        default. drain_s: so long may the legs of a worker that leaves go on there. attempt_deadline_s: a leg that
        neither waits nor has events for so long at a living worker is told that it is Silent."""
        self.router_id = router_id or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.num_stale_events = 0
        self.num_resyncs = 0
        self._silence_s = worker_silence_s
        self._drain_s = drain_s
        self._deadline_s = attempt_deadline_s
        self._now = now
        self._looked_at = now()
        self._workers: dict[str, WorkerState] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._session = 0
        self._unready: set[str] = set()
        self._introducer = Introducer(self.post, now)
        self._wakes = Wakes()
        self._awaiting: dict[asyncio.Future[None], None] = {}  # in order: done with the fleet's next change
        self._pools: WeakValueDictionary[str, PooledChunks] = WeakValueDictionary()  # by name, while a worker uses it

    @property
    def workers(self) -> list[WorkerState]:
        """Workers that have said Hello, draining ones too."""
        return list(self._workers.values())

    @property
    def worker_ids(self) -> set[str]:
        """All that joined and did not leave or get lost, also those whose Hello is still awaited."""
        return set(self._readers)

    @property
    def decode_workers(self) -> list[WorkerState]:
        return [worker for worker in self._workers.values() if worker.can_decode and not worker.draining]

    async def until_decode_worker(self, timeout_s: float) -> bool:
        """Wait until requests can be placed, at most so long. Whether they can."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.decode_workers:
                    await self.change()
        except TimeoutError:
            return False
        return True

    def change(self) -> asyncio.Future[None]:
        """Done soon after the fleet has changed next. Of many who wait for it, a few go on in each turn of the loop."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaiting[waiter] = None
        waiter.add_done_callback(self._no_longer_awaiting)
        return waiter

    def _no_longer_awaiting(self, waiter: asyncio.Future[None]) -> None:
        self._awaiting.pop(waiter, None)

    def join(self, link: WorkerLink) -> None:
        """Open the worker's event stream. Does nothing for a worker that is here, but that a drain is called off."""
        if self._ticker is None:
            self._ticker = keep("fleet tick", self._tick)
        if link.worker_id not in self._readers:
            self._readers[link.worker_id] = once("worker stream", self._read(link))
        elif link.worker_id in self._workers:
            self._workers[link.worker_id].left_at = None

    def leave(self, worker_id: str) -> None:
        """The worker shall stop: send it nothing new, let its legs end, for drain_s, then close its stream."""
        worker = self._workers.get(worker_id)
        if worker is None:
            self._close_stream(worker_id)
            self._introducer.left(worker_id, self._workers.values())
            self._unready.discard(worker_id)
        elif not worker.draining:
            worker.left_at = self._now()
            self._notify()
            self._retire_when_idle(worker)

    async def close(self) -> None:
        """Deliver what is on its way (a second at most), then close all streams; the workers abort what is left."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        for worker in self.workers:
            self._forget(worker, "the router stops")
        await self._wakes.until_done()
        tasks = [*self._readers.values(), *self._tasks, *([self._ticker] if self._ticker is not None else [])]
        self._ticker = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def submit(
        self,
        worker: WorkerState,
        request_id: str,
        attempt: int,
        inbox: Inbox[Leg],
        tokens: int,
        make_command: Callable[[RequestKey], Submit | Prepare],
    ) -> Leg:
        """Open a leg and send its Submit, or its Prepare, in the background; a failure arrives in the inbox as Lost."""
        key = RequestKey(self.router_id, worker.session, request_id, attempt)
        command = make_command(key)
        is_prepared = isinstance(command, Prepare)
        starts = command.submit.starts if isinstance(command, Prepare) else command.starts
        choices = {start.choice for start in starts}
        leg = Leg(key, worker, inbox, tokens, choices, self._now(), prepared=is_prepared)
        if self._workers.get(worker.worker_id) is not worker:
            inbox.put(leg, Lost("the worker is gone"))
            return leg
        worker.legs[request_id, attempt] = leg
        worker.outstanding_tokens += tokens
        self.post(worker, command)
        return leg

    def submit_prepared(self, leg: Leg, submit: Submit) -> None:
        """Send the Submit of a leg that was prepared."""
        leg.prepared, leg.pending = False, {start.choice for start in submit.starts}
        leg.last_sign = self._now()
        self.post(leg.worker, submit)

    def unload(self, leg: Leg) -> None:
        """The leg no longer costs its worker compute."""
        leg.worker.outstanding_tokens -= leg.tokens
        leg.tokens = 0

    def end(self, leg: Leg, cancel: bool) -> None:
        """Forget a leg; later events of it are dropped. cancel: the worker may still hold something for it.
        Idempotent."""
        if leg.worker.legs.pop((leg.key.request_id, leg.key.attempt), None) is None:
            return
        self.unload(leg)
        if cancel:
            self.post(leg.worker, Cancel(key=leg.key))
        self._retire_when_idle(leg.worker)

    def expect_leg(self, worker: WorkerState) -> None:
        """A leg will follow: until `unexpect_leg` the worker is kept as if it had it."""
        worker.num_expected += 1

    def unexpect_leg(self, worker: WorkerState) -> None:
        worker.num_expected -= 1
        self._retire_when_idle(worker)

    def post(self, worker: WorkerState, command: Command) -> None:
        """Send in the background: callers that are being cancelled can still say goodbye."""
        self._spawn(self._deliver(worker, command))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = once("fleet send", work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(self, worker: WorkerState, command: Command) -> None:
        try:
            await worker.link.send(command)
        except WorkerLost as error:
            self._lose(worker, f"cannot be reached: {error}")
        except Exception as error:  # of this command, not of the worker: one that is too large must not cost workers
            named = f" of {command.key.request_id}" if isinstance(command, Submit | Cancel) else ""
            logger.exception("sending %s%s to worker %s failed", type(command).__name__, named, worker.worker_id)
            if isinstance(command, Submit):
                kind: Literal["invalid", "internal"] = "invalid" if isinstance(error, ValueError) else "internal"
                request_id, attempt = command.key.request_id, command.key.attempt
                self._route(worker, Failed(request_id=request_id, attempt=attempt, kind=kind, message=str(error)))

    async def _read(self, link: WorkerLink) -> None:
        """The life of one stream. However it ends, the worker's legs are told."""
        self._session = max(self._session + 1, time.time_ns())
        session, worker, reason = self._session, None, "its event stream ended"
        taken = 0  # events in this turn of the loop: a stream may have many messages ready at once
        stream = link.events(self.router_id, session)
        try:
            async for data in stream:
                batch = decode_routed(data)
                taken += len(data) // EVENT_BYTES
                if worker is None:
                    worker = self._enter(link, session, batch)
                if batch.incarnation != worker.incarnation:
                    raise _ProtocolError("its engine was restarted within the stream")
                for start in range(0, len(batch.events), EVENTS_AT_ONCE):
                    part = batch.events[start : start + EVENTS_AT_ONCE]
                    taken += len(part)
                    if taken > EVENTS_AT_ONCE:
                        await asyncio.sleep(0)  # each event wakes a request
                        taken = len(part)
                    self._take(worker, part)
        except WorkerLost as error:
            reason = f"lost: {error}"
        except (msgspec.DecodeError, _ProtocolError) as error:
            reason = f"sent what this router does not understand: {error}"
        except Exception as error:
            logger.exception("reading from worker %s failed", link.worker_id)
            reason = f"reading from it failed: {error!r}"
        finally:
            if self._readers.get(link.worker_id) is asyncio.current_task():
                del self._readers[link.worker_id]
                self._report(link.worker_id, worker is not None, reason)
            try:
                if worker is not None:
                    self._forget(worker, reason)
            finally:
                aclose = getattr(stream, "aclose", None)
                if aclose is not None:
                    await aclose()

    def _report(self, worker_id: str, was_ready: bool, reason: str) -> None:
        """Once, for a worker that is joined again and again without ever saying Hello."""
        level = logging.DEBUG if worker_id in self._unready and not was_ready else logging.WARNING
        logger.log(level, "worker %s left: %s", worker_id, reason)
        self._unready.add(worker_id)

    def _enter(self, link: WorkerLink, session: int, batch: RoutedBatch) -> WorkerState:
        hello = next((event for event in batch.events if isinstance(event, Hello)), None)
        if hello is None:
            raise _ProtocolError("the first batch holds no Hello")
        if hello.protocol != PROTOCOL_VERSION:
            raise _ProtocolError(f"it speaks protocol {hello.protocol}, this router {PROTOCOL_VERSION}")
        worker = WorkerState(link, session, hello, batch.incarnation, self._now())
        if hello.kv_pool:
            worker.pooled = self._pools.setdefault(hello.kv_pool, PooledChunks())
        worker.peers = {(peer.engine_id, peer.incarnation): peer for peer in hello.peers}
        self._workers[link.worker_id] = worker
        self._unready.discard(link.worker_id)
        self._introducer.joined(worker, self._workers.values())
        self._notify()
        return worker

    def _take(self, worker: WorkerState, events: Sequence[RoutedEvent]) -> None:
        worker.last_seen = self._now()
        for event in events:
            if isinstance(event, Delta):  # first: nearly all events are
                self._route(worker, event)
            elif isinstance(event, LegsWaiting):
                self._wait_on(worker, event)
            elif isinstance(event, Snapshot):
                self._update(worker, event)
            elif isinstance(event, PeerStatus):
                worker.peers[event.engine_id, event.incarnation] = event
                self._introducer.reported(worker, event)
                self._notify()
            elif isinstance(event, CacheChange):
                worker.cached.changed(event)
                self._keep_whole(worker, None)
            elif isinstance(event, CacheState):
                worker.cached.filled(event, worker.last_seen)
            elif isinstance(event, PoolChange):
                if worker.pooled is not None:
                    worker.pooled.changed(event)
            elif not isinstance(event, Hello):
                self._route(worker, event)

    def _route(self, worker: WorkerState, event: Any) -> None:
        leg = worker.legs.get((event.request_id, event.attempt))
        if leg is None:
            self.num_stale_events += 1
        else:
            leg.last_sign = worker.last_seen
            leg.inbox.put(leg, event)

    def _wait_on(self, worker: WorkerState, waiting: LegsWaiting) -> None:
        for name in waiting.legs:
            leg = worker.legs.get(name)
            if leg is not None:
                leg.last_sign = worker.last_seen

    def _update(self, worker: WorkerState, snapshot: Snapshot) -> None:
        role, worker.snapshot, worker.reported_at = worker.role, snapshot, worker.last_seen
        worker.queue.reported(snapshot.queue_tokens, worker.last_seen)
        worker.num_others = max(0, snapshot.num_running + snapshot.num_waiting - len(worker.legs))
        self._keep_whole(worker, snapshot.cache_number)
        if snapshot.role != role:
            self._introduce()

    def _keep_whole(self, worker: WorkerState, cache_number: int | None) -> None:
        """Ask for the whole cache state again when what came of it has a gap."""
        if worker.cached.wants_resync(cache_number, worker.last_seen):
            self.num_resyncs += 1
            logger.info("asking worker %s for the state of its prefix cache", worker.worker_id)
            self.post(worker, Resync(router_id=self.router_id, session=worker.session))

    def _introduce(self) -> None:
        self._introducer.introduce(self._workers.values())
        self._notify()

    def _notify(self) -> None:
        """Wake who waits for a better fleet."""
        for waiter in self._awaiting:
            self._wakes.later(partial(_wake, waiter))
        self._awaiting.clear()

    def _tell(self, leg: Leg, event: Lost | Silent) -> None:
        """Something that may be told to thousands of legs at once, and makes each of them choose anew."""
        self._wakes.later(partial(leg.inbox.put, leg, event))

    def _lose(self, worker: WorkerState, reason: str) -> None:
        if self._workers.get(worker.worker_id) is worker:
            logger.warning("worker %s %s", worker.worker_id, reason)
            self._forget(worker, reason)
            self._close_stream(worker.worker_id)

    def _move_legs(self, worker: WorkerState) -> None:
        """It has had its time to finish: what is left goes on elsewhere, before somebody kills it."""
        logger.info("worker %s leaves: moving %d legs", worker.worker_id, len(worker.legs))
        self._forget(worker, f"it leaves, and was not done within {self._drain_s:g} s", "drained")
        self._close_stream(worker.worker_id)

    def _forget(self, worker: WorkerState, reason: str, cause: Literal["lost", "drained"] = "lost") -> None:
        if self._workers.get(worker.worker_id) is not worker:
            return
        del self._workers[worker.worker_id]
        legs, worker.legs = list(worker.legs.values()), {}
        for leg in legs:
            self._tell(leg, Lost(reason, cause))
        self._introducer.lost(worker, self._workers.values())
        if worker.left_at is not None and cause == "drained":
            self._introducer.drained(worker.worker_id, worker.left_at + self._drain_s + DRAIN_SLACK_S)
        elif worker.draining:
            self._introducer.left(worker.worker_id, self._workers.values())
        self._notify()

    def _close_stream(self, worker_id: str) -> None:
        reader = self._readers.pop(worker_id, None)
        if reader is not None:
            reader.cancel()
            self._tasks.add(reader)
            reader.add_done_callback(self._tasks.discard)

    def _retire_when_idle(self, worker: WorkerState) -> None:
        if (
            worker.draining
            and not worker.legs
            and not worker.num_expected
            and self._workers.get(worker.worker_id) is worker
        ):
            self._forget(worker, "it leaves, and is done", "drained")
            self._spawn(self._close_after_sends(worker))

    async def _close_after_sends(self, worker: WorkerState) -> None:
        """Let the last Cancels go out before the stream closes (closing it would abort the same, but not as
        exactly)."""
        await asyncio.sleep(0)
        self._close_stream(worker.worker_id)

    @property
    def _period_s(self) -> float:
        return min(TICK_S, self._silence_s / 4, self._deadline_s / 4)

    async def _tick(self) -> None:
        self._looked_at = self._now()
        while True:
            await asyncio.sleep(self._period_s)
            self.look()

    def look(self) -> None:
        """What time alone brings: silent workers and legs, drains that are over, pairs to be asked again. Called by the
        tick."""
        now = self._now()
        late_s = now - self._looked_at - self._period_s
        self._looked_at = now
        if late_s > self._period_s:
            self._excuse(late_s, now)
        for worker in self.workers:
            limit = min(self._silence_s, LEFT_SILENCE_S) if worker.draining else self._silence_s
            if now - worker.last_seen > limit:
                self._lose(worker, f"pushed nothing for {limit:g} s")
            elif worker.left_at is not None and now - worker.left_at > self._drain_s:
                self._move_legs(worker)
            else:
                self._end_silent_legs(worker)
        self._introducer.introduce(self._workers.values())
        self._introducer.disconnect_drained(self._workers.values())

    def _excuse(self, late_s: float, now: float) -> None:
        """This process stood still, and nobody can be blamed for what it has not read yet."""
        logger.warning("this router stood still for %.1f s: workers and their legs have as much more time", late_s)
        for worker in self.workers:
            worker.last_seen = min(now, worker.last_seen + late_s)
            for leg in worker.legs.values():
                leg.last_sign = min(now, leg.last_sign + late_s)

    def _end_silent_legs(self, worker: WorkerState) -> None:
        """Those of which the worker, when it last reported, had said nothing for the deadline. One that was handed off
        or only prepared need not say anything."""
        for leg in worker.legs.values():
            if worker.reported_at - leg.last_sign > self._deadline_s and not (leg.handed_off or leg.prepared):
                leg.last_sign = worker.last_seen  # said once per deadline
                self._tell(leg, Silent(self._deadline_s))


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():  # it may have been cancelled meanwhile
        waiter.set_result(None)


class _ProtocolError(Exception):
    """The worker's messages cannot be understood."""
