"""Takes in what workers report: events go to their legs, reports into workers' states.

    event of a leg --> its inbox            (if the leg has ended: counted and dropped)
    other events ----> its WorkerState, and the introducer where it is about a peer

Knows no streams, and never declares a worker lost. Called by `router.fleet.streams` for all events
of a worker.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.protocol.commands import Command, Resync
from pdserve.protocol.events import (
    CacheChange,
    CacheState,
    Delta,
    ExpertCounts,
    Hello,
    LegsWaiting,
    Load,
    PeerStatus,
    PoolChange,
    RoutedEvent,
    Snapshot,
)
from pdserve.router.fleet.changes import Changes
from pdserve.router.fleet.peers import Introducer
from pdserve.router.fleet.worker_state import WorkerState

logger = logging.getLogger(__name__)


class Intake:
    """Sorts events of workers.

    `num_stale_events` counts events of legs that had ended. `num_resyncs` counts requests for a
    whole cache state.
    """

    def __init__(
        self,
        router_id: str,
        introducer: Introducer,
        changes: Changes,
        post: Callable[[WorkerState, Command], None],
        role_changed: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self.num_stale_events = 0
        self.num_resyncs = 0
        self._router_id = router_id
        self._introducer = introducer
        self._changes = changes
        self._post = post
        self._role_changed = role_changed
        self._now = now

    def take(self, worker: WorkerState, events: Sequence[RoutedEvent]) -> None:
        worker.last_seen = self._now()
        for event in events:
            if isinstance(event, Delta):  # checked first, as nearly all events are Deltas
                self.route(worker, event)
            elif isinstance(event, LegsWaiting):
                self._wait_on(worker, event)
            elif isinstance(event, Snapshot):
                self._update(worker, event)
            elif isinstance(event, PeerStatus):
                worker.met(event)
                self._introducer.reported(worker, event)
                self._changes.notify()
            elif isinstance(event, CacheChange):
                worker.cached.changed(event)
                self._keep_whole(worker, None)
            elif isinstance(event, CacheState):
                worker.cached.filled(event, worker.last_seen)
            elif isinstance(event, PoolChange):
                if worker.pooled is not None:
                    worker.pooled.changed(event)
            elif isinstance(event, Load):
                worker.told(event, worker.last_seen)
            elif isinstance(event, ExpertCounts):
                if worker.load_questions:
                    worker.load_questions.popleft().set_result(event)
                    self._changes.notify()
            elif not isinstance(event, Hello):
                self.route(worker, event)

    def route(self, worker: WorkerState, event: Any) -> None:
        """Puts an event into its leg's inbox, unless the leg has ended."""
        name = event.request_id, event.attempt
        worker.queue.read(name)
        leg = worker.legs.get(name)
        if leg is None:
            self.num_stale_events += 1
        else:
            leg.last_sign = worker.last_seen
            leg.inbox.put(leg, event)

    def _wait_on(self, worker: WorkerState, waiting: LegsWaiting) -> None:
        for name in waiting.legs:
            worker.queue.read(name)
            leg = worker.legs.get(name)
            if leg is not None:
                leg.last_sign = worker.last_seen

    def _update(self, worker: WorkerState, snapshot: Snapshot) -> None:
        role = worker.role
        worker.snapshot = snapshot
        worker.reported_at = worker.last_seen
        worker.told(snapshot, worker.last_seen)
        self._keep_whole(worker, snapshot.cache_number)
        if snapshot.role != role:
            self._role_changed()

    def _keep_whole(self, worker: WorkerState, cache_number: int | None) -> None:
        """Asks for the whole cache state again if this router's copy has a gap."""
        if worker.cached.wants_resync(cache_number, worker.last_seen):
            self.num_resyncs += 1
            logger.info("asking worker %s for the state of its prefix cache", worker.worker_id)
            self._post(worker, Resync(router_id=self._router_id, session=worker.session))
