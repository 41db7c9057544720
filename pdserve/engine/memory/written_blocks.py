"""Blocks of one KV cache whose rows are written on the device, by digest. Peers may borrow these.

The prefix cache knows a block from the moment its step is planned. A reader outside the device must
wait until that step is complete. Knows no owners and no free blocks. Written by a
`block_manager.BlockManager` on the engine's thread; `find` is called from any thread.

    committed --the steps in flight are done, same block, same generation--> written
    committed, written --the digest leaves the prefix cache--> gone

A block that is found may get a new owner at any time afterwards. So a reader compares the
generation that `find` returned with the table's, after the last byte. `find` returns the generation
of the commit; one read later could be the next owner's.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import numpy as np


class WrittenBlocks:
    """Written blocks by digest. generations: the block manager's table, int64 `[num_blocks]`."""

    def __init__(self, generations: np.ndarray) -> None:
        self._generations = generations
        self._lock = threading.Lock()
        self._written: dict[bytes, tuple[int, int]] = {}  # block, generation
        # the step in flight to wait for, block, generation; the oldest step comes first
        self._committed: OrderedDict[bytes, tuple[int, int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._written)

    def commit(self, digest: bytes, block: int, num_begun: int, num_ended: int) -> None:
        """Note that the block holds the rows of `digest` once the first num_begun steps are
        done."""
        generation = int(self._generations[block])
        if num_begun > num_ended:
            self._committed[digest] = num_begun, block, generation
        else:
            with self._lock:
                self._written[digest] = block, generation

    def end_step(self, num_ended: int, block_of: Mapping[bytes, int]) -> None:
        """Note that the first num_ended steps are done. block_of: what the prefix cache holds
        now."""
        done: dict[bytes, tuple[int, int]] = {}
        while self._committed:
            digest, (step, block, generation) = next(iter(self._committed.items()))
            if step > num_ended:
                break
            del self._committed[digest]
            if block_of.get(digest) == block and self._generations[block] == generation:
                done[digest] = block, generation
        if done:
            with self._lock:
                self._written.update(done)

    def withdraw(self, digest: bytes) -> None:
        """Forget a digest that leaves the prefix cache: the next owner may write its block."""
        self._committed.pop(digest, None)
        with self._lock:
            self._written.pop(digest, None)

    def withdraw_all(self) -> None:
        self._committed.clear()
        with self._lock:
            self._written.clear()

    def find(self, digests: Iterable[bytes]) -> list[tuple[int, int]]:
        """Returns (block, generation) for the longest written prefix of `digests`."""
        found: list[tuple[int, int]] = []
        with self._lock:
            for digest in digests:
                entry = self._written.get(digest)
                if entry is None:
                    break
                found.append(entry)
        return found

    def check_integrity(self, block_of: Mapping[bytes, int]) -> None:
        """AssertionError unless every written digest is cached, in that block and generation."""
        for digest, (block, generation) in self._written.items():
            assert block_of.get(digest) == block, f"block {block} is lent for rows it does not hold"
            assert self._generations[block] == generation, f"block {block} has a new owner"
        assert self._committed.keys() <= block_of.keys(), "a digest that is not cached may be lent"
        assert not self._committed.keys() & self._written.keys(), "written before its step is done"
