"""Finds what only time shows: silent workers and legs, and drains that are over.

Looks at all workers a few times per deadline, and has due pairs introduced again. If this process
itself stood still, everybody gets that much more time. It drops or moves nobody by itself: it
reports to its owner, `router.fleet.fleet`.
"""

import asyncio
import logging
from collections.abc import Callable

from pdserve.background.tasks import keep
from pdserve.router.fleet.inbox import Silent
from pdserve.router.fleet.peers import Introducer
from pdserve.router.fleet.worker_state import Leg, WorkerState

logger = logging.getLogger(__name__)

TICK_S = 0.5

# Workers push once a second. If a worker that has left the running set is silent, it did not leave
# but is dead: its node may have vanished without closing a connection.
LEFT_SILENCE_S = 3.0


class Watch:
    """The clock of a fleet. `ticker` is the task that looks, from `start` to `release`."""

    def __init__(
        self,
        workers: dict[str, WorkerState],
        introducer: Introducer,
        *,
        lose: Callable[[WorkerState, str], None],
        move_legs: Callable[[WorkerState], None],
        tell: Callable[[Leg, Silent], None],
        silence_s: float,
        drain_s: float,
        deadline_s: float,
        now: Callable[[], float],
    ) -> None:
        """Sets the deadlines and what is called when they pass.

        - `workers` are the fleet's own, by id.
        - `lose` is called if a worker pushed nothing for `silence_s`.
        - `move_legs` is called if it leaves and its `drain_s` are over.
        - `tell` is called if a leg neither waited nor had events for `deadline_s`.
        """
        self.ticker: asyncio.Task[None] | None = None
        self._workers = workers
        self._introducer = introducer
        self._lose = lose
        self._move_legs = move_legs
        self._tell = tell
        self._silence_s = silence_s
        self._drain_s = drain_s
        self._deadline_s = deadline_s
        self._now = now
        self._looked_at = now()

    def start(self) -> None:
        """Starts the task that looks. Idempotent."""
        if self.ticker is None:
            self.ticker = keep("fleet tick", self._tick)

    def release(self) -> list[asyncio.Task[None]]:
        """Returns the task that looks, for the caller to cancel; none if it was not started."""
        ticker = self.ticker
        self.ticker = None
        return [] if ticker is None else [ticker]

    @property
    def _period_s(self) -> float:
        return min(TICK_S, self._silence_s / 4, self._deadline_s / 4)

    async def _tick(self) -> None:
        self._looked_at = self._now()
        while True:
            await asyncio.sleep(self._period_s)
            self.look()

    def look(self) -> None:
        """Looks at all workers once; each tick does this."""
        now = self._now()
        late_s = now - self._looked_at - self._period_s
        self._looked_at = now
        if late_s > self._period_s:
            self._excuse(late_s, now)
        for worker in list(self._workers.values()):
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
        """Gives everybody the time that this process stood still and could not read."""
        logger.warning(
            "this router stood still for %.1f s: workers and their legs get that much more time",
            late_s,
        )
        for worker in self._workers.values():
            worker.last_seen = min(now, worker.last_seen + late_s)
            for leg in worker.legs.values():
                leg.last_sign = min(now, leg.last_sign + late_s)

    def _end_silent_legs(self, worker: WorkerState) -> None:
        """Ends the legs that the worker had not reported for the deadline at its last Snapshot.

        A leg that was handed off, or only prepared, need not be reported.
        """
        for leg in worker.legs.values():
            if worker.reported_at - leg.last_sign > self._deadline_s and not (
                leg.handed_off or leg.prepared
            ):
                leg.last_sign = worker.last_seen  # so this is sent once per deadline
                self._tell(leg, Silent(self._deadline_s))
