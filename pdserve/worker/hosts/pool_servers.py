"""The KV pool's servers of one engine, and what each rank keeps in them.

A server shares memory with the ranks that use it. So each node that has ranks needs one server,
whichever homes the ranks belong to. Used by both hosts. Knows no chunks.
"""

from prometheus_client import CollectorRegistry

from pdserve.configs.schema import WorkerConfig
from pdserve.kvtransfer.pool.chunks import Shard
from pdserve.kvtransfer.pool.lmcache_server import SharedServer
from pdserve.kvtransfer.pool.metrics import PoolServerCollector
from pdserve.parallel.bring_up import RankGroup
from pdserve.parallel.dims import ParallelDims


def shard_of(dims: ParallelDims) -> Shard:
    """Returns the part of each chunk that this rank keeps: its place among the ranks of its home.

    Ranks of other homes at the same place keep, and find, the same part.
    """
    return Shard(dims.tp * dims.pp, dims.tp_rank + dims.tp * dims.pp_rank)


def server_of_node(config: WorkerConfig, group: RankGroup) -> SharedServer | None:
    """Starts and returns the server that this rank keeps; None if it keeps none.

    If the configuration says that servers are started here, rank 0 keeps one, and so does the first
    rank of a stage on another node.
    """
    if config.transfer.pool.mode != "start":
        return None
    dims = group.dims
    is_first = dims.pp_rank > 0 and dims.stage_rank == 0 and config.host != group.rank0_host
    return SharedServer(config.transfer.pool) if is_first or dims.rank == 0 else None


def find_pool(
    config: WorkerConfig,
    group: RankGroup,
    own: SharedServer | None,
    registry: CollectorRegistry,
) -> str:
    """Returns the address of the server on this rank's node. Every rank calls it once.

    own: what `server_of_node` has returned. Raises what prevents that server from starting.
    registry: gets its metrics.
    """
    if own is not None:
        registry.register(PoolServerCollector(lambda: own.evicted_chunks))
    pool = config.transfer.pool
    said = group.agree("pool", [config.host, own.wait_ready() if own is not None else ""])
    if pool.mode == "connect":
        assert pool.address is not None, "PoolConfig asks for one"
        return pool.address
    return next(str(address) for host, address in said if host == config.host and address)
