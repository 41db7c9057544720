"""PoolBackend over LMCache's multi-process server on the same host. Only the `lmcache_*` files
import lmcache.

It speaks the "engine-driven" protocol (tried with 0.5.6). The server reserves or locks buffers of a
shared memory and names them, we copy, we commit. So the server never touches our memory. LMCache's
own gather and scatter are not needed; they would have to know the layout of a KV cache. A chunk is
registered as one opaque row of bytes.

Findings about that server, and our answers:

- It never answers a request that it cannot serve, such as one for a registration that it does not
  know after a restart. A lookup of an unknown layout finds nothing, for ever. So its connection is
  watched. When it breaks, the `Registration` ends, with all waits in it, and a new one registers.
  Instance ids are never used twice. Otherwise we would use offsets of a new server to write into
  the mapping of the old one.
- A lookup locks what it finds until it is read or freed (300 s), and each request id has a session
  (600 s). `Talk` tracks and settles both as debts. If an answer is late, `ServerConnection` settles
  them afterwards.
- If an instance is unregistered, or ended because of silence, the server *commits* what was
  reserved for it and not written. So we unregister only when nothing is reserved, and the seals of
  `chunks.py` reveal such chunks.
"""

import itertools
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from prometheus_client import CollectorRegistry

from pdserve.configs.transfer import PoolConfig
from pdserve.kvtransfer.connector import KVCacheMemory, Wake
from pdserve.kvtransfer.pool.backend import PoolError
from pdserve.kvtransfer.pool.chunks import BlockCopier, Chunks, Prefix, Shard
from pdserve.kvtransfer.pool.lmcache_connection import ServerConnection
from pdserve.kvtransfer.pool.lmcache_registration import Registration
from pdserve.kvtransfer.pool.lmcache_talk import Talk
from pdserve.kvtransfer.pool.metrics import PoolMetrics
from pdserve.kvtransfer.pool.threaded_pool import ThreadedKVPool


class _LMCacheWriting:
    """Implements `backend.Writing`."""

    def __init__(self, talk: Talk, first: int, last: int, patience_s: float) -> None:
        self._talk = talk
        self._first = first
        self._last = last
        self._patience_s = patience_s
        self.buffers = talk.reserve(first, last)
        self.committed = not self.buffers

    def commit(self) -> None:
        self._talk.commit(self._first, self._last, time.monotonic() + self._patience_s)
        self.committed = True


class LMCacheBackend:
    """Implements `backend.PoolBackend`. Connects and reconnects in the background."""

    def __init__(
        self, address: str, chunks: Chunks, request_deadline_s: float, device: torch.device
    ) -> None:
        self.chunks = chunks
        self._patience_s = request_deadline_s
        self._link = ServerConnection(address, chunks, device)
        self._name = secrets.token_hex(8)
        self._counter = itertools.count()

    @property
    def connected(self) -> bool:
        return self._link.session is not None

    @contextmanager
    def reading(self, prefix: Prefix, first: int, until: float) -> Iterator[list[torch.Tensor]]:
        with self._talking(self._session(), prefix, until) as talk:
            found = talk.find()
            yield talk.read(first, found) if found > first else []

    @contextmanager
    def writing(
        self, prefix: Prefix, first: int, last: int, until: float
    ) -> Iterator[_LMCacheWriting]:
        session = self._session()
        committed = False
        try:
            with self._talking(session, prefix, until) as talk:
                writing = _LMCacheWriting(talk, first, last, self._patience_s)
                yield writing
                committed = writing.committed
        finally:
            session.left_reserved |= not committed

    def probe(self, until: float) -> None:
        session = self._session()
        session.wait(session.call("ping", None), until)
        session.wait(session.register(), until)

    def close(self) -> None:
        self._link.close()

    def _session(self) -> Registration:
        session = self._link.session
        if session is None:
            raise PoolError("not-connected", "no pool server answers")
        return session

    @contextmanager
    def _talking(self, session: Registration, prefix: Prefix, until: float) -> Iterator[Talk]:
        talk = Talk(session, prefix, f"{self._name}-{next(self._counter)}", until)
        try:
            yield talk
        finally:
            self._link.owe(talk.debt())


def lmcache_pool(
    address: str,
    config: PoolConfig,
    memory: KVCacheMemory,
    wake: Wake,
    *,
    shard: Shard | None = None,
    registry: CollectorRegistry | None = None,
) -> ThreadedKVPool:
    """Make a KVPool over the server at `address` (host:port on this host). shard: the part of the
    rows that this rank stores. ValueError if config does not fit the memory."""
    block_size = memory.kv_cache.layout.block_size
    chunks = Chunks(memory, config.blocks_per_chunk(block_size), shard or Shard())
    backend = LMCacheBackend(address, chunks, config.request_deadline_s, memory.kv_cache.device)
    metrics = PoolMetrics(registry or CollectorRegistry())
    return ThreadedKVPool(backend, BlockCopier(memory), config, wake, metrics)
