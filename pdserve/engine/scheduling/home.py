"""A home holds what the sequences of one KV cache share: its blocks, and slots of the device's
tables.

An engine has one home, or with data-parallel attention one per data-parallel rank, under one
scheduler. A request lives in one home, with all its sequences. A home gives blocks to sequences and
takes them back. Knows no queue and no plan.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from pdserve.engine.memory.block_manager import BlockManager, OutOfBlocks
from pdserve.engine.memory.written_blocks import WrittenBlocks
from pdserve.engine.scheduling.sequence import Sequence
from pdserve.protocol.block_digests import BlockHasher


def num_slots_for(max_num_seqs: int) -> int:
    """Number of rows in the device's tables for one home. There are more than sequences in a step,
    because a sequence whose last token is in flight keeps its slot, and others must not wait for
    it.
    """
    return 2 * max_num_seqs


class Home:
    """The blocks and slots of one KV cache.

    - number: index among the homes of the engine. Their slots follow each other in the tables, from
      1 on.
    - freed_slots: slots freed since a reader last emptied the list.
    - window: number of a sequence's last rows that later rows read, in every layer; None: all.
    - wants_blocks: a sequence that waits for this home lacked blocks in the last plan.
    - num_reserved: reservations that are out.
    """

    def __init__(
        self,
        blocks: BlockManager,
        hasher: BlockHasher,
        max_num_seqs: int,
        window: int | None = None,
        number: int = 0,
    ) -> None:
        self.number = number
        self.blocks = blocks
        self._hasher = hasher
        self.window = window
        self.wants_blocks = False
        self.num_reserved = 0
        count = num_slots_for(max_num_seqs)
        self._all_slots = range((number + 1) * count, number * count, -1)
        self.free_all_slots()

    def free_all_slots(self) -> None:
        self._slots = list(self._all_slots)
        self.freed_slots = list(self._slots)

    @property
    def num_running(self) -> int:
        """Number of sequences that have a slot."""
        return len(self._all_slots) - len(self._slots)

    @property
    def num_free_slots(self) -> int:
        return len(self._slots)

    @property
    def num_spare_blocks(self) -> int:
        """Free blocks minus one for each running sequence to grow into; negative if these lack
        some."""
        return self.blocks.num_free - self.num_running

    def take_slot(self) -> int:
        return self._slots.pop()

    def free_slot(self, slot: int) -> None:
        self._slots.append(slot)
        self.freed_slots.append(slot)

    def cached_prefix(self, seq: Sequence) -> list[int]:
        """The cached blocks that the sequence may begin with. They never include its last token,
        which is computed for its logits."""
        if seq.request.wants_prompt_logprobs or not self.blocks.enable_caching:
            return []
        limit = (seq.num_tokens - 1) // self._hasher.block_size
        return self.blocks.match(seq.hashes(self._hasher)[:limit])

    def take_prefix(self, seq: Sequence, cached: list[int]) -> None:
        """Let a sequence without blocks begin with these cached blocks."""
        self.blocks.acquire(cached)
        seq.block_table = cached
        seq.num_committed = len(cached)
        seq.num_computed = len(cached) * self._hasher.block_size

    def fits(self, seq: Sequence, cached: list[int]) -> bool:
        """True if all tokens of a waiting sequence fit now, after its cached prefix, and a block
        stays for each running one to grow into. Otherwise it would soon be preempted again.
        """
        missing = self._num_missing(seq, seq.num_tokens) - len(cached)
        missing += self._writes_shared_block(seq)
        return missing + self.blocks.num_free_among(cached) <= self.num_spare_blocks

    def provide(self, seq: Sequence, num_rows: int) -> list[tuple[int, int]]:
        """Give the sequence blocks for its next rows. Raises OutOfBlocks. Returns (from, to) pairs
        that must be copied first: a shared block that is partly filled gets copied."""
        missing = self._num_missing(seq, seq.num_computed + num_rows)
        is_shared = self._writes_shared_block(seq)
        if missing + is_shared > self.blocks.num_free:
            raise OutOfBlocks(f"{missing + is_shared} blocks wanted, {self.blocks.num_free} free")
        copies = []
        if is_shared:
            index = seq.num_computed // self._hasher.block_size
            source = seq.block_table[index]
            [target] = self.blocks.allocate(1)
            self.blocks.release([source])
            seq.block_table[index] = target
            seq.num_synced = min(seq.num_synced, index)
            copies.append((source, target))
        if missing:
            after = seq.block_table[-1] if seq.block_table else None
            seq.block_table += self.blocks.allocate(missing, after)
        return copies

    def commit_full_blocks(self, seq: Sequence) -> None:
        """Enter full blocks whose tokens are known into the prefix cache. Their rows may still be
        in flight. A later step reads them after the write, and nothing is published before its step
        is complete.
        """
        full = min(seq.num_computed, len(seq.token_ids)) // self._hasher.block_size
        if full > seq.num_committed:
            if self.blocks.enable_caching:
                hashes = seq.hashes(self._hasher)
                for index in range(seq.num_committed, full):
                    self.blocks.commit(seq.block_table[index], hashes[index])
            seq.num_committed = full

    def drop_blocks(self, seq: Sequence) -> None:
        """Take all blocks from the sequence; its rows must be computed again."""
        self.blocks.release(seq.owned_blocks)
        seq.block_table = []
        seq.num_dropped = 0
        seq.num_computed = 0
        seq.num_committed = 0

    def give_up_blocks(self, seq: Sequence, num_rows: int) -> None:
        """Release the blocks that neither the sequence's last num_rows rows nor later rows read. A
        step in flight may read them, so they retire first. Releases only blocks that the prefix
        cache knows, and none of a prompt that is handed over, because others read all of it.
        """
        if self.window is None or seq.request.prefill_only or seq.request.overlap:
            return
        first = seq.num_computed - num_rows
        unread = max(0, first - self.window + 1) // self._hasher.block_size
        end = min(unread, seq.num_committed)
        if end > seq.num_dropped:
            self.blocks.release(seq.block_table[seq.num_dropped : end])
            seq.num_dropped = end

    def check_slots(self, taken: Iterable[int]) -> None:
        """AssertionError unless exactly these slots are taken."""
        assert sorted([*taken, *self._slots], reverse=True) == list(self._all_slots), (
            "a slot has two sequences or none"
        )

    def _num_missing(self, seq: Sequence, num_rows: int) -> int:
        return max(0, -(-num_rows // self._hasher.block_size) - len(seq.block_table))

    def _writes_shared_block(self, seq: Sequence) -> bool:
        index = seq.num_computed // self._hasher.block_size
        return index < len(seq.block_table) and self.blocks.num_owners(seq.block_table[index]) > 1


@dataclass(frozen=True)
class BlockCounts:
    """Number of blocks in each state."""

    free: int
    owned: int
    quarantined: int
    retiring: int


class Homes:
    """All homes of an engine, in order. generations: int64 `[homes, blocks]`, one contiguous piece
    of memory that a connector may register."""

    def __init__(
        self,
        num_homes: int,
        num_blocks: int,
        hasher: BlockHasher,
        max_num_seqs: int,
        enable_caching: bool = True,
        window: int | None = None,
    ) -> None:
        self.generations = np.zeros((num_homes, num_blocks), dtype=np.int64)
        blocks = [BlockManager(num_blocks, enable_caching, table) for table in self.generations]
        self._homes = tuple(
            Home(each, hasher, max_num_seqs, window, number) for number, each in enumerate(blocks)
        )

    def __len__(self) -> int:
        return len(self._homes)

    def __iter__(self) -> Iterator[Home]:
        return iter(self._homes)

    def __getitem__(self, number: int) -> Home:
        return self._homes[number]

    @property
    def num_usable_blocks(self) -> int:
        """Number of blocks that sequences may have, in all homes together."""
        return sum(home.blocks.num_usable for home in self)

    @property
    def num_free_blocks(self) -> int:
        return sum(home.blocks.num_free for home in self)

    def keep_written(self) -> None:
        """Start to record written blocks, so that `find_written` finds what is committed later."""
        for home in self:
            home.blocks.written = WrittenBlocks(home.blocks.generations)

    def find_written(self, digests: SequenceOf[bytes]) -> tuple[int, list[tuple[int, int]]]:
        """The home that has the longest written prefix of these blocks, and (block, generation) for
        each of its blocks. May be called from any thread. See WrittenBlocks."""
        best: tuple[int, list[tuple[int, int]]] = 0, []
        for home in self:
            found = home.blocks.written.find(digests) if home.blocks.written is not None else []
            if len(found) > len(best[1]):
                best = home.number, found
        return best

    def withdraw_written(self) -> None:
        """Let nothing be found any more, because the device is about to be interrupted."""
        for home in self:
            if home.blocks.written is not None:
                home.blocks.written.withdraw_all()

    def count_blocks(self) -> BlockCounts:
        """Counts over all homes."""
        return BlockCounts(
            free=self.num_free_blocks,
            owned=sum(home.blocks.num_owned for home in self),
            quarantined=sum(home.blocks.num_quarantined for home in self),
            retiring=sum(home.blocks.num_retiring for home in self),
        )
