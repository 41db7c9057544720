"""KVPool over a PoolBackend: a thread for each kind of work, deadlines, the breaker, and what each
operation does.

Each kind of operation has a thread (lane). The breaker's probe has its own, so that a probe never
waits behind a copy. A clock thread ends late operations. `operations.py` knows which operations
exist and when one is over. Knows no server and no requests. Made by `lmcache_backend.py`.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np

from pdserve.background.threads import KeptThread
from pdserve.configs.transfer import PoolConfig
from pdserve.kvtransfer.connector import (
    PoolDone,
    PoolEvent,
    PoolFailed,
    PoolStored,
    StillValid,
    Wake,
)
from pdserve.kvtransfer.pool.backend import PoolBackend, PoolError, Writing
from pdserve.kvtransfer.pool.breaker import Breaker
from pdserve.kvtransfer.pool.chunks import BlockCopier, Prefix, set_seal
from pdserve.kvtransfer.pool.metrics import PoolMetrics
from pdserve.kvtransfer.pool.operations import GivenUp, Kind, Operation, Operations

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
STORE_PIECE_BYTES = 64 << 20
"""Bytes that a store reserves, copies and commits at a time. A crash or a reused block can waste
about this much."""

Lane = Kind | Literal["probe"]
Run = Callable[[Operation, Prefix], None]


class ThreadedKVPool:
    """Implements `connector.KVPool` for one rank, whose blocks are all of one home. copier: of
    these blocks. operations: public for tests, too."""

    def __init__(
        self,
        backend: PoolBackend,
        copier: BlockCopier,
        config: PoolConfig,
        wake: Wake,
        metrics: PoolMetrics,
    ) -> None:
        self._backend = backend
        self.copier = copier
        self._config = config
        self._metrics = metrics
        self._chunks = backend.chunks
        self.chunk_tokens = backend.chunks.chunk_tokens
        self._store_cap = int(config.max_store_fraction * copier.num_blocks)
        self._breaker = Breaker(config.breaker_s)
        self._lock = threading.Condition()
        self.operations = Operations(self._lock, wake, metrics)
        self._lanes: dict[Lane, queue.SimpleQueue[Callable[[], None] | None]] = {
            kind: queue.SimpleQueue() for kind in ("retrieve", "store", "probe")
        }
        self._threads = [
            KeptThread(f"kv pool {kind}", partial(self._work, lane))
            for kind, lane in self._lanes.items()
        ]
        self._threads.append(KeptThread("kv pool clock", self._watch_clock))

    @property
    def available(self) -> bool:
        return self._refusal() is None

    def retrieve(
        self,
        op_id: int,
        token_ids: Sequence[int],
        salt: str,
        skip_tokens: int,
        local_blocks: Sequence[int],
        deadline_s: float,
        home: int = 0,
    ) -> None:
        size = self._chunks.block_size
        blocks = self._checked(local_blocks)
        if skip_tokens < 0 or skip_tokens % size:
            raise ValueError(
                f"skip_tokens must be whole blocks of {size} tokens, not {skip_tokens}"
            )
        end = skip_tokens + len(blocks) * size
        if not len(blocks) or end - size >= len(token_ids):
            raise ValueError(
                f"local_blocks must belong to tokens after skip_tokens: {len(blocks)} blocks of "
                f"{size} from token {skip_tokens} on do not fit {len(token_ids)} tokens"
            )
        num_chunks = min(-(-end // self.chunk_tokens), len(token_ids) // self.chunk_tokens)
        operation = self._operation(op_id, "retrieve", token_ids, salt, num_chunks, deadline_s)
        operation.blocks = blocks
        operation.skip_blocks = skip_tokens // size
        self._submit(operation, self._retrieve)

    def store(
        self,
        op_id: int,
        token_ids: Sequence[int],
        salt: str,
        block_ids: Sequence[int],
        still_valid: StillValid,
        home: int = 0,
    ) -> bool:
        num_chunks = min(
            len(token_ids) // self.chunk_tokens, len(block_ids) // self._chunks.blocks_per_chunk
        )
        blocks = self._checked(block_ids[: num_chunks * self._chunks.blocks_per_chunk])
        with self._lock:
            refusal = self._refusal()
            if (
                refusal is None
                and self.operations.num_stored_blocks + len(blocks) > self._store_cap
            ):
                refusal = "over-cap"
            if refusal is None and num_chunks:
                self.operations.num_stored_blocks += len(blocks)
        if refusal is not None:
            self._metrics.requests.labels("store", refusal).inc()
        if refusal is not None or not num_chunks:
            return False
        operation = self._operation(op_id, "store", token_ids, salt, num_chunks, float("inf"))
        operation.blocks = blocks
        operation.still_valid = still_valid
        self._submit(operation, self._store)
        return True

    def cancel(self, op_id: int) -> None:
        operation = self.operations.get(op_id)
        if operation is not None:
            self.operations.end(operation, PoolFailed(op_id, "cancelled", "", settled=True))

    def poll(self) -> list[PoolEvent]:
        return self.operations.poll()

    def close(self) -> None:
        """End all operations and wait briefly for copies. Memory that is still being copied is kept
        by its thread."""
        with self._lock:
            if self.operations.is_closed:
                return
            operations = self.operations.close()
            self._lock.notify_all()
        for operation in operations:
            self.operations.end(operation, PoolFailed(operation.op_id, "closed", "", settled=True))
        for lane in self._lanes.values():
            lane.put(None)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        if all([thread.finish(max(0.0, deadline - time.monotonic())) for thread in self._threads]):
            self._backend.close()
        else:
            logger.warning("the KV pool still copies or waits at close: its memory is kept")

    # -- common to all operations

    def _operation(
        self,
        op_id: int,
        kind: Kind,
        token_ids: Sequence[int],
        salt: str,
        num_chunks: int,
        deadline_s: float,
    ) -> Operation:
        """Make an operation. It copies the tokens, because the caller's list may grow. The lane
        computes their digests."""
        now = time.monotonic()
        tokens = tuple(token_ids[: num_chunks * self.chunk_tokens])
        return Operation(op_id, kind, tokens, salt, now, now + deadline_s)

    def _checked(self, block_ids: Sequence[int]) -> np.ndarray:
        """Returns the ids as int64 `[n]`. ValueError if one is not a block of ours."""
        ids = np.array(block_ids, np.int64)
        bad = ids[(ids < 0) | (ids >= self.copier.num_blocks)]
        if len(bad):
            raise ValueError(f"blocks must lie in [0, {self.copier.num_blocks}), not {bad[0]}")
        return ids

    def _refusal(self) -> str | None:
        if self.operations.is_closed:
            return "closed"
        if not self._backend.connected:
            return "not-connected"
        return "breaker-open" if self._breaker.is_open else None

    def _submit(self, operation: Operation, run: Run) -> None:
        with self._lock:
            self.operations.add(operation)
            refusal = self._refusal()
            self._lock.notify_all()  # the clock has a new earliest deadline
        if refusal is not None:
            self.operations.end(operation, PoolFailed(operation.op_id, refusal, "", settled=True))
        elif not operation.tokens:
            self.operations.end(
                operation, PoolFailed(operation.op_id, "miss", "no whole chunk", settled=True)
            )
        else:
            self._lanes[operation.kind].put(partial(self._run, operation, run))

    def _until(self, operation: Operation) -> float:
        return min(operation.deadline, time.monotonic() + self._config.request_deadline_s)

    # -- threads

    def _work(self, lane: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
        while (task := lane.get()) is not None:
            task()

    def _run(self, operation: Operation, run: Run) -> None:
        if operation.over:
            return
        try:
            run(operation, self._chunks.prefix(operation.tokens, operation.salt))
            self._count_answer()
        except GivenUp:
            pass
        except PoolError as error:
            self._count_error(error)
            self.operations.end(
                operation, PoolFailed(operation.op_id, error.reason, str(error), settled=True)
            )
        except Exception as error:
            logger.exception("KV pool: %s failed", operation.kind)
            self.operations.end(
                operation, PoolFailed(operation.op_id, "error", repr(error), settled=True)
            )

    def _count_answer(self) -> None:
        with self._lock:
            self._breaker.succeeded()

    def _count_error(self, error: PoolError) -> None:
        # neither reason means that asking again is useless
        if error.reason in ("loading", "not-connected"):
            return
        with self._lock:
            opened = self._breaker.failed(time.monotonic())
            self._metrics.breaker_open.set(self._breaker.is_open)
            self._lock.notify_all()
        if opened:
            logger.warning(
                "KV pool: not asked for %s s after consecutive errors, last: %s",
                self._config.breaker_s,
                error,
            )

    def _watch_clock(self) -> None:
        while True:
            with self._lock:
                if self.operations.is_closed:
                    return
                now = time.monotonic()
                late = self.operations.late(now)
                probe = self._breaker.probe_at <= now
                if probe:
                    self._breaker.begin_probe()
                    self._lanes["probe"].put(self._probe)
                if not late and not probe:
                    self._lock.wait(self._next_alarm(now))
            for operation in late:
                self.operations.end(
                    operation, PoolFailed(operation.op_id, "deadline", "", settled=True)
                )

    def _next_alarm(self, now: float) -> float | None:
        first = min(self.operations.next_deadline, self._breaker.probe_at)
        return None if first == float("inf") else first - now

    def _probe(self) -> None:
        good = False
        try:
            self._backend.probe(time.monotonic() + self._config.request_deadline_s)
            good = True
        except PoolError as error:
            logger.info("KV pool: the probe failed: %s", error)
        finally:
            with self._lock:
                self._breaker.probed(good, time.monotonic())
                self._metrics.breaker_open.set(self._breaker.is_open)
                self._lock.notify_all()

    # -- the operations, each on its lane

    def _retrieve(self, operation: Operation, prefix: Prefix) -> None:
        per_chunk = self._chunks.blocks_per_chunk
        first = operation.skip_blocks // per_chunk
        done = 0  # blocks
        with self._backend.reading(prefix, first, self._until(operation)) as buffers:
            for index, buffer in enumerate(buffers, first):
                begin = max(index * per_chunk - operation.skip_blocks, 0)
                end = min((index + 1) * per_chunk - operation.skip_blocks, len(operation.blocks))
                row = max(operation.skip_blocks - index * per_chunk, 0)
                with self.operations.touching(operation):
                    good = self.copier.load(
                        buffer, operation.blocks[begin:end], row, prefix.seals[index]
                    )
                if not good:
                    self._metrics.requests.labels("retrieve", "wrong-content").inc()
                    logger.warning("KV pool: a chunk does not match its key; treated as missing")
                    break
                done = end
            self.operations.end(operation, self._retrieved(operation, done))

    def _retrieved(self, operation: Operation, done: int) -> PoolDone | PoolFailed:
        if not done:
            return PoolFailed(operation.op_id, "miss", "", settled=True)
        num_bytes = done * self.copier.block_bytes
        self._metrics.bytes.labels("retrieve").inc(num_bytes)
        num_tokens = (operation.skip_blocks + done) * self._chunks.block_size
        return PoolDone(
            operation.op_id, num_tokens, num_bytes, time.monotonic() - operation.started
        )

    def _store(self, operation: Operation, prefix: Prefix) -> None:
        copied = 0
        step = max(1, STORE_PIECE_BYTES // self._chunks.num_bytes)
        for first in range(0, prefix.num_chunks, step):
            last = min(first + step, prefix.num_chunks)
            with self._backend.writing(prefix, first, last, self._until(operation)) as writing:
                copied += self._fill(operation, prefix, writing)
        self.operations.end(operation, PoolStored(operation.op_id, len(prefix.tokens), copied))

    def _fill(self, operation: Operation, prefix: Prefix, writing: Writing) -> int:
        """Copy, then check that the sources are still the same, then seal and commit. Returns the
        number of bytes."""
        per_chunk = self._chunks.blocks_per_chunk
        for index, buffer in writing.buffers.items():
            with self.operations.touching(operation):
                self.copier.save(
                    buffer, operation.blocks[index * per_chunk : (index + 1) * per_chunk]
                )
        if not writing.buffers:
            return 0
        assert operation.still_valid is not None
        if not operation.still_valid():
            self.operations.end(
                operation,
                PoolFailed(operation.op_id, "reused", "a source block was reused", settled=True),
            )
            raise GivenUp
        for index, buffer in writing.buffers.items():
            set_seal(buffer, prefix.seals[index])
        writing.commit()
        num_bytes = len(writing.buffers) * per_chunk * self.copier.block_bytes
        self._metrics.bytes.labels("store").inc(num_bytes)
        return num_bytes
