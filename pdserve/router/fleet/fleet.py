"""All workers that this router sees: which are here, which legs they have, how they come and go.

    join -> (Hello) in the fleet -> leave: draining, gone when its last leg ends, or drain_s later
                                 -> lost: stream ended, broken, or silent (sooner, if it left)
            (in both cases the legs that it still has are told)

    leg: sent -> waits (its worker says so at once, and once a second) -> works: events -> ended
           '-------------'------------------------------------------------'--> silent: its worker
                                                   lives, but reported nothing of the leg

The parts: `streams` reads events, `intake` sorts them, `sends` writes commands, `watch` looks at
the clock, and `changes` wakes those who wait for a change. Knows no tokens and no policies. A lost
worker is forgotten. Whoever watches the running set (`cluster`) calls `join` again for every
running worker, as often as it likes. Each router process has one `Fleet`, for its event loop only.
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

# Routers hear at slightly different times that a worker leaves. This long after drain_s, none of
# them has legs there.
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
        """Creates an empty fleet.

        A worker that pushes nothing for `worker_silence_s` is lost. The legs of a worker that
        leaves may go on there for `drain_s`. A leg that neither waits nor has events for
        `attempt_deadline_s` at a living worker receives Silent. If `router_id` is None, a new one
        is made that no other process has or had.
        """
        own = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.router_id = router_id or own
        self._drain_s = drain_s
        self._now = now
        self.is_closed = False  # once True, no worker joins any more
        self._workers: dict[str, WorkerState] = {}
        # The KV pools by name; each is kept while a worker uses it.
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
        """Workers that have said Hello, including draining ones."""
        return list(self._workers.values())

    @property
    def worker_ids(self) -> set[str]:
        """Ids of all workers that joined and neither left nor got lost, with or without a Hello."""
        return self._streams.worker_ids

    @property
    def decode_workers(self) -> list[WorkerState]:
        """Workers that decode and are not draining."""
        return [
            worker for worker in self._workers.values() if worker.can_decode and not worker.draining
        ]

    @property
    def embedding_workers(self) -> list[WorkerState]:
        """Workers that compute prompts; if there are none, workers that decode."""
        staying = [worker for worker in self._workers.values() if not worker.draining]
        return [worker for worker in staying if worker.can_prefill] or self.decode_workers

    async def until_decode_worker(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` until requests can be placed. True if they can."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.decode_workers:
                    await self.change()
        except TimeoutError:
            return False
        return True

    def change(self) -> asyncio.Future[None]:
        """Returns a future that is done soon after the fleet's next change.

        If many wait for it, only a few go on in each turn of the loop.
        """
        return self.changes.next()

    def join(self, link: WorkerLink) -> None:
        """Opens the worker's event stream.

        If the worker is here already, this only ends its drain, if there is one.
        """
        self.watch.start()
        if link.worker_id not in self._streams:
            self._streams.open(link)
        elif link.worker_id in self._workers:
            self._workers[link.worker_id].left_at = None
            self.introducer.changed()

    def leave(self, worker_id: str) -> None:
        """Starts to drain a worker that should stop.

        It gets nothing new, its legs may go on for drain_s, and then its stream is closed.
        """
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
        """Delivers what is on its way (for a second at most), then closes all streams.

        The workers abort whatever is left.
        """
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
        """Opens a leg and sends its Submit or Prepare in the background.

        If that fails, the inbox gets Lost.
        """
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
        """Sends the Submit of a leg that was prepared."""
        leg.prepared = False
        leg.pending = {start.choice for start in submit.starts}
        leg.last_sign = self._now()
        self.post(leg.worker, submit)

    def unload(self, leg: Leg) -> None:
        """Notes that the leg no longer costs its worker any compute."""
        leg.worker.outstanding_tokens -= leg.tokens
        leg.tokens = 0

    def end(self, leg: Leg, cancel: bool) -> None:
        """Forgets a leg; its later events are dropped. Idempotent.

        `cancel` sends a Cancel, because the worker may still hold something for the leg.
        """
        if leg.worker.legs.pop(leg.key.leg, None) is None:
            return
        leg.worker.queue.ended(leg.key.leg)
        self.unload(leg)
        if cancel:
            self.post(leg.worker, Cancel(key=leg.key))
        self._retire_when_idle(leg.worker)

    def expect_leg(self, worker: WorkerState) -> None:
        """Keeps a draining worker for a leg that will follow, until `unexpect_leg`."""
        worker.num_expected += 1

    def unexpect_leg(self, worker: WorkerState) -> None:
        worker.num_expected -= 1
        self._retire_when_idle(worker)

    def post(self, worker: WorkerState, command: Command) -> None:
        """Sends in the background, so that a caller that is being cancelled can still send."""
        self._sends.post(worker, command)

    def _enter(self, link: WorkerLink, session: int, incarnation: int, hello: Hello) -> WorkerState:
        worker = WorkerState(link, session, hello, incarnation, self._now())
        if hello.kv_pool:
            worker.pooled = self._pools.setdefault(hello.kv_pool, PooledChunks())
        for peer in hello.peers:
            worker.met(peer)
        self._workers[link.worker_id] = worker
        self.introducer.joined(worker, self._workers.values())
        self.changes.notify()
        return worker

    def _introduce(self) -> None:
        self.introducer.changed()
        self.introducer.introduce(self._workers.values())
        self.changes.notify()

    def _tell(self, leg: Leg, event: Lost | Silent) -> None:
        """Queues an event for a leg.

        One cause may concern thousands of legs, and each of them then chooses workers anew.
        """
        self._wakes.later(partial(leg.inbox.put, leg, event))

    def _lose(self, worker: WorkerState, reason: str) -> None:
        if self._workers.get(worker.worker_id) is worker:
            logger.warning("worker %s %s", worker.worker_id, reason)
            self._forget(worker, reason)
            self._streams.close(worker.worker_id)

    def _move_legs(self, worker: WorkerState) -> None:
        """Moves the legs that are left elsewhere, before somebody ends the worker."""
        logger.info("worker %s leaves: moving %d legs", worker.worker_id, len(worker.legs))
        self._forget(worker, f"it leaves, and did not finish within {self._drain_s:g} s", "drained")
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
            self._forget(worker, "it leaves, and has finished", "drained")
            self._sends.spawn(self._close_after_sends(worker))

    async def _close_after_sends(self, worker: WorkerState) -> None:
        """Closes the stream after the last Cancels were sent.

        Closing it would abort the same requests, but less exactly.
        """
        await asyncio.sleep(0)
        self._streams.close(worker.worker_id)
