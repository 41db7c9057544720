"""Chunks are what the pool stores. This module makes their names and seals, and copies between a
chunk's host memory and KV blocks.

A chunk holds `blocks_per_chunk` whole blocks of consecutive tokens, byte for byte, and then a seal:
the digest of everything that the rows depend on. The seal is cleared before the first byte is
written and set after the last. So the seal shows memory that was never finished, was reused while
it was read, or belongs to another prompt, whatever the server says. Knows no server. Called by
`threaded_pool.py` from the pool's threads.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch

from pdserve.kvtransfer.connector import KVCacheMemory

SEAL_BYTES = 32
FORMAT = b"pdserve-1"

BlockIds = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Shard:
    """The part of every token's rows that this rank stores: `worker_id` of `world_size` equal
    shards."""

    world_size: int = 1
    worker_id: int = 0


@dataclass(frozen=True)
class Prefix:
    """The whole chunks at the start of a prompt. tokens: those of the chunks. salt: a digest that
    separates tenants. seals: one per chunk."""

    tokens: tuple[int, ...]
    salt: str
    seals: tuple[bytes, ...]

    @property
    def num_chunks(self) -> int:
        return len(self.seals)


class Chunks:
    """Names and seals for one pool of blocks.

    - chunk_tokens: tokens per chunk.
    - num_bytes: memory of a chunk, with its seal.
    - model_name: equal at two ranks exactly when they may share chunks.
    """

    def __init__(self, memory: KVCacheMemory, blocks_per_chunk: int, shard: Shard) -> None:
        layout = memory.kv_cache.layout
        self.blocks_per_chunk = blocks_per_chunk
        self.shard = shard
        self.block_size = layout.block_size
        self.chunk_tokens = blocks_per_chunk * layout.block_size
        self.num_bytes = blocks_per_chunk * layout.block_bytes + SEAL_BYTES
        parts = [(group.layers, len(group.heads)) for group in layout.groups]
        what = f"{memory.rows_digest}|{parts}|{layout.block_size}|{blocks_per_chunk}"
        self.model_name = (
            "pdserve-" + blake2b(what.encode(), digest_size=16, person=FORMAT).hexdigest()
        )

    def prefix(self, token_ids: Sequence[int], salt: str) -> Prefix:
        """Make the prefix of the whole chunks of `token_ids`."""
        tokens = tuple(token_ids[: len(token_ids) // self.chunk_tokens * self.chunk_tokens])
        tenant = blake2b(salt.encode(), digest_size=16, person=FORMAT).digest()
        ids = array("q", tokens).tobytes()
        step = 8 * self.chunk_tokens
        root = (
            f"{self.model_name}|{self.shard.world_size}|{self.shard.worker_id}|".encode() + tenant
        )
        seals = []
        parent = blake2b(root, digest_size=SEAL_BYTES, person=FORMAT).digest()
        for start in range(0, len(ids), step):
            parent = blake2b(
                parent + ids[start : start + step], digest_size=SEAL_BYTES, person=FORMAT
            ).digest()
            seals.append(parent)
        return Prefix(tokens, tenant.hex(), tuple(seals))


class BlockCopier:
    """Copies between KV blocks and chunk memory (`buffer`: uint8 `[num_bytes]` on the host).

    On CUDA each direction has its own stream, and a call returns when the device is done. `load`
    and `save` may run at the same time, each from one thread.
    """

    def __init__(self, memory: KVCacheMemory) -> None:
        self._blocks = memory.kv_cache.data
        device = self._blocks.device
        self._in, self._out = (
            torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)
        )

    @property
    def num_blocks(self) -> int:
        return int(self._blocks.shape[0])

    @property
    def block_bytes(self) -> int:
        return int(self._blocks.shape[1])

    def save(self, buffer: torch.Tensor, block_ids: BlockIds) -> None:
        """Fill the buffer from whole blocks, whose rows are completely written. The buffer stays
        unsealed: see `set_seal`."""
        set_seal(buffer, bytes(SEAL_BYTES))
        self._copy(buffer, block_ids, self._out, inward=False)

    def load(self, buffer: torch.Tensor, block_ids: BlockIds, first: int, seal: bytes) -> bool:
        """Copy the buffer's blocks from `first` on into `block_ids`. Returns False if the buffer is
        not the chunk that `seal` names, or ceased to be it during the copy. Then the blocks hold
        nothing of use."""
        if seal_of(buffer) != seal:
            return False
        self._copy(buffer[first * self.block_bytes :], block_ids, self._in, inward=True)
        return seal_of(buffer) == seal

    def _copy(
        self,
        host: torch.Tensor,
        block_ids: BlockIds,
        stream: torch.cuda.Stream | None,
        inward: bool,
    ) -> None:
        with torch.cuda.stream(stream):  # does nothing with None
            row = 0
            for start, count in runs(block_ids):
                blocks = self._blocks[start : start + count]
                rows = host[row * self.block_bytes : (row + count) * self.block_bytes].view(
                    count, -1
                )
                target, source = (blocks, rows) if inward else (rows, blocks)
                target.copy_(source, non_blocking=True)
                row += count
        if stream is not None:
            done = torch.cuda.Event(blocking=True)
            done.record(stream)
            done.synchronize()


def runs(block_ids: BlockIds) -> Iterator[tuple[int, int]]:
    """Yield `(first, count)` of each run of consecutive ids, in order."""
    ids = np.asarray(block_ids, np.int64)
    for part in np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1):
        if len(part):
            yield int(part[0]), len(part)


def seal_of(buffer: torch.Tensor) -> bytes:
    return buffer[-SEAL_BYTES:].numpy().tobytes()


def set_seal(buffer: torch.Tensor, seal: bytes) -> None:
    buffer[-SEAL_BYTES:].numpy()[:] = np.frombuffer(seal, np.uint8)
