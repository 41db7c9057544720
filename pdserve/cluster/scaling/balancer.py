"""Carries out slow changes of roles: once per second, on the first router (Serve numbers them), it
asks `cluster.scaling.balance`.

The decision rests on what all workers have reported. It also logs when splitting does not pay. It
acts only on a disaggregated cluster whose two kinds of workers have equal engines, and only while
counts are not changing. Starts and stops no worker. Made by `cluster.deployments.router_replica`.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from pdserve.background.tasks import every
from pdserve.cluster.scaling.autoscaler import load_of
from pdserve.cluster.scaling.balance import Balance, Member
from pdserve.cluster.scaling.demand import (
    LeastInterval,
    Load,
    decode_demand,
    prefill_demand,
    queue_target_ms,
)
from pdserve.configs.schema import ClusterConfig
from pdserve.protocol.commands import SetRole
from pdserve.router.choosing.predict import Predictor
from pdserve.router.choosing.split_gain import SplitGain, described
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.fleet.worker_state import WorkerState

logger = logging.getLogger("ray.serve")

PERIOD_S = 1.0


class Balancer:
    def __init__(
        self,
        fleet: Fleet,
        gain: SplitGain,
        config: ClusterConfig,
        is_first: Callable[[], bool],
        is_settled: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_settled` returns True if nobody is changing how many workers there are."""
        self._fleet = fleet
        self._gain = gain
        self._config = config
        self._is_first = is_first
        self._is_settled = is_settled
        self._now = now
        self._balance = Balance()
        self._least = LeastInterval()
        self._said: bool | None = True  # whether splitting pays, as last logged
        alike = config.prefill.engine == config.decode.engine
        self._is_possible = config.mode == "disaggregated" and alike
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._config.mode == "disaggregated":
            self._task = every("balancer", PERIOD_S, self.look)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def look(self) -> None:
        if not self._is_first():
            self._balance.forget()
            return
        self._say_whether_it_pays()
        workers = [worker for worker in self._fleet.workers if worker.snapshot is not None]
        if not self._is_possible or not self._is_settled() or any(w.draining for w in workers):
            self._balance.forget()
            return
        prefill, decode = self._demands(workers)
        change = self._balance.decide(
            [_member(worker) for worker in workers], prefill, decode, self._now()
        )
        if change is None:
            return
        worker = next(w for w in workers if w.worker_id == change.worker)
        logger.info(
            "%s becomes %s: for a minute, prompts have needed %.2f workers, and streams %.2f",
            change.worker,
            change.role,
            prefill,
            decode,
        )
        self._fleet.post(worker, SetRole(role=change.role, by="balance"))

    def _demands(self, workers: list[WorkerState]) -> tuple[float, float]:
        """Returns the demand of prompts and the demand of streams, in workers, wherever they
        are."""
        predictor = Predictor(workers, None, 0, self._now())
        slo = self._config.slo
        loads = {worker.worker_id: load_of(worker, predictor) for worker in workers}
        prompts = [
            Load(queue_ms=predictor.queue_alone_ms(w), busy=loads[w.worker_id].busy)
            for w in workers
        ]
        streams = {
            name: Load(
                token_interval_ms=load.token_interval_ms,
                used_blocks=load.used_blocks,
                num_sequences=load.num_sequences,
            )
            for name, load in loads.items()
        }
        self._least.see(streams, self._now())
        config = self._config
        queue_ms = min(
            queue_target_ms(part.autoscaling, slo.ttft_ms)
            for part in (config.prefill, config.decode)
        )
        return prefill_demand(prompts, queue_ms), decode_demand(
            list(streams.values()), queue_ms, slo.tpot_ms, None, self._least.ms
        )

    def _say_whether_it_pays(self) -> None:
        pays = self._gain.pays(self._now())
        if pays is None or pays == self._said:
            return
        self._said = pays
        (logger.info if pays else logger.warning)("%s", described(self._gain, self._now()))


def _member(worker: WorkerState) -> Member:
    snapshot = worker.snapshot
    assert snapshot is not None
    changed = snapshot.role_age_s if snapshot.role_by == "balance" else None
    return Member(
        worker.worker_id,
        worker.role if worker.hands_over else "both",
        snapshot.role_by != "operator",
        changed,
        float(snapshot.queue_tokens + snapshot.num_running),
    )
