"""The process of a rank other than the first: its share of the model, and its part of hand-offs, of
the KV pool and of the metrics.

Rank 0 decides everything, and drives this rank over the step channel and one link per purpose.
"""

import logging
import os
from functools import partial
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from pdserve.background.threads import FAILURES, KeptThread
from pdserve.configs.schema import WorkerConfig
from pdserve.engine.build import Following
from pdserve.engine.execution.follower import Follower
from pdserve.kvtransfer.build import build_pool, build_rank
from pdserve.kvtransfer.connector import KVCacheMemory
from pdserve.kvtransfer.p2p.remote_rank import serve_rank
from pdserve.kvtransfer.pool.lmcache_server import SharedServer
from pdserve.kvtransfer.pool.remote_pool import serve_pool
from pdserve.kvtransfer.remote import Service
from pdserve.parallel.bring_up import ALONE, RankGroup
from pdserve.parallel.dims import dims_of
from pdserve.parallel.rank_link import join_link
from pdserve.protocol.start_progress import StartProgress
from pdserve.worker.hosts.engine_host import EXPERTS, HAND_OVERS, METRICS, POOL
from pdserve.worker.hosts.engine_load import RankLoad
from pdserve.worker.hosts.pool_servers import find_pool, server_of_node, shard_of
from pdserve.worker.hosts.rank_metrics import RankReporter
from pdserve.worker.metrics import RankCollector

logger = logging.getLogger(__name__)


class FollowerHost:
    """A rank from 1 on. `config`, `worker_id` and `incarnation` are the worker's; `meeting`: see
    EngineHost.

    `start` runs beside rank 0's, and `run` until rank 0 closes. Both run on one thread.
    """

    def __init__(
        self, config: WorkerConfig, worker_id: str, incarnation: int, rank: int, meeting: str
    ) -> None:
        self.progress = StartProgress()
        self.meeting = meeting
        self._config = config
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._dims = dims_of(config.engine, rank)
        self._group = ALONE
        self._following: Following | None = None
        self._services: list[Service[Any] | RankReporter | RankLoad] = []
        self._pool_server: SharedServer | None = None

    @property
    def step_age_s(self) -> float:
        """Seconds for which this rank has worked on rank 0's last message; 0 while it waits for
        one. Any thread may read it."""
        following = self._following
        return following.follower.clock.age_s if following is not None else 0.0

    def start(self) -> dict[str, Any]:
        """Loads the rank's share of the model. Returns a description for the log."""
        # A process that sees several GPUs shares them (cluster.deployments).
        index = self._dims.rank % max(torch.cuda.device_count(), 1)
        self._group = RankGroup.join(self._dims, self.meeting, device_index=index)
        config = self._config
        self._pool_server = server_of_node(config, self._group)
        self._following = Following(config.model, config.engine, self._group, self.progress)
        device = self._following.follower.runner.device
        if device.type == "cpu":
            torch.set_num_threads(1)
        self.progress.finish()
        return {"rank": self._dims.rank, "device": str(device)}

    def run(self) -> None:
        """Follows rank 0 to its end."""
        assert self._following is not None, "start() comes before run()"
        # The services start on their own thread. Rank 0 warms up meanwhile, and needs this thread.
        KeptThread("rank services", partial(self._serve, self._following.follower))
        self._following.run()
        for service in self._services:
            service.close()
        if self._pool_server is not None:
            self._pool_server.close()

    def _serve(self, follower: Follower) -> None:
        """Starts this rank's services for rank 0, in the order in which rank 0 asks for them."""
        try:
            registry = CollectorRegistry()
            registry.register(FAILURES)
            # All ranks of one home and stage count the same.
            load = follower.load if self._dims.tp_rank == 0 else None
            registry.register(RankCollector(follower.kv_cache, load))
            memory = KVCacheMemory(
                follower.kv_cache,
                None,
                follower.fingerprint,
                follower.rows_digest,
                self._dims.home,
                follower.unrounded,
            )
            if self._config.connects:
                self._serve_hand_overs(memory, registry)
            if self._config.transfer.pool.mode != "off":
                self._serve_pool(memory, registry)
            self._services.append(RankReporter(join_link(self._group, METRICS), registry))
            if follower.runner.model.spec.experts is not None:
                self._services.append(RankLoad(join_link(self._group, EXPERTS), load))
        except Exception:  # rank 0 waits for this rank, and notices when the process ends
            logger.exception("rank %d cannot serve", self._dims.rank)
            os._exit(1)

    def _serve_hand_overs(self, memory: KVCacheMemory, registry: CollectorRegistry) -> None:
        make = partial(
            build_rank,
            self._config.transfer,
            memory,
            self._worker_id,
            self._incarnation,
            self._dims.rank,
            registry=registry,
        )
        self._services.append(serve_rank(join_link(self._group, HAND_OVERS), make))

    def _serve_pool(self, memory: KVCacheMemory, registry: CollectorRegistry) -> None:
        address = find_pool(self._config, self._group, self._pool_server, registry)
        make = partial(
            build_pool,
            address,
            self._config.transfer.pool,
            memory,
            shard=shard_of(self._dims),
            registry=registry,
        )
        self._services.append(serve_pool(join_link(self._group, POOL), make))
