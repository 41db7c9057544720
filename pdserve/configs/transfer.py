"""The configuration of the KV connector: hand-off between engines, and the KV pool."""

from typing import Literal

from pydantic import Field, model_validator

from pdserve.configs.base import Config


class PoolConfig(Config):
    """The KV pool shared by the engines of one host: LMCache's server, reached through shared
    memory.

    mode: "off"; "connect" to a server that runs at `address`; "start": the first worker of a host
    starts one at `address`, as its child, the others use it, and one of them starts the next when
    it dies; without an address each worker has one for itself. address: "host:port" on this host.
    chunk_tokens: what is stored and found at once, a multiple of the engine's block_size, the same
    for all users of a server. l1_gib: memory of a started server, in /dev/shm. disk_folder: a
    started server also writes chunks there and finds them after a restart. start_deadline_s: how
    long it may take to be ready. request_deadline_ms: longest wait for one answer of the server;
    any longer is a miss. breaker_s: after three errors in a row nobody asks for so long.
    max_store_fraction: share of the KV blocks that stores may hold at once.
    """

    mode: Literal["off", "connect", "start"] = "off"
    address: str | None = None
    chunk_tokens: int = Field(256, ge=16)
    l1_gib: float = Field(4.0, gt=0)
    disk_folder: str | None = None
    start_deadline_s: float = Field(60.0, gt=0)
    request_deadline_ms: int = Field(200, ge=1)
    breaker_s: float = Field(5.0, gt=0)
    max_store_fraction: float = Field(0.25, gt=0, le=1)

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
                    f"pool.address must be host:port, as 127.0.0.1:5755, not {self.address!r}"
                )
            if self.mode == "start" and host != "localhost" and not host.startswith("127."):
                raise ValueError(
                    f"pool.address of a started server must be on loopback, as 127.0.0.1:{port}, "
                    f"not {host}: it is for this host, and believes whoever reaches it"
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
        """ValueError unless a chunk is a whole number of blocks."""
        if self.chunk_tokens % block_size:
            near = max(1, self.chunk_tokens // block_size) * block_size
            raise ValueError(
                f"pool.chunk_tokens ({self.chunk_tokens}) must be a multiple of engine.block_size "
                f"({block_size}): set it to {near}"
            )
        return self.chunk_tokens // block_size


class TransferConfig(Config):
    """KV hand-off between workers.

    overlap: D pulls a long prompt's rows while P computes the rest, whose last chunk is cut short
    for it; "auto" cuts only where the link is so slow that it pays (P's prefill takes 3 % longer).
    lease_s: how long P keeps published blocks without a sign from D. pull_deadline_s: how long D
    waits for one pull before it recomputes. progress_delay_us: sleep of NIXL's progress thread; 0
    spins a core, and is slower: it keeps those who wait for a read from the agent's lock. ucx_tls:
    UCX transports, None lets UCX choose. max_pinned_fraction: share of P's KV cache that published
    blocks may pin; max_reserved_fraction: share of D's KV cache that pulls may hold;
    max_quarantined_fraction: share that reads which do not end may hold before their peers are left
    alone. staging_bytes: memory of each rank that rows from peers of another block size or KV
    dtype pass through; taken when the first such peer connects. fetch_prefixes: a prompt's
    beginning that another worker has cached is fetched from there when that is faster than
    computing it, and others may fetch from this worker. pool: a pool of KV shared through LMCache's
    server.
    """

    connector: Literal["nixl"] = "nixl"
    overlap: bool | Literal["auto"] = "auto"
    lease_s: float = Field(30.0, gt=0)
    pull_deadline_s: float = Field(10.0, gt=0)
    progress_delay_us: int = Field(1000, ge=0)
    ucx_tls: str | None = None
    max_pinned_fraction: float = Field(0.5, gt=0, le=1)
    max_reserved_fraction: float = Field(0.5, gt=0, le=1)
    max_quarantined_fraction: float = Field(0.25, gt=0, le=1)
    staging_bytes: int = Field(1 << 30, ge=1)
    fetch_prefixes: bool = True
    pool: PoolConfig = PoolConfig()
