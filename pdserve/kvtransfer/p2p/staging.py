"""The staging ring: registered memory that rows from peers of another block size pass through, on
their way into ours, and rows in 16 bits on their way into a KV cache in e4m3.

A rank has one ring, of NUM_RUNS equal runs; a run holds one piece of a pull, in ring blocks of that
peer's size and dtype, from before its read until its rows were moved on by `ops.repack`. Knows no
pulls, tickets or generations. Made by `build.py`; used by the threads of `link.peer_link.PeerLink`,
each through a `Staging` of its own.

    run:  free -take-> taken: read into -> repacked from -give_back-> free

Nobody waits with a run in its hands, so no two pulls wait for each other. A peer that is frozen
keeps what it has, so each may hold as many runs as would stay free: half of the ring at most, and
of what several frozen ones leave, half again.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdserve.configs.kv_layout import DTYPE_BYTES, KVLayout
from pdserve.engine.memory.device_memory import OutOfMemory, zeros
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.kernels.ops import Ops, ops_for
from pdserve.kvtransfer.transport.agent import TransferAgent, TransferError

NUM_RUNS = 8
LARGEST_BLOCK = 128
WIDEST = 4  # bytes of an element
"""A run is a multiple of so many tokens, of the widest dtype, where there is memory for so much: so
that it holds whole blocks of any size."""


class StagingRing:
    """kv_cache: ours, which rows are moved to. num_bytes: at most; taken and registered by the
    first `open`."""

    def __init__(self, agent: TransferAgent, kv_cache: KVCache, num_bytes: int) -> None:
        self.layout = kv_cache.layout
        self.kv_cache = kv_cache
        narrowest = min(DTYPE_BYTES[group.dtype] for group in self.layout.groups)
        self.run_tokens = _run_tokens(
            num_bytes // NUM_RUNS // self.layout.token_bytes, WIDEST // narrowest
        )
        self.run_bytes = self.run_tokens * self.layout.token_bytes
        self._agent = agent
        self._num_bytes = num_bytes
        self._memory: Tensor | None = None
        self._free = list(range(NUM_RUNS))
        self._held: dict[Staging, int] = {}
        self._waiting: dict[Staging, None] = {}
        self._lock = threading.Lock()

    def open(self, theirs: KVLayout, wake: Callable[[], None]) -> "Staging":
        """theirs: our rows as the peer stores them. wake: called from any thread when a `take` that
        found nothing may be tried again. TransferError when there is no such ring.
        """
        largest = max(theirs.block_size, self.layout.block_size)
        if self.run_bytes % (largest * theirs.token_bytes) or not self.run_tokens:
            needed = NUM_RUNS * largest * theirs.token_bytes
            raise TransferError(
                "error",
                f"transfer.staging_bytes ({self._num_bytes}) is too little for blocks of "
                f"{theirs.block_size} and {self.layout.block_size} tokens: set it to {needed} at "
                "least",
            )
        with self._lock:
            if self._memory is None:
                self._memory = self._allocate()
        return Staging(self, self._memory, theirs, wake)

    def _allocate(self) -> Tensor:
        try:
            memory = zeros((NUM_RUNS * self.run_bytes,), torch.uint8, self.kv_cache.device)
            self._agent.register(memory)
        except (TransferError, OutOfMemory) as error:
            reason = str(error) or "the memory lacks; lower transfer.staging_bytes"
            raise TransferError(
                "error", f"no staging ring of {self._num_bytes} bytes: {reason}"
            ) from error
        return memory

    def take(self, user: "Staging") -> int | None:
        """A free run; None when the user must wait: it is woken."""
        with self._lock:
            if self._held.get(user, 0) < len(self._free):
                self._held[user] = self._held.get(user, 0) + 1
                return self._free.pop()
            self._waiting[user] = None
            return None

    def give_back(self, user: "Staging", run: int) -> None:
        """Nothing reads from it or writes into it any more."""
        with self._lock:
            assert run not in self._free, f"run {run} given back twice"
            self._free.append(run)
            self._held[user] -= 1
            if not self._held[user]:
                del self._held[user]
            waiting = list(self._waiting)
            self._waiting = {}
        for each in waiting:
            each.wake()


class Staging:
    """The ring as one link uses it. ring_blocks: as a KV cache of the peer's block size and
    dtype."""

    def __init__(
        self, ring: StagingRing, memory: Tensor, theirs: KVLayout, wake: Callable[[], None]
    ) -> None:
        self.wake = wake
        self.ring_blocks = KVCache(memory, theirs)
        self._ring = ring
        self._kv_cache = ring.kv_cache
        self._per_run = ring.run_bytes // theirs.block_bytes
        self._ops: Ops = ops_for(memory.device)
        self._stream = torch.cuda.Stream(memory.device) if memory.is_cuda else None
        if self._stream is not None:
            self._compile()

    def take(self, remote_blocks: Sequence[int]) -> np.ndarray | None:
        """Ring blocks for the first of these blocks, as many as a run has, in their order; None:
        see `StagingRing.take`. Neighbours at the peer get neighbours.
        """
        run = self._ring.take(self)
        if run is None:
            return None
        order = np.argsort(np.asarray(remote_blocks[: self._per_run]), kind="stable")
        ring_blocks = np.empty(len(order), np.int32)
        ring_blocks[order] = run * self._per_run + np.arange(len(order))
        return ring_blocks

    def give_back(self, ring_blocks: np.ndarray) -> None:
        """What `take` returned, quiet now."""
        self._ring.give_back(self, int(ring_blocks[0]) // self._per_run)

    def repack(
        self, ring_blocks: np.ndarray, skip: int, num_rows: int, blocks: Sequence[int]
    ) -> Callable[[], bool]:
        """Move num_rows rows, from row `skip` of these ring blocks on, to our blocks, from the
        beginning of the first on. Returns what tells whether it is done; our blocks may be written
        until then.
        """
        with self._on_stream():
            # Triton compiles once more for ids that are not 16-byte aligned
            padding = -len(ring_blocks) % 4
            ids = self._ids([*ring_blocks.tolist(), *[0] * padding, *blocks])
            source_ids = ids[: len(ring_blocks)]
            block_ids = ids[len(ring_blocks) + padding :]
            ours = self._kv_cache
            for source, target, scales in zip(
                self.ring_blocks.groups, ours.groups, ours.scales, strict=True
            ):
                self._ops.kv.repack(source, source_ids, target, block_ids, skip, num_rows, scales)
            if self._stream is None:
                return lambda: True
            return self._stream.record_event().query

    def close(self) -> None:
        """Waits until no repack runs; runs that are still taken may be given back later."""
        if self._stream is not None:
            self._stream.synchronize()

    def _on_stream(self) -> Any:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.as_tensor(ids, dtype=torch.int32).to(self._kv_cache.device, non_blocking=True)

    def _compile(self) -> None:
        """Now, not in the first pull: the kernel is compiled for each pair of sizes and dtypes."""
        with self._on_stream():
            first = self._ids([0])
            source, target = (
                KVCache(torch.zeros_like(cache.data[:1]), cache.layout)
                for cache in (self.ring_blocks, self._kv_cache)
            )
            for theirs, ours, scales in zip(
                source.groups, target.groups, self._kv_cache.scales, strict=True
            ):
                self._ops.kv.repack(theirs, first, ours, first, 0, 1, scales)
        self.close()


def _run_tokens(fitting: int, times: int) -> int:
    """Whole blocks of any size up to LARGEST_BLOCK, of rows up to so many times as wide, or of as
    many sizes as fit."""
    return fitting - fitting % min(LARGEST_BLOCK * times, 1 << max(fitting.bit_length() - 1, 0))
