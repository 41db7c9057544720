"""Makes sure that somebody always decodes: if no worker has had the role for a while, one gets the
role `both` until another comes.

Without this, a cluster whose roles were changed would answer 503 for ever when its only decoder
dies: the successor has its deployment's role, which may be prefill. Works on the first router
(Serve numbers them). Decides no counts and starts no worker. Made by
`cluster.deployments.router_replica`.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from pdserve.background.tasks import every
from pdserve.protocol.commands import SetRole
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.fleet.worker_state import WorkerState

logger = logging.getLogger("ray.serve")

PERIOD_S = 1.0
NONE_S = 15.0  # time without a decoder; the successor of a small model's worker comes sooner
AGAIN_S = 15.0  # time with another decoder until the role is taken back


class DecodeGuard:
    def __init__(
        self, fleet: Fleet, is_first: Callable[[], bool], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._is_first = is_first
        self._now = now
        self._helper: str | None = None  # the worker that was given the role
        # Since when the state has been wrong: nobody decodes, or others do besides the helper.
        self._differs_since: float | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = every("decode guard", PERIOD_S, self.look)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def look(self) -> None:
        workers = [worker for worker in self._fleet.workers if not worker.draining]
        decoders = [worker for worker in workers if worker.can_decode]
        helper = next((worker for worker in decoders if worker.worker_id == self._helper), None)
        if not self._is_first() or not workers:
            self._differs_since = None
        elif not decoders:
            if self._lasts(NONE_S):
                self._help(workers)
        elif helper is not None and helper.role == "both" and len(decoders) > 1:
            if self._lasts(AGAIN_S):
                self._relieve(helper)
        else:
            self._differs_since = None

    def _lasts(self, seconds: float) -> bool:
        """True if the state has been wrong for this many seconds; then counting starts anew."""
        since = self._now() if self._differs_since is None else self._differs_since
        lasts = self._now() - since >= seconds
        self._differs_since = None if lasts else since
        return lasts

    def _help(self, workers: list[WorkerState]) -> None:
        worker = min(workers, key=_load)
        self._helper = worker.worker_id
        message = "no worker has decoded for %g s: %s gets the role both until another one does"
        logger.warning(message, NONE_S, worker.worker_id)
        self._fleet.post(worker, SetRole(role="both", by="guard"))

    def _relieve(self, helper: WorkerState) -> None:
        """Takes the role back: every worker that does not decode prefills."""
        self._helper = None
        logger.info("others decode again: %s gets the role prefill back", helper.worker_id)
        self._fleet.post(helper, SetRole(role="prefill", by="guard"))


def _load(worker: WorkerState) -> tuple[int, str]:
    return worker.snapshot.queue_tokens if worker.snapshot is not None else 0, worker.worker_id
