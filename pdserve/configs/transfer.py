"""The configuration of the KV connector: hand-off between engines, and the KV pool."""

from typing import Literal

from pydantic import Field, model_validator

from pdserve.configs.base import Config


class PoolConfig(Config):
    """The KV pool that the engines of one host share: LMCache's server, in shared memory."""

    mode: Literal["off", "connect", "start"] = "off"
    """`off`: no pool. `connect`: workers use a server that already runs at `address`. `start`: the
    first worker of a host starts a server at `address`. The others use it, and one of them restarts
    it if it dies. Without an address, each worker starts its own."""
    address: str | None = None
    """The server's `host:port` on this host."""
    chunk_tokens: int = Field(256, ge=16)
    """Number of tokens that are stored and found together. It must be a multiple of
    `engine.block_size`, and the same for all users of a server."""
    l1_gib: float = Field(4.0, gt=0)
    """Memory of a server that is started here, in /dev/shm, in GiB."""
    disk_folder: str | None = None
    """Folder in which a server that is started here also keeps chunks. It finds them after a
    restart. None: no disk."""
    start_deadline_s: float = Field(60.0, gt=0)
    """Seconds that a server may take to become ready."""
    request_deadline_ms: int = Field(200, ge=1)
    """Longest wait for one answer of the server, in milliseconds; a slower answer counts as a miss.
    """
    breaker_s: float = Field(5.0, gt=0)
    """Seconds for which no engine asks the server after three consecutive errors."""
    max_store_fraction: float = Field(0.25, gt=0, le=1)
    """Largest share of the KV blocks that may wait to be stored in the pool at the same time."""

    @model_validator(mode="after")
    def _check(self) -> "PoolConfig":
        if self.mode == "connect" and self.address is None:
            raise ValueError(
                "pool.address must name the running server as host:port when pool.mode is 'connect'"
            )
        if self.address is not None:
            host, _, port = self.address.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError(
                    f"pool.address must be host:port, such as 127.0.0.1:5755, not {self.address!r}"
                )
            if self.mode == "start" and host != "localhost" and not host.startswith("127."):
                raise ValueError(
                    "pool.address of a started server must be on loopback, such as "
                    f"127.0.0.1:{port}, not {host}: the server trusts whoever reaches it"
                )
        if self.disk_folder is not None and self.mode != "start":
            raise ValueError(
                "pool.disk_folder belongs to a server started here: set pool.mode: start, or give "
                "the folder to the running server (--l2-adapter)"
            )
        return self

    @property
    def request_deadline_s(self) -> float:
        return self.request_deadline_ms / 1000

    def blocks_per_chunk(self, block_size: int) -> int:
        """Number of blocks in a chunk. ValueError unless it is a whole number."""
        if self.chunk_tokens % block_size:
            near = max(1, self.chunk_tokens // block_size) * block_size
            raise ValueError(
                f"pool.chunk_tokens ({self.chunk_tokens}) must be a multiple of engine.block_size "
                f"({block_size}): set it to {near}"
            )
        return self.chunk_tokens // block_size


class TransferConfig(Config):
    """KV hand-off between workers (docs/design/kv-handoff.md)."""

    connector: Literal["nixl"] = "nixl"
    """The library that moves KV blocks between workers."""
    overlap: bool | Literal["auto"] = "auto"
    """Whether a decode worker pulls a long prompt's blocks while the prefill worker still computes.
    The last chunk is then cut short, which makes prefill 3 % longer. `auto` does so only if the
    link is slow enough for it to pay."""
    lease_s: float = Field(30.0, gt=0)
    """Seconds that a prefill worker keeps published blocks without hearing from the decode worker.
    """
    pull_deadline_s: float = Field(10.0, gt=0)
    """Seconds that a decode worker waits for one pull before it computes the prompt itself."""
    progress_delay_us: int = Field(10_000, ge=0, le=10_000)
    """Longest sleep of NIXL's progress thread, in microseconds. UCX wakes it earlier when something
    comes. 0 keeps a core busy. It is also slower, because the thread then always holds the agent's
    lock."""
    ucx_tls: str | None = None
    """UCX transports (`UCX_TLS`); None: UCX chooses."""
    max_pinned_fraction: float = Field(0.5, gt=0, le=1)
    """Largest share of a prefill worker's KV cache that may be pinned by published blocks."""
    max_reserved_fraction: float = Field(0.5, gt=0, le=1)
    """Largest share of a decode worker's KV cache that may be reserved for pulls."""
    max_quarantined_fraction: float = Field(0.25, gt=0, le=1)
    """Limit for blocks held by stuck reads, as a share of the KV cache. Above it, no more reads go
    to those peers."""
    staging_bytes: int = Field(1 << 30, ge=1)
    """Memory per rank for blocks from peers with another block size or KV data type, in bytes. It
    is allocated when the first such peer connects."""
    fetch_prefixes: bool = True
    """Whether a prompt's beginning is fetched from another worker's prefix cache if that is faster
    than computing it. Other workers may then also fetch from this worker. With `mode: aggregated`
    this needs at least two `decode.replicas`, or a `decode.autoscaling.max` of two."""
    pool: PoolConfig = PoolConfig()
    """The KV pool that the engines of one host share."""
