"""Another rank of a worker's engine, in a process of its own: its share of the model, and its part
of every hand-over.

Rank 0 is `worker.host.EngineHost`, which speaks for all of them: this one has no socket of its own
and hears of no request. Knows no Ray.
"""

import logging
import os
from functools import partial
from typing import Any

import numpy as np
import torch

from pdserve.background.threads import KeptThread
from pdserve.configs.schema import WorkerConfig
from pdserve.engine.build import Following
from pdserve.kvtransfer.build import build_rank
from pdserve.kvtransfer.connector import KVCacheMemory
from pdserve.kvtransfer.p2p.remote_rank import RankService
from pdserve.parallel.bring_up import RankGroup
from pdserve.parallel.dims import ParallelDims
from pdserve.parallel.rank_link import join_link
from pdserve.protocol.start_progress import StartProgress

logger = logging.getLogger(__name__)


class FollowerHost:
    """config, worker_id, incarnation: of the worker. rank: 1 and on; meeting: `EngineHost.meeting`.

    `start` beside rank 0's, `run` until that one closes; both on one thread.
    """

    def __init__(
        self, config: WorkerConfig, worker_id: str, incarnation: int, rank: int, meeting: str
    ) -> None:
        self.progress = StartProgress()
        self._config = config
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._dims = ParallelDims(tp=config.engine.tensor_parallel, rank=rank)
        self._meeting = meeting
        self._following: Following | None = None
        self._service: RankService | None = None

    def start(self) -> dict[str, Any]:
        """Load the rank's share of the model; what there is now, for the log."""
        self._group = RankGroup.join(self._dims, self._meeting)
        config = self._config
        self._following = Following(config.model, config.engine, self._group, self.progress)
        follower = self._following.follower
        if follower.runner.device.type == "cpu":
            torch.set_num_threads(1)
        self.progress.finish()
        return {"rank": self._dims.rank, "device": str(follower.runner.device)}

    def run(self) -> None:
        """Follow rank 0 to its end."""
        assert self._following is not None, "start() comes before run()"
        if self._config.connects:
            # rank 0 warms up meanwhile, for which this thread is needed
            KeptThread("rank registration", self._register)
        self._following.run()
        if self._service is not None:
            self._service.close()

    def _register(self) -> None:
        """Serve this rank's part of the KV cache to rank 0's connector."""
        assert self._following is not None
        follower = self._following.follower
        try:
            # rank 0's table is the one that counts
            generations = np.zeros(follower.kv_cache.num_blocks, np.int64)
            memory = KVCacheMemory(
                follower.kv_cache, generations, follower.fingerprint, follower.rows_digest
            )
            make = partial(
                build_rank,
                self._config.transfer,
                memory,
                self._worker_id,
                self._incarnation,
                self._dims.rank,
            )
            self._service = RankService(join_link(self._group), make)
        except Exception:
            logger.exception("rank %d cannot take part in hand-overs", self._dims.rank)
            os._exit(1)
