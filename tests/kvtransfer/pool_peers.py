"""Engines for the pool tests: a few blocks, whose rows are a function of tokens and position, with
a KVPool."""

import itertools
import json
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from kvtransfer.kv_peers import LAYOUT, NUM_BLOCKS
from prometheus_client import CollectorRegistry
from support.local_pool_backend import (
    LocalBlockCopier,
    LocalPoolServer,
    PoolFaults,
    local_pool,
)
from support.pool_operations import copying, expire
from support.waiting import until

from pdserve.configs.transfer import PoolConfig
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.kvtransfer.build import build_pool
from pdserve.kvtransfer.connector import KVCacheMemory, PoolDone, PoolEvent, PoolFailed, unchanged
from pdserve.kvtransfer.pool.chunks import Shard
from pdserve.kvtransfer.pool.lmcache_server import PoolServer
from pdserve.kvtransfer.pool.threaded_pool import ThreadedKVPool

SIZE = LAYOUT.block_size
CHUNK = 4 * SIZE
CONFIG = PoolConfig(
    chunk_tokens=CHUNK,
    l1_gib=0.125,
    start_deadline_s=300.0,
    request_deadline_ms=300_000,
    breaker_s=0.5,
    max_store_fraction=0.5,
)
IMPATIENT_MS = 400
EMPTY = -1.0
_prompts = itertools.count(1)


def prompt(num_tokens: int, *, like: Sequence[int] = ()) -> list[int]:
    """Tokens that no other call gives, after those of `like`."""
    start = next(_prompts) * 100_000
    return [*like, *range(start, start + num_tokens - len(like))]


def rows_of(tokens: Sequence[int], block: int) -> torch.Tensor:
    """The rows that a model would write for block `block` of these tokens. They depend on all
    tokens up to its end."""
    seed = hash(tuple(tokens[: (block + 1) * SIZE]))
    return torch.rand(LAYOUT.shapes[0], generator=torch.Generator().manual_seed(seed))


class Engine:
    """Holds memory, a pool connector, and its events. server: of either kind, or the address of
    one."""

    def __init__(
        self,
        server: LocalPoolServer | PoolServer | str,
        *,
        config: PoolConfig = CONFIG,
        fingerprint: str = "model",
        connect: bool = True,
        device: str = "cpu",
        shard: Shard | None = None,
    ) -> None:
        self.blocks = torch.full((NUM_BLOCKS, *LAYOUT.shapes[0]), EMPTY, device=device)
        self.generations = np.arange(100, 100 + NUM_BLOCKS, dtype=np.int64)
        self.memory = KVCacheMemory(
            KVCache(self.blocks, LAYOUT), self.generations[None], fingerprint, fingerprint + "/rows"
        )
        self.woken = threading.Event()
        self.registry = CollectorRegistry()
        self.pool: Any
        if isinstance(server, LocalPoolServer):
            self.pool = local_pool(
                server, config, self.memory, self.woken.set, shard=shard, registry=self.registry
            )
        else:
            address = server if isinstance(server, str) else server.address
            self.pool = build_pool(
                address, config, self.memory, self.woken.set, shard=shard, registry=self.registry
            )
        assert isinstance(self.pool, ThreadedKVPool)
        self.op_ids = itertools.count(1)
        self.events: list[PoolEvent] = []
        if connect:
            self.wait_available()

    def wait_available(self) -> None:
        until(lambda: self.pool.available)

    @contextmanager
    def impatient(self) -> Iterator[None]:
        """Let operations that begin within wait for each answer of the server for IMPATIENT_MS."""
        patient = self.pool._config
        backend = self.pool._backend
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                self.pool,
                "_config",
                patient.model_copy(update={"request_deadline_ms": IMPATIENT_MS}),
            )
            patch.setattr(backend, "_patience_s", IMPATIENT_MS / 1000, raising=False)
            yield

    def gated_copies(self) -> PoolFaults:
        """From now on copies wait while `.copies_frozen` of the result is set."""
        faults = PoolFaults()
        self.pool.copier = LocalBlockCopier(self.memory, faults)
        return faults

    def compute(self, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        for index, block in enumerate(block_ids):
            self.blocks[block] = rows_of(tokens, index)

    def holds(self, tokens: Sequence[int], block_ids: Sequence[int], first: int = 0) -> bool:
        """Whether the blocks are bit-equal to what was computed for the blocks `first`.. of these
        tokens."""
        return all(
            torch.equal(self.blocks[b].cpu(), rows_of(tokens, i))
            for i, b in enumerate(block_ids, first)
        )

    def untouched(self, block_ids: Iterable[int]) -> bool:
        return bool((self.blocks[list(block_ids)] == EMPTY).all())

    def begin_retrieve(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        *,
        skip: int = 0,
        salt: str = "",
        deadline_s: float = 300.0,
    ) -> int:
        op_id = next(self.op_ids)
        self.pool.retrieve(op_id, tokens, salt, skip, blocks, deadline_s)
        return op_id

    def begin_store(
        self, tokens: Sequence[int], blocks: Sequence[int], salt: str = ""
    ) -> int | None:
        """None when it was refused."""
        op_id = next(self.op_ids)
        accepted = self.pool.store(op_id, tokens, salt, blocks, unchanged(self.generations, blocks))
        return op_id if accepted else None

    def next_event(self, op_id: int | None, timeout_s: float = 60.0) -> PoolEvent:
        """The next event; it must be of this operation. A wake must announce it."""
        assert op_id is not None, "refused"
        end = time.monotonic() + timeout_s
        while not self.events:
            assert self.woken.wait(max(0.0, end - time.monotonic())), (
                f"no event within {timeout_s} s"
            )
            self.woken.clear()
            self.events += self.pool.poll()
        event = self.events.pop(0)
        assert event.op_id == op_id, (event, self.events)
        return event

    def find(self, tokens: Sequence[int], salt: str = "") -> int:
        """Number of tokens whose rows the pool has. They are retrieved into the last blocks, which
        are then as before."""
        scratch = range(NUM_BLOCKS - len(tokens) // SIZE, NUM_BLOCKS)
        before = self.blocks[list(scratch)].clone()
        event = self.retrieve(tokens, scratch, salt=salt)
        assert isinstance(event, PoolDone) or (isinstance(event, PoolFailed) and event.settled), (
            event
        )
        self.blocks[list(scratch)] = before
        return event.num_tokens if isinstance(event, PoolDone) else 0

    def retrieve(self, tokens: Sequence[int], blocks: Sequence[int], **options: Any) -> PoolEvent:
        return self.next_event(self.begin_retrieve(tokens, blocks, **options))

    def store(self, tokens: Sequence[int], blocks: Sequence[int], salt: str = "") -> PoolEvent:
        return self.next_event(self.begin_store(tokens, blocks, salt))

    def keep(self, tokens: Sequence[int], blocks: Sequence[int], salt: str = "") -> None:
        """Compute and store."""
        self.compute(tokens, blocks)
        event = self.store(tokens, blocks, salt)
        assert type(event).__name__ == "PoolStored", event

    def until_copying(self, *op_ids: int | None) -> None:
        until(lambda: copying(self.pool).issuperset(op_ids))

    def expire(self, op_id: int) -> None:
        """The deadline of an operation is now."""
        expire(self.pool, op_id)

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"pdserve_kv_pool_{name}", labels) or 0.0

    def close(self) -> None:
        self.pool.close()


def keep_in_another_process(address: str, tokens: list[int], blocks: list[int]) -> None:
    engine = Engine(address)
    engine.keep(tokens, blocks)
    engine.close()


def left_behind(server: LocalPoolServer | PoolServer) -> dict[str, int]:
    """Counts of what the server still holds for operations that ended: all zero when it is tidy.
    A reservation that is not committed is invisible, and free again after
    lmcache_server.WRITE_TTL_S."""
    if isinstance(server, LocalPoolServer):
        return {"in_use": server.in_use}
    with urllib.request.urlopen(f"http://{server.http_address}/status", timeout=60) as answer:
        status = json.load(answer)
    return {
        "read_locks": status["storage_manager"]["l1_manager"]["read_locked_count"],
        "sessions": status["active_sessions"],
        "prefetches": status["active_prefetch_jobs"],
    }
