"""A home holds what the sequences of one KV cache share: its blocks, and the slots of the device's
tables.

An engine has one home; with data-parallel attention it will have one for each rank of it, under one
scheduler. A request lives in one, with all its sequences. Knows no queue and no plan.
"""

from collections.abc import Iterable

from pdserve.engine.memory.block_manager import BlockManager
from pdserve.engine.scheduling.sequence import Sequence


def num_slots_for(max_num_seqs: int) -> int:
    """Rows of the device's tables, beside row 0: more than may be planned, because a sequence whose
    last token is in flight keeps its slot and must not keep others waiting.
    """
    return 2 * max_num_seqs


class Home:
    """freed_slots: since somebody last emptied it. window: so many of a sequence's last rows are
    read by later ones, in every layer; None: all are."""

    def __init__(self, blocks: BlockManager, max_num_seqs: int, window: int | None = None) -> None:
        self.blocks = blocks
        self.window = window
        self._num_slots = num_slots_for(max_num_seqs)
        self.free_all_slots()

    def free_all_slots(self) -> None:
        self._slots = list(range(self._num_slots, 0, -1))
        self.freed_slots = list(self._slots)

    @property
    def num_running(self) -> int:
        """How many sequences have a slot."""
        return self._num_slots - len(self._slots)

    @property
    def num_free_slots(self) -> int:
        return len(self._slots)

    def take_slot(self) -> int:
        return self._slots.pop()

    def free_slot(self, slot: int) -> None:
        self._slots.append(slot)
        self.freed_slots.append(slot)

    def give_up_blocks(self, seq: Sequence, num_rows: int, block_size: int) -> None:
        """Release the blocks that none of the sequence's last num_rows rows reads, and no later
        one; a step in flight may, so they retire first. Only such as the prefix cache knows, and
        none of a prompt that is handed over: others read all of it.
        """
        if self.window is None or seq.request.prefill_only or seq.request.overlap:
            return
        first = seq.num_computed - num_rows
        unread = max(0, first - self.window + 1) // block_size
        end = min(unread, seq.num_committed)
        if end > seq.num_dropped:
            self.blocks.release(seq.block_table[seq.num_dropped : end])
            seq.num_dropped = end

    def check_slots(self, taken: Iterable[int]) -> None:
        """AssertionError unless exactly these are taken."""
        assert sorted([*taken, *self._slots]) == list(range(1, self._num_slots + 1)), (
            "a slot has two sequences or none"
        )
