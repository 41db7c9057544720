"""The processes of one engine: `EngineHost` builds the engine, its connector, its KV pool and the
worker loop, and carries their bytes over zmq; a `FollowerHost` is another rank of it, with its
share of the model and its part of every hand-over.

The plain classes under the Ray actors of cluster.deployments.engine_actor; tests run them in a
thread or a process without Ray. Know no Ray. Wire: a zmq PAIR bound to `address`; frames
`[command]` in, `[target, batch]` out, all msgspec.
"""

import logging
import os
import sys
import time
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from pdserve.background.threads import KeptThread
from pdserve.configs.schema import WorkerConfig
from pdserve.engine.build import Following, build_engine
from pdserve.engine.engine import Engine
from pdserve.kvtransfer.build import build_connector, build_pool, build_rank
from pdserve.kvtransfer.connector import KVCacheMemory, KVPool
from pdserve.kvtransfer.p2p.engine_receiver import EngineReceiver
from pdserve.kvtransfer.p2p.remote_rank import RankService, RemoteRank
from pdserve.kvtransfer.p2p.sender import Sender
from pdserve.kvtransfer.pool.lmcache_server import SharedServer
from pdserve.parallel.bring_up import ALONE, PHASE_DEADLINE_S, RankGroup
from pdserve.parallel.dims import ParallelDims
from pdserve.parallel.rank_link import host_links, join_link
from pdserve.protocol.codec import decode_command, encode
from pdserve.protocol.events import EventBatch
from pdserve.protocol.start_progress import StartProgress
from pdserve.worker.loop import WorkerLoop
from pdserve.worker.metrics import WorkerMetrics

logger = logging.getLogger(__name__)

SWITCH_S = (
    # a link's thread waits for the interpreter no longer than that; by default 5 ms, longer than a
    # transfer
    1e-4
)


class EngineHost:
    """config: of the worker; worker_id: unique over restarts; incarnation: start time in ns;
    address: zmq, `ipc://...`.

    `start` loads the model (slow; `progress` tells how far), `run` serves until a Stop. Both on the
    same thread. An error in a step ends `run`: an engine that failed once is not trusted again; its
    process goes and a new incarnation comes.
    """

    def __init__(
        self, config: WorkerConfig, worker_id: str, incarnation: int, address: str
    ) -> None:
        self.progress = StartProgress()
        self._config = config
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._address = address
        self._loop: WorkerLoop | None = None
        degree = config.engine.tensor_parallel
        self._group = RankGroup.host(ParallelDims(tp=degree)) if degree > 1 else ALONE
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._sender: Sender | None = None
        self._receiver: EngineReceiver | None = None
        self._pool: KVPool | None = None
        self._pool_server: SharedServer | None = None
        self._socket: zmq.Socket[bytes] | None = None

    @property
    def meeting(self) -> str:
        """Where the engine's other ranks meet this one (`FollowerHost`); "" when there is none."""
        return self._group.address

    def start(self) -> dict[str, Any]:
        """Load the model, allocate and register the KV cache, bind the address; what there is now,
        for the log."""
        began = time.monotonic()
        pool_config = self._config.transfer.pool
        if pool_config.mode == "start":
            self._pool_server = SharedServer(pool_config)
        engine = build_engine(
            self._config.model, self._config.engine, self.progress, self._group, self._lost
        )
        if engine.device.type == "cpu":
            torch.set_num_threads(1)
        metrics = WorkerMetrics(engine)
        memory = KVCacheMemory(
            engine.kv_cache,
            engine.blocks.generations,
            engine.model_fingerprint,
            engine.rows_digest,
        )
        if self._config.connects:
            self.progress.enter("registration")
            self._sender, self._receiver = build_connector(
                self._config.transfer,
                memory,
                self._worker_id,
                self._incarnation,
                self._wake,
                host=self._config.host,
                registry=metrics.registry,
            )
            self._add_ranks(engine, self._sender, self._receiver)
        if pool_config.mode != "off":
            self.progress.enter("pool")
            address = (
                self._pool_server.wait_ready()
                if self._pool_server is not None
                else pool_config.address
            )
            assert address is not None, "PoolConfig asks for one"
            self._pool = build_pool(
                address, pool_config, memory, self._wake, registry=metrics.registry
            )
        self._socket = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.bind(self._address)
        self._loop = WorkerLoop(
            engine,
            metrics,
            self._config.transfer,
            self._config.role,
            self._worker_id,
            self._incarnation,
            self._sender,
            self._receiver,
            self._send,
            self._pool,
            self._pool_name(),
        )
        self.progress.finish()
        return {
            "model": self._config.model.served_name,
            "device": str(engine.device),
            "num_blocks": engine.blocks.num_usable,
            "block_size": engine.config.block_size,
            "seconds": round(time.monotonic() - began, 2),
        }

    def _add_ranks(self, engine: Engine, sender: Sender, receiver: EngineReceiver) -> None:
        """The parts of the KV cache that other ranks have."""
        if self._group.is_alone:
            return
        links = host_links(self._group)
        block_size = engine.config.block_size
        ranks = [RemoteRank(links[rank], block_size, self._wake) for rank in sorted(links)]
        sender.add_ranks([rank.memory(PHASE_DEADLINE_S) for rank in ranks])
        receiver.add_ranks(ranks)

    def _lost(self, rank: int) -> None:
        """On a thread. What is under way with the others may never return: the process ends."""
        logger.error("the process of rank %d of %s has ended", rank, self._worker_id)
        os._exit(1)

    def _pool_name(self) -> str:
        """Equal for the workers of one host that use one server; a server without address is its
        worker's own."""
        address = self._config.transfer.pool.address
        return (
            f"{self._config.host}/{address}"
            if address
            else f"{self._worker_id}/{self._incarnation}"
        )

    def run(self) -> None:
        """Serve until a Stop command; raises what a step raised."""
        assert self._loop is not None and self._socket is not None, "start() comes before run()"
        sys.setswitchinterval(SWITCH_S)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        try:
            while not self._loop.stopped:
                timeout = self._loop.turn()
                ready = dict(poller.poll(int(timeout * 1000)))
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                if self._socket in ready:
                    self._receive()
        finally:
            self._close()

    def _receive(self) -> None:
        assert self._loop is not None and self._socket is not None
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                command = decode_command(frame)
            except (msgspec.MsgspecError, ValueError):
                logger.exception("dropped a malformed command of %d bytes", len(frame))
            else:
                self._loop.handle(command)

    def _send(self, target: str, batch: EventBatch) -> None:
        assert self._socket is not None
        try:
            self._socket.send_multipart([target.encode(), encode(batch)], zmq.NOBLOCK)
        except zmq.Again:  # the queue is unbounded, so this means one thing only
            logger.warning(
                "nobody is connected to %s: dropped a batch for %s", self._address, target
            )

    def _wake(self) -> None:
        """Called from any thread: the connector has news."""
        os.eventfd_write(self._wake_fd, 1)

    def _close(self) -> None:
        if self._loop is not None:
            self._loop.engine.close()  # before its KV cache is unregistered
        for part in (self._pool, self._receiver, self._sender, self._pool_server):
            if part is not None:
                part.close()
        if self._socket is not None:
            self._socket.close()


class FollowerHost:
    """Another rank than the first. config, worker_id, incarnation: of the worker. rank: 1 and on;
    meeting: `EngineHost.meeting`.

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
