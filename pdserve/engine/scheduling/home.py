"""What the sequences of one KV cache share: its blocks, and the slots of the device's tables.

An engine has one home; with data-parallel attention it will have one for each rank of it, under one
scheduler. A request lives in one, with all its sequences. Knows no queue and no plan.
"""

from collections.abc import Iterable

from pdserve.engine.memory.block_manager import BlockManager


def num_slots_for(max_num_seqs: int) -> int:
    """Rows of the device's tables, beside row 0: more than may be planned, because a sequence whose
    last token is in flight keeps its slot and must not keep others waiting.
    """
    return 2 * max_num_seqs


class Home:
    """freed_slots: since somebody last emptied it."""

    def __init__(self, blocks: BlockManager, max_num_seqs: int) -> None:
        self.blocks = blocks
        self._num_slots = num_slots_for(max_num_seqs)
        self.free_all_slots()

    def free_all_slots(self) -> None:
        self._slots = list(range(self._num_slots, 0, -1))
        self.freed_slots = list(self._slots)

    def take_slot(self) -> int:
        return self._slots.pop()

    def free_slot(self, slot: int) -> None:
        self._slots.append(slot)
        self.freed_slots.append(slot)

    def check_slots(self, taken: Iterable[int]) -> None:
        """AssertionError unless exactly these are taken."""
        assert sorted([*taken, *self._slots]) == list(range(1, self._num_slots + 1)), (
            "a slot has two sequences or none"
        )
