"""All workers this router sees: who is here, which legs they have, and how they come and go.

    join -> (Hello) in the fleet -> leave: draining, gone when its last leg ends, or drain_s later
                                 -> lost: stream ended, broken, or silent (sooner, if it left)
            (in both cases the legs that it still has are told)

    leg: sent -> waits (its worker says so, once a second) -> works: events -> ended
           '-------------'---------------------------------------'--> silent: its worker lives, but
                                                                      said nothing of it

The parts: `streams` reads, `intake` sorts what was read, `sends` writes, `watch` looks at the
clock, `changes` knows who waits for better times. Knows no tokens and no policies. A lost worker is
forgotten; whoever watches the running set (`cluster/`) calls `join` again for every running worker,
as often as it likes. One object a router process, used from its event loop only.
"""

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Literal
from weakref import WeakValueDictionary

from pdserve.protocol.commands import Cancel, Command, Prepare, Submit
from pdserve.protocol.events import Hello
from pdserve.protocol.request_key import RequestKey
from pdserve.router.fleet.changes import Changes
from pdserve.router.fleet.inbox import Inbox, Lost, Silent
from pdserve.router.fleet.intake import Intake
from pdserve.router.fleet.link import WorkerLink
from pdserve.router.fleet.peers import Introducer
from pdserve.router.fleet.prefix_index import PooledChunks
from pdserve.router.fleet.sends import Sends
from pdserve.router.fleet.streams import WorkerStreams
from pdserve.router.fleet.wakes import Wakes
from pdserve.router.fleet.watch import Watch
from pdserve.router.fleet.worker_state import Leg, WorkerState

logger = logging.getLogger(__name__)

# Routers hear at slightly different times that a worker leaves: so much after drain_s none has legs
# there.
DRAIN_SLACK_S = 5.0


class Fleet:
    def __init__(
        self,
        worker_silence_s: float = 15.0,
        drain_s: float = 60.0,
        attempt_deadline_s: float = 300.0,
        now: Callable[[], float] = time.monotonic,
        router_id: str | None = None,
    ) -> None:
        """worker_silence_s: a worker that pushes nothing for so long is lost. drain_s: so long may
        the legs of a worker that leaves go on there. attempt_deadline_s: a leg that neither waits
        nor has events for so long at a living worker is told that it is Silent. router_id: None:
        one that no other process has, nor had."""
        own = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.router_id = router_id or own
        self._drain_s = drain_s
        self._now = now
        self.is_closed = False  # nobody joins any more
        self._workers: dict[str, WorkerState] = {}
        # The KV pools by name; each is kept as long as a worker uses it.
        self._pools: WeakValueDictionary[str, PooledChunks] = WeakValueDictionary()
        self._wakes = Wakes()
        self.introducer = introducer = Introducer(self.post, now)
        self.changes = Changes(self._wakes)
        self.intake = Intake(
            self.router_id, introducer, self.changes, self.post, self._introduce, now
        )
        self._sends = Sends(self._lose, self.intake.route)
        self._streams = WorkerStreams(self.router_id, self._enter, self.intake.take, self._forget)
        self.watch = Watch(
            self._workers,
            introducer,
            lose=self._lose,
            move_legs=self._move_legs,
            tell=self._tell,
            silence_s=worker_silence_s,
            drain_s=drain_s,
            deadline_s=attempt_deadline_s,
            now=now,
        )

    @property
    def workers(self) -> list[WorkerState]:
        """Workers that have said Hello, draining ones too."""
        return list(self._workers.values())

    @property
    def worker_ids(self) -> set[str]:
        """All that joined and did not leave or get lost, also those whose Hello is still
        awaited."""
        return self._streams.worker_ids

    @property
    def decode_workers(self) -> list[WorkerState]:
        return [
            worker for worker in self._workers.values() if worker.can_decode and not worker.draining
        ]

    @property
    def embedding_workers(self) -> list[WorkerState]:
        """Those that compute prompts; all that decode where there are none."""
        staying = [worker for worker in self._workers.values() if not worker.draining]
        return [worker for worker in staying if worker.can_prefill] or self.decode_workers

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
        """Done soon after the fleet has changed next. Of many who wait for it, a few go on in each
        turn of the loop."""
        return self.changes.next()

    def join(self, link: WorkerLink) -> None:
        """Open the worker's event stream. Does nothing for a worker that is here, but that a drain
        is called off."""
        self.watch.start()
        if link.worker_id not in self._streams:
            self._streams.open(link)
        elif link.worker_id in self._workers:
            self._workers[link.worker_id].left_at = None
            self.introducer.changed()

    def leave(self, worker_id: str) -> None:
        """The worker shall stop: send it nothing new, let its legs end, for drain_s, then close its
        stream."""
        worker = self._workers.get(worker_id)
        if worker is None:
            self._streams.close(worker_id)
            self.introducer.left(worker_id, self._workers.values())
            self._streams.forgive(worker_id)
        elif not worker.draining:
            worker.left_at = self._now()
            self.changes.notify()
            self._retire_when_idle(worker)

    async def close(self) -> None:
        """Deliver what is on its way (a second at most), then close all streams; the workers abort
        what is left."""
        self.is_closed = True
        self.changes.notify()
        if on_their_way := self._sends.tasks | self._streams.closing:
            await asyncio.wait(on_their_way, timeout=1.0)
        for worker in self.workers:
            self._forget(worker, "the router stops")
        await self._wakes.until_done()
        tasks = [*self._streams.tasks, *self._sends.tasks, *self.watch.release()]
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
        """Open a leg and send its Submit, or its Prepare, in the background; a failure arrives in
        the inbox as Lost."""
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
        leg.prepared = False
        leg.pending = {start.choice for start in submit.starts}
        leg.last_sign = self._now()
        self.post(leg.worker, submit)

    def unload(self, leg: Leg) -> None:
        """The leg no longer costs its worker compute."""
        leg.worker.outstanding_tokens -= leg.tokens
        leg.tokens = 0

    def end(self, leg: Leg, cancel: bool) -> None:
        """Forget a leg; later events of it are dropped. cancel: the worker may still hold something
        for it. Idempotent."""
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
        self._sends.post(worker, command)

    def _enter(self, link: WorkerLink, session: int, incarnation: int, hello: Hello) -> WorkerState:
        worker = WorkerState(link, session, hello, incarnation, self._now())
        if hello.kv_pool:
            worker.pooled = self._pools.setdefault(hello.kv_pool, PooledChunks())
        worker.peers = {(peer.engine_id, peer.incarnation): peer for peer in hello.peers}
        self._workers[link.worker_id] = worker
        self.introducer.joined(worker, self._workers.values())
        self.changes.notify()
        return worker

    def _introduce(self) -> None:
        self.introducer.changed()
        self.introducer.introduce(self._workers.values())
        self.changes.notify()

    def _tell(self, leg: Leg, event: Lost | Silent) -> None:
        """Something that may be told to thousands of legs at once, and makes each of them choose
        anew."""
        self._wakes.later(partial(leg.inbox.put, leg, event))

    def _lose(self, worker: WorkerState, reason: str) -> None:
        if self._workers.get(worker.worker_id) is worker:
            logger.warning("worker %s %s", worker.worker_id, reason)
            self._forget(worker, reason)
            self._streams.close(worker.worker_id)

    def _move_legs(self, worker: WorkerState) -> None:
        """It has had its time to finish: what is left goes on elsewhere, before somebody kills
        it."""
        logger.info("worker %s leaves: moving %d legs", worker.worker_id, len(worker.legs))
        self._forget(worker, f"it leaves, and was not done within {self._drain_s:g} s", "drained")
        self._streams.close(worker.worker_id)

    def _forget(
        self, worker: WorkerState, reason: str, cause: Literal["lost", "drained"] = "lost"
    ) -> None:
        if self._workers.get(worker.worker_id) is not worker:
            return
        del self._workers[worker.worker_id]
        legs = list(worker.legs.values())
        worker.legs = {}
        for leg in legs:
            self._tell(leg, Lost(reason, cause))
        self.introducer.lost(worker, self._workers.values())
        if worker.left_at is not None and cause == "drained":
            self.introducer.drained(
                worker.worker_id, worker.left_at + self._drain_s + DRAIN_SLACK_S
            )
        elif worker.draining:
            self.introducer.left(worker.worker_id, self._workers.values())
        self.changes.notify()

    def _retire_when_idle(self, worker: WorkerState) -> None:
        if (
            worker.draining
            and not worker.legs
            and not worker.num_expected
            and self._workers.get(worker.worker_id) is worker
        ):
            self._forget(worker, "it leaves, and is done", "drained")
            self._sends.spawn(self._close_after_sends(worker))

    async def _close_after_sends(self, worker: WorkerState) -> None:
        """Let the last Cancels go out before the stream closes (closing it would abort the same,
        but not as exactly)."""
        await asyncio.sleep(0)
        self._streams.close(worker.worker_id)
