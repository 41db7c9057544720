"""Makes an engine's (sender, receiver) pair over one shared agent (`build_connector`), and its pool
(`build_pool`).

A registry names the transports; nixl is imported only if it is chosen. The engine process calls
this once. The KV cache and the generation table are registered here, once. So they must be
allocated for good before, and CUDA graphs must be captured.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from prometheus_client import CollectorRegistry

from pdserve.configs.transfer import PoolConfig, TransferConfig
from pdserve.kvtransfer.connector import KVCacheMemory, KVPool, Wake
from pdserve.kvtransfer.p2p.connection import OwnKVCache
from pdserve.kvtransfer.p2p.engine_receiver import EngineReceiver
from pdserve.kvtransfer.p2p.mailbox import Mailbox
from pdserve.kvtransfer.p2p.metrics import TransferMetrics
from pdserve.kvtransfer.p2p.ranges import groups_of
from pdserve.kvtransfer.p2p.rank_receiver import RankReceiver
from pdserve.kvtransfer.p2p.sender import Sender
from pdserve.kvtransfer.p2p.staging import StagingRing
from pdserve.kvtransfer.pool.chunks import Shard
from pdserve.kvtransfer.transport.agent import TransferAgent, memory_of
from pdserve.kvtransfer.transport.local_agent import LocalAgent
from pdserve.protocol.handoff import KVCacheMeta, RankMemory


@dataclass(frozen=True)
class Transport:
    """A way to move bytes. make_agent: makes an agent with a name. in_process: all peers, and so
    their letters, stay in this process."""

    make_agent: Callable[[str, TransferConfig], TransferAgent]
    in_process: bool


def _nixl(name: str, config: TransferConfig) -> TransferAgent:
    from pdserve.kvtransfer.transport.nixl_agent import NixlAgent

    return NixlAgent(name, progress_delay_us=config.progress_delay_us, ucx_tls=config.ucx_tls)


def _local(name: str, config: TransferConfig) -> TransferAgent:
    return LocalAgent(name)


# "local" is for tests, which make their own configuration for it.
TRANSPORTS = {"nixl": Transport(_nixl, False), "local": Transport(_local, True)}


def build_connector(
    config: TransferConfig,
    memory: KVCacheMemory,
    engine_id: str,
    incarnation: int,
    wake: Wake,
    *,
    host: str = "127.0.0.1",
    registry: CollectorRegistry | None = None,
) -> tuple[Sender, EngineReceiver]:
    """Make the sender and the receiver of rank 0. config.connector chooses the transport.

    - incarnation: see KVCacheMeta.
    - wake: called from any thread when a `poll` has something.
    - host: this machine's address, to which peers send their letters.
    - registry: gets the counters.

    ValueError if the memory is not as KVCacheMemory says.
    """
    agent, meta, own = _registered(config, memory, engine_id, incarnation, 0)
    assert memory.generations is not None and memory.home == 0, "this is rank 0"
    mailbox = Mailbox(
        engine_id, incarnation, None if TRANSPORTS[config.connector].in_process else host
    )
    meta = msgspec.structs.replace(meta, mailbox=mailbox.party.mailbox)
    metrics = TransferMetrics(registry if registry is not None else CollectorRegistry())
    sender = Sender(agent, mailbox, meta, memory.generations, config.lease_s, wake, metrics)
    return sender, EngineReceiver(RankReceiver(agent, own, wake, metrics), mailbox, wake)


def build_rank(
    config: TransferConfig,
    memory: KVCacheMemory,
    engine_id: str,
    incarnation: int,
    rank: int,
    wake: Wake,
    *,
    registry: CollectorRegistry | None = None,
) -> tuple[RankMemory, RankReceiver]:
    """Make the parts of another rank: a KV cache that peers may read, and a receiver. Rank 0 adds
    the first to its sender's description (`Sender.add_ranks`) and the second to its receiver
    (`EngineReceiver.add_ranks`). registry: gets the rank's counters.
    """
    agent, meta, own = _registered(config, memory, engine_id, incarnation, rank)
    metrics = TransferMetrics(registry or CollectorRegistry())
    return meta.ranks[0], RankReceiver(agent, own, wake, metrics)


def _registered(
    config: TransferConfig, memory: KVCacheMemory, engine_id: str, incarnation: int, rank: int
) -> tuple[TransferAgent, KVCacheMeta, OwnKVCache]:
    """Register the memory with an agent. Returns the agent, the description for peers, and the
    receivers' view of the memory."""
    if memory.generations is not None:
        _check(memory.generations, memory.kv_cache.num_blocks)
    agent = TRANSPORTS[config.connector].make_agent(f"{engine_id}/{incarnation}/{rank}", config)
    agent.register(memory.kv_cache.data)
    if memory.generations is not None:
        agent.register(torch.from_numpy(memory.generations))
    ring = StagingRing(agent, memory.kv_cache, config.staging_bytes)
    own = OwnKVCache(memory, ring, rank)
    return agent, _describe(agent, memory, engine_id, incarnation), own


def _check(generations: np.ndarray, num_blocks: int) -> None:
    if (
        generations.dtype != "int64"
        or generations.shape[1:] != (num_blocks,)
        or not generations.flags.c_contiguous
    ):
        raise ValueError(
            f"generations must be contiguous int64 [homes, {num_blocks}], not {generations.dtype} "
            f"{generations.shape}"
        )


def _describe(
    agent: TransferAgent, memory: KVCacheMemory, engine_id: str, incarnation: int
) -> KVCacheMeta:
    layout = memory.kv_cache.layout
    kind, device_id = memory_of(memory.kv_cache.data)
    rank_memory = RankMemory(
        agent_name=agent.name,
        agent_metadata=agent.metadata,
        address=memory.kv_cache.data.data_ptr(),
        memory=kind,
        device_id=device_id,
        block_bytes=layout.block_bytes,
        groups=groups_of(layout),
        home=memory.home,
    )
    generations = memory.generations
    return KVCacheMeta(
        engine_id=engine_id,
        incarnation=incarnation,
        connector=agent.kind,
        model=memory.model_fingerprint,
        rows=memory.rows_digest,
        block_size=layout.block_size,
        num_blocks=memory.kv_cache.num_blocks,
        generation_address=0 if generations is None else generations.ctypes.data,
        mailbox="",
        ranks=(rank_memory,),
    )


def build_pool(
    address: str,
    config: PoolConfig,
    memory: KVCacheMemory,
    wake: Wake,
    *,
    shard: Shard | None = None,
    registry: CollectorRegistry | None = None,
) -> KVPool:
    """Make the engine's pool over the server at `address` (config.address, or that of a
    `pool.lmcache_server.PoolServer`). It connects and reconnects in the background. shard: the part
    of the rows that this rank stores. ValueError if config does not fit the memory."""
    from pdserve.kvtransfer.pool.lmcache_backend import lmcache_pool

    return lmcache_pool(address, config, memory, wake, shard=shard, registry=registry)
