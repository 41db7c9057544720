"""Blocks of the prefix cache that peers may borrow, tested by a state machine. In it a device
writes late, blocks change hands, and readers take their time between ticket, data and generations.

Rows that a reader trusts must be those of the digest, whatever happened in between.
"""

from collections import deque
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.engine.memory.block_manager import BlockManager
from pdserve.engine.memory.written_blocks import WrittenBlocks

NUM_BLOCKS = 9
PREFIX = [bytes([number]) * 16 for number in range(4)]
HALF = b"half written"


@dataclass(eq=False)
class Reading:
    """One block that a reader has a ticket for. data: as it was read; None: not yet."""

    digest: bytes
    block: int
    generation: int
    data: bytes | None = None


class WrittenMachine(RuleBasedStateMachine):
    """The state machine.

    - memory: the content of the device.
    - writes: of each step in flight, the oldest first.
    - tables: each with the number of its blocks that hold the prefix, or are planned to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS)
        self.written = self.manager.written = WrittenBlocks(self.manager.generations)
        self.memory = dict.fromkeys(range(NUM_BLOCKS), b"nothing")
        self.writes: deque[list[tuple[int, bytes]]] = deque()
        self.tables: list[tuple[list[int], int]] = []
        self.readings: list[Reading] = []
        self.num_verified = 0

    @rule(count=st.integers(1, 4))
    def admit(self, count: int) -> None:
        """A sequence begins with what is cached of the prefix."""
        cached = self.manager.match(PREFIX[:count])
        if count - len(cached) <= self.manager.num_free - self.manager.num_free_among(cached):
            self.manager.acquire(cached)
            table = cached + self.manager.allocate(count - len(cached))
            self.tables.append((table, len(cached)))

    @precondition(lambda self: self.tables and len(self.writes) < 3)
    @rule(data=st.data(), is_other=st.booleans())
    def plan(self, data: st.DataObject, is_other: bool) -> None:
        """A step computes the next block of a sequence; is_other: its tokens are not the prefix's,
        and the block is never full."""
        index = data.draw(st.integers(0, len(self.tables) - 1))
        table, num_held = self.tables[index]
        if num_held >= len(table):
            return
        self.manager.begin_step()
        block = table[num_held]
        if is_other:
            self.writes.append([(block, b"other rows")])
            return
        self.manager.commit(block, PREFIX[num_held])
        self.writes.append([(block, PREFIX[num_held])])
        self.tables[index] = table, num_held + 1

    @precondition(lambda self: self.writes)
    @rule(step=st.integers(0, 2), is_done=st.booleans())
    def device(self, step: int, is_done: bool) -> None:
        """Some of a step's rows are written, or all."""
        for block, rows in list(self.writes)[: step + 1][-1]:
            self.memory[block] = rows if is_done else HALF

    @precondition(lambda self: self.writes)
    @rule()
    def collect(self) -> None:
        for block, rows in self.writes.popleft():
            self.memory[block] = rows
        self.manager.end_step()

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        table, _ = self.tables.pop(index)
        self.manager.release(table)

    @rule(count=st.integers(1, NUM_BLOCKS - 1))
    def evict(self, count: int) -> None:
        """Somebody fills blocks from elsewhere, at once: whatever is free may be."""
        if count <= self.manager.num_free:
            blocks = self.manager.allocate(count)
            for block in blocks:
                self.memory[block] = HALF
            self.manager.release(blocks)

    @precondition(lambda self: not self.writes)
    @rule()
    def reset(self) -> None:
        self.written.withdraw_all()
        assert not self.written.find(PREFIX)
        self.memory = dict.fromkeys(range(NUM_BLOCKS), HALF)
        self.manager.reset()
        self.tables.clear()

    # --- readers ---

    @rule()
    def ask(self) -> None:
        found = self.written.find(PREFIX)
        for digest, (block, generation) in zip(PREFIX, found, strict=False):
            self.readings.append(Reading(digest, block, generation))
        assert len(found) <= len(self.manager.match(PREFIX)), "lent, but not cached"

    @precondition(lambda self: self.readings)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        reading = data.draw(st.sampled_from(self.readings))
        reading.data = self.memory[reading.block]

    @precondition(lambda self: any(each.data is not None for each in self.readings))
    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        read = [each for each in self.readings if each.data is not None]
        reading = data.draw(st.sampled_from(read))
        self.readings.remove(reading)
        if self.manager.generations[reading.block] == reading.generation:
            self.num_verified += 1
            assert reading.data == reading.digest

    @invariant()
    def adds_up(self) -> None:
        self.manager.check_integrity([table for table, _ in self.tables])
        if not self.writes:
            assert len(self.written) == len(self.manager.cached_digests()), (
                "all that is cached is lent once nothing is in flight"
            )


WrittenMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestWrittenBlocks = WrittenMachine.TestCase


def lending(num_blocks: int) -> BlockManager:
    manager = BlockManager(num_blocks)
    manager.written = WrittenBlocks(manager.generations)
    return manager


def found(manager: BlockManager, *digests: bytes) -> list[tuple[int, int]]:
    assert manager.written is not None
    return manager.written.find(digests)


def test_a_commit_is_found_when_the_steps_that_were_in_flight_are_done() -> None:
    manager = lending(4)
    [block] = manager.allocate(1)
    manager.begin_step()
    manager.begin_step()
    manager.commit(block, b"a")
    manager.begin_step()  # of later: not waited for
    manager.end_step()
    assert not found(manager, b"a")
    manager.end_step()
    assert found(manager, b"a") == [(block, 1)]


def test_a_commit_with_nothing_in_flight_is_found_at_once() -> None:
    manager = lending(4)
    [block] = manager.allocate(1)
    manager.commit(block, b"a")
    assert found(manager, b"a", b"b") == [(block, 1)] and not found(manager, b"b", b"a")


def test_the_same_prefix_in_the_same_block_has_another_generation() -> None:
    manager = lending(2)
    tickets = []
    for _ in range(2):
        [block] = manager.allocate(1)
        manager.commit(block, b"a")
        tickets += found(manager, b"a")
        manager.release([block])
    assert tickets == [(1, 1), (1, 2)]


def test_eviction_and_reset_withdraw_before_the_block_has_a_new_owner() -> None:
    manager = lending(2)
    [block] = manager.allocate(1)
    manager.commit(block, b"a")
    manager.release([block])
    written = manager.written
    assert written is not None
    seen: list[int] = []
    withdraw = written.withdraw

    def noted(digest: bytes) -> None:
        seen.append(int(manager.generations[block]))
        withdraw(digest)

    written.withdraw = noted  # type: ignore[method-assign]
    manager.allocate(1)
    assert seen == [1] and not found(manager, b"a")


def test_a_digest_that_leaves_before_its_step_ends_is_never_lent() -> None:
    """It cannot be evicted then; if it could, the end of the step must not bring it back."""
    manager = lending(3)
    [block] = manager.allocate(1)
    manager.begin_step()
    manager.commit(block, b"a")
    assert manager.written is not None
    manager.generations[block] += 1
    manager.end_step()
    assert not found(manager, b"a")


def test_touched_content_is_evicted_last() -> None:
    manager = BlockManager(5)
    for digest in (b"a", b"b"):
        blocks = manager.allocate(2)
        for index, block in enumerate(blocks):
            manager.commit(block, digest + bytes([index]))
        manager.release(blocks)
    assert len(manager.match([b"a\0", b"a\1", b"missing"], touch=True)) == 2
    manager.allocate(2)
    assert len(manager.match([b"a\0", b"a\1"])) == 2 and not manager.match([b"b\0"])
    manager.allocate(1)
    assert len(manager.match([b"a\0", b"a\1"])) == 1, "of one prefix the end goes first"
