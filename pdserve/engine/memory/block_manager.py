"""Bookkeeping of the KV cache's blocks: who owns each, what it holds, and whether it may be reused.
Runs on the CPU, without tensors or a device.

Every block except the null block 0 is in exactly one state, and the sums are checked:

    free (blank) --allocate--> owned --release--> free (blank, or cached while its content is known)
    free (cached) --acquire--> owned
    owned --quarantine--> quarantined --settle--> free (blank)
    owned --release while steps are in flight--> retiring --the newest of them is done--> free

The device is asynchronous: a step in flight may still write a block that nobody owns any more. Such
a block is retiring, and no new owner gets it. Only its content, if known, may be acquired again,
because later steps read after the write.

Generations: `generations[b]` is increased whenever block b gets a new owner, before anybody writes
into it. A reader with an older ticket can see that. The table is plain host memory that a connector
registers. Called by the scheduler and the engine.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pdserve.engine.memory.blank_blocks import BlankBlocks
from pdserve.engine.memory.written_blocks import WrittenBlocks

NULL_BLOCK = 0


class OutOfBlocks(Exception):
    """More blocks were asked for than are free."""


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """The free blocks by kind."""

    num_blank: int  # blocks without content
    num_cached: int  # cached blocks, which become available one by one, by eviction
    num_runs: int  # runs of neighbours among the blank blocks; a run moves with one descriptor
    longest_run: int  # blocks

    @property
    def fragmentation(self) -> float:
        """0 if all blank blocks are neighbours, close to 1 if none are."""
        return 1 - self.longest_run / self.num_blank if self.num_blank else 0.0


class BlockManager:
    """Reference-counted blocks with prefix caching (LRU eviction) and contiguity-aware allocation.

    - cache_changes: digests that entered the cache (True) or left it (False) since a reader last
      emptied it; None: there is no reader.
    - written: the blocks that peers may borrow; None: nobody borrows.
    - generations: int64 `[num_blocks]`, the table to continue; None: a new one.
    """

    def __init__(
        self,
        num_blocks: int,
        enable_caching: bool = True,
        generations: np.ndarray | None = None,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_kv_blocks must be at least 2 (one is the null block), not {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        if generations is None:
            generations = np.zeros(num_blocks, dtype=np.int64)
        self.generations = generations
        self.cache_changes: dict[bytes, bool] | None = None
        self.written: WrittenBlocks | None = None
        self._clear()

    # --- counts ---

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._lru)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def num_retiring(self) -> int:
        return len(self._retiring)

    @property
    def num_owned(self) -> int:
        return self.num_usable - self.num_free - self.num_quarantined - self.num_retiring

    def num_owners(self, block: int) -> int:
        return self._refs[block]

    def is_free(self, block: int) -> bool:
        """True if the block is free. For tests."""
        return block in self._blank or block in self._lru

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Number of these owned or cached blocks that count as free. Acquiring them reduces
        num_free by that number."""
        return sum(block in self._lru for block in blocks)

    def free_space(self) -> FreeSpace:
        """The free blocks that allocation can pick from; takes at most 0.2 ms for 50,000 blocks."""
        lengths = self._blank.run_lengths()
        return FreeSpace(
            len(self._blank), len(self._lru), len(lengths), int(lengths.max(initial=0))
        )

    # --- prefix cache ---

    def match(self, hashes: Iterable[bytes], touch: bool = False) -> list[int]:
        """Blocks of the longest cached prefix of `hashes`. Acquire them before the next allocate.
        touch: mark them as just used."""
        found: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        for block in reversed(found) if touch else ():
            if block in self._lru:
                self._lru.move_to_end(block)
        return found

    def commit(self, block: int, digest: bytes) -> None:
        """Record that the owned `block` now holds all rows of `digest`. A digest that another block
        already holds stays there."""
        assert self._refs[block] > 0, f"commit of block {block}, which nobody owns"
        if self.enable_caching and digest not in self._block_of:
            assert block not in self._hash_of, f"block {block} committed twice"
            self._block_of[digest] = block
            self._hash_of[block] = digest
            if self.cache_changes is not None:
                self.cache_changes[digest] = True
            if self.written is not None:
                self.written.commit(digest, block, self._num_begun, self._num_ended)

    def cached_digests(self) -> list[bytes]:
        """All digests that `match` can find now, in no order; takes 7 ms for a million."""
        return list(self._block_of)

    # --- ownership ---

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add an owner to each block. Each must be owned already, or hold known content."""
        for block in blocks:
            if self._refs[block] == 0 and self._retiring.pop(block, None) is None:
                del self._lru[block]
            self._refs[block] += 1

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks, each with one owner and a new generation. They are neighbours where
        possible, and come right after block `after` if those are free.

        Raises OutOfBlocks (and takes nothing) if fewer are free. Evicts cached blocks, least
        recently used first.
        """
        if count == 0:
            return []
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} free")
        while len(self._blank) < count:
            self._evict(next(iter(self._lru)))
        taken = self._blank.take(count, after)
        self.generations[taken] += 1
        blocks: list[int] = taken.tolist()
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Remove an owner from each block. Later blocks of a sequence are evicted before earlier
        ones."""
        for block in reversed(list(blocks)):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} released once too often"
            if self._refs[block] == 0:
                if self._num_begun > self._num_ended:
                    self._retiring[block] = self._num_begun
                else:
                    self._set_free(block)

    def begin_step(self) -> None:
        """Note that a step was planned. Blocks released before its `end_step` retire first."""
        self._num_begun += 1

    def end_step(self) -> None:
        """Note that the oldest step in flight is done on the device."""
        self._num_ended += 1
        if self.written is not None:
            self.written.end_step(self._num_ended, self._block_of)
        for block in [b for b, step in self._retiring.items() if step <= self._num_ended]:
            del self._retiring[block]
            self._set_free(block)

    def quarantine(self, blocks: Iterable[int], reason: str) -> None:
        """Remove the single owner of each block. Bytes may still land in the blocks, so nobody gets
        them before `settle`."""
        for block in blocks:
            assert self._refs[block] == 1, (
                f"block {block} has {self._refs[block]} owners, cannot be quarantined"
            )
            assert block not in self._hash_of, (
                f"block {block} has known content, cannot be a transfer destination"
            )
            self._refs[block] = 0
            self._quarantined[block] = reason

    def settle(self, blocks: Iterable[int]) -> None:
        """Free these quarantined blocks: nothing lands in them any more."""
        for block in blocks:
            del self._quarantined[block]
            self._blank.add(block)

    def reset(self) -> None:
        """Make all blocks blank, each with a new generation, in whatever state an interruption left
        the books. Nothing may be in flight on the device. AssertionError if blocks are in
        quarantine, because bytes may still land in them.
        """
        num_waiting = len(self._quarantined)
        assert not num_waiting, f"{num_waiting} blocks wait for transfers to settle"
        if self.cache_changes is not None:
            self.cache_changes.update(dict.fromkeys(self._block_of, False))
        if self.written is not None:
            self.written.withdraw_all()
        self.generations[NULL_BLOCK + 1 :] += 1
        self._clear()

    # --- checks ---

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """AssertionError unless the reference counts equal the given owners' block lists and every
        block has exactly one state."""
        counts = Counter(block for blocks in owners for block in blocks)
        owned = {block for block, refs in enumerate(self._refs) if refs}
        assert {b: self._refs[b] for b in owned} == dict(counts), (
            "reference counts differ from the owners"
        )
        blank = set(self._blank.ids())
        states = [
            owned,
            blank,
            set(self._lru),
            set(self._quarantined),
            set(self._retiring),
            {NULL_BLOCK},
        ]
        assert sum(map(len, states)) == self.num_blocks, "a block has two states or none"
        assert set().union(*states) == set(range(self.num_blocks)), "a block has no state"
        assert len(blank) == len(self._blank)
        assert {b: h for h, b in self._block_of.items()} == self._hash_of
        assert set(self._lru) <= set(self._hash_of) and not blank & set(self._hash_of)
        if self.written is not None:
            self.written.check_integrity(self._block_of)

    # --- inside ---

    def _clear(self) -> None:
        # A list, because single elements of an array are several times slower.
        self._refs = [0] * self.num_blocks
        self._blank = BlankBlocks(self.num_blocks)
        # Free blocks with known content, oldest first.
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._quarantined: dict[int, str] = {}
        self._num_begun = 0  # steps; so is _num_ended
        self._num_ended = 0
        # block -> the newest step when it retired, counted from 1
        self._retiring: dict[int, int] = {}

    def _set_free(self, block: int) -> None:
        if block in self._hash_of:
            self._lru[block] = None
        else:
            self._blank.add(block)

    def _evict(self, block: int) -> None:
        del self._lru[block]
        digest = self._hash_of.pop(block)
        del self._block_of[digest]
        if self.written is not None:  # before the block gets its next generation, and owner
            self.written.withdraw(digest)
        if self.cache_changes is not None:
            self.cache_changes[digest] = False
        self._blank.add(block)
