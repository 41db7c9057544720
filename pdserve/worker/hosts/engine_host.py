"""The process of an engine: it builds the engine, its connector, its KV pool and the worker loop,
and carries their bytes over zmq.

The wire is a zmq PAIR bound to `address`: frames `[command]` in, `[target, batch]` out, all
msgspec.
"""

import logging
import os
import sys
import time
from typing import Any

import msgspec
import torch
import zmq

from pdserve.configs.schema import WorkerConfig
from pdserve.engine.build import build_engine
from pdserve.engine.grammars.builder import GrammarBuilder
from pdserve.engine.grammars.make import can_begin, grammar_builder
from pdserve.engine.stepping.step_watch import StepWatch
from pdserve.kvtransfer.build import build_connector, build_pool
from pdserve.kvtransfer.connector import KVCacheMemory, KVPool
from pdserve.kvtransfer.p2p.engine_receiver import EngineReceiver
from pdserve.kvtransfer.p2p.remote_rank import RemoteRank
from pdserve.kvtransfer.p2p.sender import Sender
from pdserve.kvtransfer.pool.lmcache_server import SharedServer
from pdserve.kvtransfer.pool.remote_pool import RanksPool, RemotePool
from pdserve.parallel.bring_up import ALONE, LOOPBACK, PHASE_DEADLINE_S, RankGroup
from pdserve.parallel.dims import dims_of
from pdserve.parallel.rank_link import host_links
from pdserve.protocol.codec import decode_command, encode
from pdserve.protocol.events import EventBatch
from pdserve.protocol.start_progress import StartProgress
from pdserve.worker.hosts.engine_load import EngineLoad
from pdserve.worker.hosts.pool_servers import find_pool, server_of_node, shard_of
from pdserve.worker.hosts.rank_metrics import RankReports
from pdserve.worker.loop import WorkerLoop
from pdserve.worker.metrics import WorkerMetrics

logger = logging.getLogger(__name__)

# Purposes of links to other ranks.
HAND_OVERS, POOL, METRICS, EXPERTS = "hand-overs", "pool", "metrics", "experts"
SWITCH_S = (
    # Longest time that a link's thread waits for the interpreter. The default, 5 ms, is longer than
    # a transfer.
    1e-4
)


def _meeting_place(config: WorkerConfig) -> RankGroup:
    """Returns rank 0's group. Ranks of tensor parallelism share its node; stages may be on
    others."""
    dims = dims_of(config.engine)
    if dims.world_size == 1:
        return ALONE
    return RankGroup.host(dims, config.host if dims.pp > 1 else LOOPBACK)


class EngineHost:
    """The first rank of an engine.

    - `config`: configuration of the worker.
    - `worker_id`: unique over restarts.
    - `incarnation`: start time in ns.
    - `address`: zmq address, `ipc://...`.

    `start` loads the model, which is slow; `progress` shows how far it is. `run` serves until a
    Stop. Both run on the same thread. An error in a step ends `run`: an engine that failed once is
    not trusted again. Its process ends, and a new incarnation starts.
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
        self._group = _meeting_place(config)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._sender: Sender | None = None
        self._receiver: EngineReceiver | None = None
        self._pool: KVPool | None = None
        self._pool_server: SharedServer | None = None
        self._reports: RankReports | None = None
        self._experts: EngineLoad | None = None
        self._grammars: GrammarBuilder | None = None
        self._socket: zmq.Socket[bytes] | None = None

    @property
    def meeting(self) -> str:
        """Where the engine's other ranks meet this one (`FollowerHost`); "" if there is no other
        rank."""
        return self._group.address

    @property
    def step_age_s(self) -> float:
        """Seconds for which the engine's step has run; 0 between steps. Any thread may
        read it."""
        return self._loop.engine.step_clock.age_s if self._loop is not None else 0.0

    def start(self) -> dict[str, Any]:
        """Loads the model, allocates and registers the KV cache, and binds the address.

        Returns a description of the engine for the log.
        """
        began = time.monotonic()
        pool_config = self._config.transfer.pool
        self._pool_server = server_of_node(self._config, self._group)
        self._grammars = grammar_builder(self._config.model, self._config.engine, wake=self._wake)
        if can_begin(self._config.model):
            self._grammars.begin()  # it loads while the model does
        engine = build_engine(
            self._config.model,
            self._config.engine,
            self.progress,
            self._group,
            self._lost,
            self._config.slo,
        )
        if engine.device.type == "cpu":
            torch.set_num_threads(1)
        metrics = WorkerMetrics(engine)
        memory = KVCacheMemory(
            engine.kv_cache,
            engine.homes.generations,
            engine.model_fingerprint,
            engine.rows_digest,
            unrounded=engine.unrounded,
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
            self._add_ranks(self._sender, self._receiver)
        if pool_config.mode != "off":
            self.progress.enter("pool")
            self._pool = self._make_pool(memory, metrics)
        if not self._grammars.is_loaded:
            self.progress.enter("grammars")
            self._grammars.name()  # each Hello says it, and the loop must not wait for it
        if not self._group.is_alone:
            self._reports = RankReports(host_links(self._group, METRICS))
            metrics.label_ranks(self._reports.labelled)
            if engine.spec.experts is not None:
                self._experts = EngineLoad(engine.expert_load, host_links(self._group, EXPERTS))
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
            self._grammars,
            self._experts,
            self._config.hands_over,
        )
        self.progress.finish()
        return {
            "model": self._config.model.served_name,
            "device": str(engine.device),
            "num_blocks": engine.homes.num_usable_blocks,
            "block_size": engine.config.block_size,
            "seconds": round(time.monotonic() - began, 2),
        }

    def _add_ranks(self, sender: Sender, receiver: EngineReceiver) -> None:
        """Adds the parts of the KV caches that other ranks have."""
        if self._group.is_alone:
            return
        links = host_links(self._group, HAND_OVERS)
        home_of = self._group.dims.home_of
        ranks = [RemoteRank(links[rank], self._wake, home_of(rank)) for rank in sorted(links)]
        sender.add_ranks([rank.memory(PHASE_DEADLINE_S) for rank in ranks])
        receiver.add_ranks(ranks)

    def _make_pool(self, memory: KVCacheMemory, metrics: WorkerMetrics) -> KVPool:
        """Makes one pool over the pools of all ranks."""
        own = build_pool(
            find_pool(self._config, self._group, self._pool_server, metrics.registry),
            self._config.transfer.pool,
            memory,
            self._wake,
            shard=shard_of(self._group.dims),
            registry=metrics.registry,
        )
        if self._group.is_alone:
            return own
        links = host_links(self._group, POOL)
        home_of = self._group.dims.home_of
        others = [RemotePool(links[rank], self._wake, home_of(rank)) for rank in sorted(links)]
        return RanksPool(own, others)

    def _lost(self, rank: int) -> None:
        """Called on a thread when a rank is gone. Work with other ranks may never return: the
        process ends."""
        self._break_off(f"the process of rank {rank} has ended")

    def _break_off(self, reason: str) -> None:
        """Ends the process from any thread, whatever the engine's thread is waiting for."""
        logger.error("the engine of worker %s ends: %s", self._worker_id, reason)
        logging.shutdown()
        os._exit(1)

    def _pool_name(self) -> str:
        """Returns a name that workers share if they can find each other's chunks.

        Such workers are on one host, use one server, and are alike. A worker of several stages may
        be on several hosts, and gets a name of its own.
        """
        address = self._config.transfer.pool.address
        dims = self._group.dims
        if address is None or dims.pp > 1:
            return f"{self._worker_id}/{self._incarnation}"
        return f"{self._config.host}/{address}/{dims.tp}"

    def run(self) -> None:
        """Serves until a Stop command. Raises what a step raised."""
        assert self._loop is not None and self._socket is not None, "start() comes before run()"
        sys.setswitchinterval(SWITCH_S)
        engine = self._loop.engine
        watch = StepWatch(engine.step_clock, engine.config.step_deadline_s, self._break_off)
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
            watch.stop()
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
        except zmq.Again:  # the queue has no limit, so this can only mean that nobody is connected
            logger.warning(
                "nobody is connected to %s: dropped a batch for %s", self._address, target
            )

    def _wake(self) -> None:
        """Called from any thread when the connector has news."""
        os.eventfd_write(self._wake_fd, 1)

    def _close(self) -> None:
        if self._loop is not None:
            self._loop.engine.close()  # before its KV cache is unregistered
        parts = (
            self._grammars,
            self._pool,
            self._receiver,
            self._sender,
            self._pool_server,
            self._reports,
            self._experts,
        )
        for part in parts:
            if part is not None:
                part.close()
        if self._socket is not None:
            self._socket.close()
