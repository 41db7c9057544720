"""The staging ring is registered memory through which rows pass on their way into our blocks. It is
used for rows from peers with another block size, and for 16-bit rows that go into a KV cache in
e4m3.

A rank has one ring of NUM_RUNS equal runs. A run holds one piece of a pull, in ring blocks of that
peer's size and dtype. It is held from before the read until `ops.repack` has moved the rows. Knows
no pulls, tickets or generations. Made by `build.py`. The threads of `link.peer_link.PeerLink` use
it, each through its own `Staging`.

    run:  free -take-> taken: read into -> repacked from -give_back-> free

A run that is taken is used at once, so no two pulls wait for each other. A frozen peer keeps its
runs. So a peer may hold only as many runs as stay free: at most half of the ring, and of what
several frozen peers leave, half again.
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
WIDEST = 4  # bytes per element
"""A run is a multiple of LARGEST_BLOCK tokens of the widest dtype, if there is enough memory. So it
holds whole blocks of any size."""


class StagingRing:
    """The ring of one rank. kv_cache: our KV cache, to which rows are moved. num_bytes: maximum
    size; the first `open` takes and registers the memory."""

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
        """Open the ring for one link. theirs: layout of our rows as the peer stores them. wake:
        called from any thread when a `take` that found nothing may be retried. TransferError if
        there is no such ring.
        """
        largest = max(theirs.block_size, self.layout.block_size)
        if self.run_bytes % (largest * theirs.token_bytes) or not self.run_tokens:
            needed = NUM_RUNS * largest * theirs.token_bytes
            raise TransferError(
                "error",
                f"transfer.staging_bytes ({self._num_bytes}) is too little for blocks of "
                f"{theirs.block_size} and {self.layout.block_size} tokens: set it to at least "
                f"{needed}",
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
            reason = str(error) or "there is not enough memory; lower transfer.staging_bytes"
            raise TransferError(
                "error", f"no staging ring of {self._num_bytes} bytes: {reason}"
            ) from error
        return memory

    def take(self, user: "Staging") -> int | None:
        """Take a free run; None if the user must wait. It is woken later."""
        with self._lock:
            if self._held.get(user, 0) < len(self._free):
                self._held[user] = self._held.get(user, 0) + 1
                return self._free.pop()
            self._waiting[user] = None
            return None

    def give_back(self, user: "Staging", run: int) -> None:
        """Give back a run. Nothing reads from it or writes into it any more."""
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
    """The ring as one link uses it. ring_blocks: the ring as a KV cache with the peer's block size
    and dtype."""

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
        """Take ring blocks for the first of these blocks, as many as a run has, in their order.
        Neighbours at the peer get neighbours. None: see `StagingRing.take`.
        """
        run = self._ring.take(self)
        if run is None:
            return None
        order = np.argsort(np.asarray(remote_blocks[: self._per_run]), kind="stable")
        ring_blocks = np.empty(len(order), np.int32)
        ring_blocks[order] = run * self._per_run + np.arange(len(order))
        return ring_blocks

    def give_back(self, ring_blocks: np.ndarray) -> None:
        """Give back what `take` returned; it must be quiet."""
        self._ring.give_back(self, int(ring_blocks[0]) // self._per_run)

    def repack(
        self, ring_blocks: np.ndarray, skip: int, num_rows: int, blocks: Sequence[int]
    ) -> Callable[[], bool]:
        """Move num_rows rows, from row `skip` of these ring blocks on, to the start of our
        `blocks`. Returns a function that says whether it is done. Until then our blocks may be
        written.
        """
        with self._on_stream():
            # Triton would compile once more for ids that are not 16-byte aligned
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
        """Wait until no repack runs. Runs that are still taken may be given back later."""
        if self._stream is not None:
            self._stream.synchronize()

    def _on_stream(self) -> Any:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.as_tensor(ids, dtype=torch.int32).to(self._kv_cache.device, non_blocking=True)

    def _compile(self) -> None:
        """Compile the kernel now, not in the first pull. There is one for each pair of block sizes
        and dtypes."""
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
    """Size of a run in tokens, if `fitting` tokens fit. It is whole blocks of any size up to
    LARGEST_BLOCK, for rows up to `times` as wide. A smaller run holds as many sizes as fit."""
    return fitting - fitting % min(LARGEST_BLOCK * times, 1 << max(fitting.bit_length() - 1, 0))
