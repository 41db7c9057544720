"""The KV pool inside one process: `LocalPoolServer` keeps the chunks, `local_pool` makes a
ThreadedKVPool over it.

Tests can make the server slow, frozen, dead or wrong (`PoolFaults`) and so drive every branch of
`kvtransfer/pool/threaded_pool.py`. Pools share chunks when they share the server.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from prometheus_client import CollectorRegistry

from pdserve.configs.transfer import PoolConfig
from pdserve.kvtransfer.connector import KVCacheMemory, Wake
from pdserve.kvtransfer.pool.backend import PoolError
from pdserve.kvtransfer.pool.chunks import BlockCopier, BlockIds, Chunks, Prefix, Shard
from pdserve.kvtransfer.pool.metrics import PoolMetrics
from pdserve.kvtransfer.pool.threaded_pool import ThreadedKVPool

POLL_S = 0.001


@dataclass
class PoolFaults:
    """How the server misbehaves.

    - `delay_s`: time that every answer takes.
    - `frozen`: no answer comes.
    - `dead`: everything is refused at once, and forgotten.
    - `wrong`: chunks that are read hold another prompt's rows.
    - `copies_frozen`: copies between blocks and chunks do not end, as with a stalled device.
    """

    delay_s: float = 0.0
    frozen: bool = False
    dead: bool = False
    wrong: bool = False
    copies_frozen: bool = False


@dataclass(eq=False)
class LocalPoolServer:
    """Chunks by seal. in_use: contexts that are open, for tests that count what is left behind."""

    faults: PoolFaults = field(default_factory=PoolFaults)
    chunks: dict[bytes, torch.Tensor] = field(default_factory=dict)
    in_use: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def forget(self, rng: random.Random) -> None:
        """Half of the chunks, wherever they belong."""
        with self.lock:
            for seal in [seal for seal in self.chunks if rng.random() < 0.5]:
                del self.chunks[seal]

    def die(self) -> None:
        """As a server process that is killed; `faults.dead = False` starts an empty one."""
        self.faults.dead = True
        with self.lock:
            self.chunks.clear()


@dataclass(eq=False)
class _LocalWriting:
    buffers: dict[int, torch.Tensor]
    store: Callable[[], None]

    def commit(self) -> None:
        self.store()


class LocalPoolBackend:
    """See `kvtransfer.pool.backend.PoolBackend`."""

    def __init__(self, server: LocalPoolServer, chunks: Chunks) -> None:
        self._server = server
        self.chunks = chunks

    @property
    def connected(self) -> bool:
        return not self._server.faults.dead

    @contextmanager
    def reading(self, prefix: Prefix, first: int, until: float) -> Iterator[list[torch.Tensor]]:
        with self._answering(until):
            found = self._found(prefix, first)
            if self._server.faults.wrong:
                found = [torch.flip(buffer, (0,)) for buffer in found]
            yield found

    @contextmanager
    def writing(
        self, prefix: Prefix, first: int, last: int, until: float
    ) -> Iterator[_LocalWriting]:
        with self._answering(until):
            size = self.chunks.num_bytes
            lacking = [i for i in range(first, last) if prefix.seals[i] not in self._server.chunks]
            buffers = {i: torch.zeros(size, dtype=torch.uint8) for i in lacking}

            def store() -> None:
                self._wait(until)
                with self._server.lock:
                    self._server.chunks.update(
                        {prefix.seals[i]: buffer for i, buffer in buffers.items()}
                    )

            yield _LocalWriting(buffers, store)

    def probe(self, until: float) -> None:
        self._wait(until)

    def close(self) -> None:
        pass

    def _found(self, prefix: Prefix, first: int) -> list[torch.Tensor]:
        found = []
        with self._server.lock:
            for seal in prefix.seals:
                if seal not in self._server.chunks:
                    break
                found.append(self._server.chunks[seal])
        return found[first:]

    @contextmanager
    def _answering(self, until: float) -> Iterator[None]:
        self._wait(until)
        with self._server.lock:
            self._server.in_use += 1
        try:
            yield
        finally:
            with self._server.lock:
                self._server.in_use -= 1

    def _wait(self, until: float) -> None:
        faults = self._server.faults
        ready = time.monotonic() + self._server.faults.delay_s
        while faults.frozen or time.monotonic() < ready:
            if faults.dead:
                break
            if time.monotonic() >= until:
                raise PoolError("timeout", "the local pool does not answer")
            time.sleep(POLL_S)
        if faults.dead:
            raise PoolError("not-connected", "the local pool is dead")


class LocalBlockCopier(BlockCopier):
    """Copies that end only while `faults.copies_frozen` is off."""

    def __init__(self, memory: KVCacheMemory, faults: PoolFaults) -> None:
        super().__init__(memory)
        self._faults = faults

    def save(self, buffer: torch.Tensor, block_ids: BlockIds) -> None:
        super().save(buffer, block_ids[: len(block_ids) // 2])
        self._thaw()
        super().save(buffer, block_ids)

    def load(self, buffer: torch.Tensor, block_ids: BlockIds, first: int, seal: bytes) -> bool:
        self._thaw()
        return super().load(buffer, block_ids, first, seal)

    def _thaw(self) -> None:
        while self._faults.copies_frozen:
            time.sleep(POLL_S)


def local_pool(
    server: LocalPoolServer,
    config: PoolConfig,
    memory: KVCacheMemory,
    wake: Wake,
    *,
    shard: Shard | None = None,
    registry: CollectorRegistry | None = None,
) -> ThreadedKVPool:
    """A KVPool over `server`. ValueError when config does not fit the memory."""
    block_size = memory.kv_cache.layout.block_size
    chunks = Chunks(memory, config.blocks_per_chunk(block_size), shard or Shard())
    metrics = PoolMetrics(registry or CollectorRegistry())
    copier = LocalBlockCopier(memory, server.faults)
    return ThreadedKVPool(LocalPoolBackend(server, chunks), copier, config, wake, metrics)
