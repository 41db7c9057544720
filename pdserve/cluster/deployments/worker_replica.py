"""The Serve replica of one worker: an asyncio shell that owns its engine processes, and passes
bytes between them and the routers.

It knows no tokens, no torch and no GPU. Messages stay encoded, except the Snapshots, whose metrics
it copies to Ray. Both deployments, `Prefill` and `Decode`, use it; `cluster.app` makes it and
`cluster.links.serve_links` calls it. When the engine ends, the replica ends too. Serve then starts
a new one, which is a new incarnation.
"""

import asyncio
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from msgspec import DecodeError
from ray import serve
from ray.exceptions import RayError
from ray.util import get_current_placement_group, get_node_ip_address

from pdserve.background.tasks import FAILURES, failed, once
from pdserve.cluster.deployments import start_board
from pdserve.cluster.deployments.engine_actor import (
    ENGINE_HOST,
    FOLLOWER_HOST,
    create_engine_actor,
)
from pdserve.cluster.deployments.engine_processes import EngineProcesses
from pdserve.cluster.deployments.engine_start import EngineStart
from pdserve.cluster.deployments.logs import log_as_serve_does, own_file
from pdserve.cluster.deployments.metrics_bridge import Exposed, MetricsBridge
from pdserve.cluster.deployments.rank_pings import StepAges, ping
from pdserve.cluster.links.addressing import worker_id_of
from pdserve.cluster.links.framing import cut
from pdserve.configs.schema import WorkerConfig
from pdserve.parallel.dims import dims_of
from pdserve.protocol.codec import decode_batch
from pdserve.protocol.events import Snapshot
from pdserve.protocol.metric_families import families_of
from pdserve.worker.engine_client import EngineClient, EngineGone

logger = logging.getLogger("ray.serve")
log_as_serve_does()

PING_DEADLINE_S = 10.0
STOP_DEADLINE_S = 10.0
REASON_DEADLINE_S = 2.0
KILL_S = 10.0


class WorkerReplica:
    """One worker replica.

    `config`: configuration of the worker.
    `num_gpus`: number of GPUs for each rank of its engine.
    `engine_host`: import path of the host class, `module:Class`.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: WorkerConfig, num_gpus: float, engine_host: str = ENGINE_HOST
    ) -> None:
        group = get_current_placement_group()
        assert group is not None, "a worker deployment needs placement_group_bundles"
        self.worker_id = worker_id_of(serve.get_replica_context().replica_id)
        self._stopping = False
        self._role: str = config.role
        self._step_deadline_s = config.engine.step_deadline_s or math.inf
        self._snapshot: Snapshot | None = None
        self._step_ages = StepAges()
        # Only this user can enter the folder. Whoever reaches the socket commands the engine.
        folder = tempfile.mkdtemp(prefix="pdserve-")
        address = f"ipc://{folder}/engine"
        create = partial(create_engine_actor, group, num_gpus)
        application = serve.get_replica_context().app_name
        life = (application, config, self.worker_id, time.time_ns())
        self._engine: Any = create(0, engine_host, *life, address)
        self._followers: list[Any] = []
        if config.engine.num_ranks > 1:
            meeting = await self._engine.meeting.remote()
            self._followers = [
                create(dims_of(config.engine, rank).pp_rank, FOLLOWER_HOST, *life, rank, meeting)
                for rank in range(1, config.engine.num_ranks)
            ]
        start = EngineStart(
            self._engine,
            config,
            self.worker_id,
            get_node_ip_address(),
            num_gpus,
            own_file(),
            partial(start_board.post, application),
            partial(start_board.remove, application),
            self._followers,
        )
        try:
            async with start:
                info = await start.serving()
                places = await asyncio.gather(*(rank.process.remote() for rank in self._ranks))
                here = get_node_ip_address()
                self._processes = EngineProcesses([pid for host, pid in places if host == here])
                self._follower_runs = start.runs
                self._client = EngineClient(address, self._overhear)
                self._running = once("engine watch", self._run())
                await start.connected(self._client.connected.wait())
        finally:
            # The connection works without the file. A killed replica could not remove it later.
            shutil.rmtree(folder, ignore_errors=True)
        self._bridge = MetricsBridge(self._metrics)
        logger.info("worker %s (%s) is ready: %s", self.worker_id, config.role, info)

    async def submit(self, commands: list[bytes], worker_id: str) -> None:
        """Delivers encoded Commands, in order. Raises EngineGone."""
        self._check_address(worker_id)
        for data in commands:
            self._client.send_encoded(data)

    async def events(
        self, router_id: str, session: int, worker_id: str
    ) -> AsyncGenerator[bytes, None]:
        """Yields the event stream of one router, in pieces (`cluster.links.framing`).

        However it ends, the engine gets a RouterLost.
        """
        self._check_address(worker_id)
        batches = self._client.subscribe(router_id, session)
        try:
            async for batch in batches:
                for piece in cut(batch):
                    yield piece
        finally:
            await batches.aclose()

    async def check_health(self) -> None:
        """Pings the ranks; a frozen engine process counts as dead.

        Serve replaces a replica that fails this a few times. When a rank has been frozen for
        engine.step_deadline_s, the replica ends itself.
        """
        began = time.monotonic()
        deadline_s = min(PING_DEADLINE_S, self._step_deadline_s)
        answers = await ping((rank.ping.remote() for rank in self._ranks), deadline_s)
        self._step_ages.tell(answers)
        if not answers.complaint:
            return
        if time.monotonic() - began >= self._step_deadline_s:
            await self._end(f"{answers.complaint} for engine.step_deadline_s")
        raise TimeoutError(f"{answers.complaint} within {deadline_s:g} s")

    async def __del__(self) -> None:
        """Serve awaits this at a graceful end, after the streams have closed."""
        self._stopping = True
        self._bridge.close()
        self._client.close()
        await asyncio.wait([self._running], timeout=STOP_DEADLINE_S)

    @property
    def _ranks(self) -> list[Any]:
        return [self._engine, *self._followers]

    def _overhear(self, batch: bytes) -> None:
        """Keeps the latest Snapshot. Each second one batch has one, and at most ten more batches go
        to all."""
        try:
            events = decode_batch(batch).events
        # The routers get the batch unchanged, and report the error themselves.
        except DecodeError as error:
            failed("overhear", error)
            return
        for event in events:
            if isinstance(event, Snapshot):
                self._snapshot = event

    def _metrics(self) -> Exposed:
        """Returns the metrics of each Snapshot only once.

        An engine that sends no Snapshot (no router listens, or a step hangs) must not look alive.
        Then there are only the metrics of this process, with the ages of steps.
        """
        snapshot = self._snapshot
        self._snapshot = None
        families = (*families_of(FAILURES), *families_of(self._step_ages.registry))
        if snapshot is not None:
            self._role = snapshot.role
            families += snapshot.metrics
        return Exposed(families, {"worker": self.worker_id, "role": self._role})

    def _check_address(self, worker_id: str) -> None:
        if worker_id != self.worker_id:
            raise EngineGone(f"this is worker {self.worker_id}, not {worker_id}")

    async def _run(self) -> None:
        """Ends with the engine.

        Unless the replica was asked to stop, its process then ends at once: a shell without an
        engine serves nobody, and neither does one that cannot watch its engine.
        """
        try:
            reason = await self._end_of_engine()
        except Exception as error:
            failed("engine watch", error)
            reason = f"the task that watches it failed: {error!r}"
        if not self._stopping:
            await self._end(reason)

    async def _end(self, reason: str) -> None:
        """Ends this process and the engine's processes on this node.

        The engine's processes may be frozen, or hold GPU memory that the next incarnation needs.
        Those on other nodes end with their connection to rank 0. If one of those is frozen, Ray
        kills it 5 seconds after its owner, this process, is gone (tried).
        """
        logger.error("the engine of worker %s is gone: %s", self.worker_id, reason)
        if not await asyncio.to_thread(self._processes.kill, KILL_S):
            logger.error("its processes did not end within %g s", KILL_S)
        logging.shutdown()
        os._exit(1)

    async def _end_of_engine(self) -> str:
        """Waits until the engine has ended, and returns the reason."""
        runs = [asyncio.ensure_future(self._engine.run.remote()), *self._follower_runs]
        closed = asyncio.ensure_future(self._client.closed.wait())
        done, _ = await asyncio.wait([*runs, closed], return_when=asyncio.FIRST_COMPLETED)
        lost = next((rank for rank, run in enumerate(runs) if run in done), 0)
        try:
            async with asyncio.timeout(REASON_DEADLINE_S):
                await runs[lost]
        except RayError as error:
            return f"rank {lost}: {error}" if lost else str(error)
        except TimeoutError:
            return "it closed its socket, but its process does not end"
        return "its loop ended"
