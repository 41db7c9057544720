"""Lets worker counts follow load: once per second, on the first router (Serve numbers them), from
what all workers have pushed to it.

`cluster.scaling.demand` decides. Two routers that both think they are first for a moment set the
same targets. Knows Serve only through `ReplicaCounts` and `is_first`. Made by
`cluster.deployments.router_replica`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from pdserve.background.tasks import keep
from pdserve.cluster.scaling.demand import (
    LeastInterval,
    Load,
    Scaler,
    decode_demand,
    prefill_demand,
    queue_target_ms,
)
from pdserve.configs.schema import AutoscalingConfig, ClusterConfig
from pdserve.router.admin import CannotScale, Count, ReplicaCounts, decoders_left, deployment_of
from pdserve.router.choosing.predict import Predictor
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.fleet.worker_state import WorkerState

logger = logging.getLogger("ray.serve")

PERIOD_S = 1.0
COUNTS_PERIOD_S = 5.0  # rarely, because the controller lists all deployments to report one


class Autoscaler:
    """Follows load where the configuration has `autoscaling:`; elsewhere `start` does nothing."""

    def __init__(
        self,
        fleet: Fleet,
        counts: ReplicaCounts,
        config: ClusterConfig,
        is_first: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._counts = counts
        self._slo = config.slo
        self._is_first = is_first
        self._now = now
        self._least = LeastInterval()
        # The counts, and when they were asked for.
        self._known: tuple[float, Mapping[str, Count]] | None = None
        # Targets that were kept because a decoder must be left, as last logged.
        self._kept: dict[str, int] = {}
        deployments = {"decode": config.decode}
        if config.mode == "disaggregated":
            deployments["prefill"] = config.prefill
        self._bounds = {
            key: part.autoscaling
            for key, part in deployments.items()
            if part.autoscaling is not None
        }
        self._scalers = {key: Scaler(bounds) for key, bounds in self._bounds.items()}
        self._task: asyncio.Task[None] | None = None
        self.is_settled = not self._bounds  # at the last look, counts were not changing

    def start(self) -> None:
        if self._bounds:
            self._task = keep("autoscaler", self._run, longest_pause_s=10.0)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        """Looks once per second. After an error it goes on with what it knew."""
        while True:
            await asyncio.sleep(PERIOD_S)
            if not self._is_first():
                self._scalers = {key: Scaler(bounds) for key, bounds in self._bounds.items()}
                continue
            try:
                await self.look()
            except ConnectionError as error:
                logger.warning("autoscaling: %s", error)
            except CannotScale as error:
                logger.error("autoscaling stops: %s", error)
                return

    async def look(self) -> None:
        """Decides once. Raises ConnectionError."""
        counts = await self._counts_of_late()
        self.is_settled = all(self._is_settled(key, counts) for key in self._bounds)
        workers = self._fleet.workers
        predictor = Predictor(workers, None, 0, time.monotonic())
        for key, scaler in self._scalers.items():
            serving = [worker for worker in workers if serves(worker, key) and not worker.draining]
            loads = {worker.worker_id: load_of(worker, predictor) for worker in serving}
            demand = self._demand(key, self._bounds[key], loads)
            target = counts[key].target
            running = counts[key].running
            new = scaler.decide(
                demand, len(loads), target, running, self._is_settled(key, counts), self._now()
            )
            if new != target:
                await self._set(key, target, new, demand)

    async def _set(self, key: str, target: int, new: int, demand: float) -> None:
        """Sets a new target, unless somebody else has changed it meanwhile.

        The target falls only as far as one worker that can decode is left for sure.
        """
        self._known = None
        targets = {name: count.target for name, count in (await self._counts_of_late()).items()}
        if targets[key] != target:
            return
        while new < target and decoders_left(self._fleet.workers, {**targets, key: new}) < 1:
            new += 1
        if new == target:
            if self._kept.get(key) != target:
                logger.warning(
                    "autoscaling: %s stays at %d: no worker might be left that can decode",
                    key,
                    target,
                )
            self._kept[key] = target
            return
        self._kept.pop(key, None)
        self._known = None
        logger.info("autoscaling: %s from %d to %d (demand %.2f)", key, target, new, demand)
        for warning in await self._counts.set({key: new}):
            logger.warning("autoscaling: %s", warning)

    async def _counts_of_late(self) -> Mapping[str, Count]:
        if self._known is None or self._now() - self._known[0] >= COUNTS_PERIOD_S:
            self._known = self._now(), await self._counts.get()
        return self._known[1]

    def _demand(self, key: str, bounds: AutoscalingConfig, loads: dict[str, Load]) -> float:
        queue_ms = queue_target_ms(bounds, self._slo.ttft_ms)
        if key == "prefill":
            return prefill_demand(list(loads.values()), queue_ms)
        self._least.see(loads, self._now())
        return decode_demand(
            list(loads.values()), queue_ms, self._slo.tpot_ms, bounds.sequences, self._least.ms
        )

    def _is_settled(self, key: str, counts: Mapping[str, Count]) -> bool:
        """True if Serve runs the target number of workers, and this router sees exactly these."""
        members = [worker for worker in self._fleet.workers if deployment_of(worker) == key]
        is_there = counts[key].running == counts[key].target == len(members)
        return is_there and not any(worker.draining for worker in members)


def serves(worker: WorkerState, key: str) -> bool:
    """True if the worker serves this phase, by its present role and not the one it started with."""
    return worker.role == "prefill" if key == "prefill" else worker.can_decode


def load_of(worker: WorkerState, predictor: Predictor) -> Load:
    """Returns the worker's load.

    A worker that paces its steps stretches them to the target while prompts wait. Its token
    interval then says nothing about its decodes, so the time of its decode steps alone is used.
    """
    snapshot = worker.snapshot
    if snapshot is None:
        return Load()
    interval_ms = 1000 * snapshot.token_interval_s
    return Load(
        queue_ms=predictor.queue_ms(worker),
        busy=snapshot.busy,
        token_interval_ms=interval_ms if worker.pace is None else worker.pace.base_step_ms,
        used_blocks=1 - snapshot.free_blocks / max(1, snapshot.total_blocks),
        num_sequences=snapshot.num_running + snapshot.num_waiting,
    )
