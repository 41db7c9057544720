"""The block bookkeeping: a state machine of random operations against a plain model, and the
properties one by one."""

import random
import time
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from pdserve.engine.memory.block_manager import NULL_BLOCK, BlockManager, OutOfBlocks
from pdserve.protocol.block_digests import NOBODY, BlockHasher, ContentPart, Tenant

NUM_BLOCKS = 14


class BlockMachine(RuleBasedStateMachine):
    """`owners` are block lists, each with one reference per block; `digests` is what each block
    holds for sure."""

    tables = Bundle("tables")
    destinations = Bundle("destinations")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS)
        self.owners: list[list[int]] = []
        self.quarantined: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.digests = 0

    @rule(target=tables, count=st.integers(0, 6), after=st.none() | st.integers(0, NUM_BLOCKS - 1))
    def allocate(self, count: int, after: int | None) -> list[int]:
        before = self.manager.generations.copy()
        free = self.manager.num_free
        owned = {block for blocks in self.owners + self.quarantined for block in blocks}
        try:
            blocks = self.manager.allocate(count, after)
        except OutOfBlocks:
            assert count > free and (self.manager.generations == before).all()
            return self._own([])
        assert count <= free and len(set(blocks)) == count == len(blocks)
        assert not set(blocks) & (owned | {NULL_BLOCK})
        changed = {int(b) for b in (self.manager.generations != before).nonzero()[0]}
        assert changed == set(blocks) and all(
            self.manager.generations[b] == before[b] + 1 for b in blocks
        )
        for block in blocks:
            self.content.pop(block, None)
        return self._own(blocks)

    @rule(table=consumes(tables))
    def release(self, table: list[int]) -> None:
        self._disown(table)
        self.manager.release(table)

    @rule(target=tables, table=tables)
    def fork(self, table: list[int]) -> list[int]:
        self.manager.acquire(table)
        return self._own(list(table))

    @rule(table=tables)
    def commit(self, table: list[int]) -> None:
        for block in table:
            if block not in self.content:
                self.digests += 1
                self.content[block] = self.digests.to_bytes(16, "little")
                self.manager.commit(block, self.content[block])

    @rule(table=tables)
    def commit_what_another_block_holds(self, table: list[int]) -> None:
        taken = list(self.content.items())
        blank = [block for block in table if block not in self.content]
        if taken and blank:
            holder, digest = taken[0]
            self.manager.commit(blank[0], digest)
            assert self.manager.match([digest]) == [holder]

    @rule(target=tables, data=st.data())
    def hit(self, data: st.DataObject) -> list[int]:
        """Known content is found, wherever it is, and can be owned."""
        known = data.draw(
            st.lists(st.sampled_from(sorted(self.content)), unique=True)
            if self.content
            else st.just([])
        )
        found = self.manager.match([self.content[block] for block in known])
        assert found == known
        free = self.manager.num_free
        unowned = self.manager.num_free_among(found)
        self.manager.acquire(found)
        assert self.manager.num_free == free - unowned
        return self._own(found)

    @rule()
    def miss(self) -> None:
        assert self.manager.match([b"\xff" * 16, *self.content.values()]) == []

    @rule(target=destinations, count=st.integers(1, 3))
    @precondition(lambda self: self.manager.num_free >= 3)
    def cancel_a_transfer(self, count: int) -> list[int]:
        blocks = self.manager.allocate(count)
        for block in blocks:
            self.content.pop(block, None)
        self.manager.quarantine(blocks, "transfer")
        self.quarantined.append(blocks)
        return blocks

    @rule(blocks=consumes(destinations))
    def settle(self, blocks: list[int]) -> None:
        self.quarantined.remove(blocks)
        self.manager.settle(blocks)

    @invariant()
    def is_sound(self) -> None:
        self.manager.check_integrity(self.owners)
        counts = Counter(block for blocks in self.owners for block in blocks)
        num_quarantined = sum(map(len, self.quarantined))
        assert (self.manager.num_owned, self.manager.num_quarantined) == (
            len(counts),
            num_quarantined,
        )
        assert self.manager.num_free == NUM_BLOCKS - 1 - len(counts) - num_quarantined
        assert all(self.manager.num_owners(block) == count for block, count in counts.items())

    def _own(self, blocks: list[int]) -> list[int]:
        self.owners.append(blocks)
        return blocks

    def _disown(self, table: list[int]) -> None:
        self.owners = [blocks for blocks in self.owners if blocks is not table]


BlockMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestBlockMachine = BlockMachine.TestCase


def cached(manager: BlockManager, count: int, first_digest: int = 0) -> list[int]:
    """`count` free blocks with known content."""
    blocks = manager.allocate(count)
    for i, block in enumerate(blocks):
        manager.commit(block, bytes([first_digest + i]))
    manager.release(blocks)
    return blocks


def holds(manager: BlockManager, digest: int) -> bool:
    return bool(manager.match([bytes([digest])]))


def test_least_recently_used_content_goes_first_and_of_one_sequence_the_end() -> None:
    manager = BlockManager(7)
    cached(manager, 3, 0)
    cached(manager, 3, 3)
    first = manager.match([bytes([0])])
    manager.acquire(first)
    manager.release(first)  # block 0 is now the most recently used
    order = []
    for _ in range(6):
        manager.allocate(1)
        order += [d for d in range(6) if d not in order and not holds(manager, d)]
    assert order == [2, 1, 5, 4, 3, 0]


def test_blank_blocks_are_taken_before_known_content() -> None:
    manager = BlockManager(9)
    cached(manager, 4)
    manager.allocate(4)
    assert all(holds(manager, digest) for digest in range(4))


def test_no_content_is_kept_without_caching() -> None:
    manager = BlockManager(5, enable_caching=False)
    cached(manager, 3)
    assert not any(holds(manager, digest) for digest in range(3)) and manager.num_free == 4


def pool_with_free(num_blocks: int, free: list[int]) -> BlockManager:
    """Only the blocks `free` are free."""
    manager = BlockManager(num_blocks)
    assert sorted(manager.allocate(num_blocks - 1)) == list(range(1, num_blocks))
    manager.release(free)
    return manager


@pytest.mark.parametrize(
    ("free", "count", "after", "expected"),
    [
        ([2, 3, 7, 8, 9], 3, None, [7, 8, 9]),  # the first run that is long enough
        ([2, 3, 4, 7, 8, 9], 2, None, [2, 3]),
        ([2, 3, 7, 8, 9], 2, 6, [7, 8]),  # right behind the table's last block
        ([2, 3, 7, 8, 9], 2, 9, [2, 3]),  # nothing is free there
        # no run is long enough: the longest first
        ([2, 4, 5, 8, 9, 10], 5, None, [8, 9, 10, 4, 5]),
        ([1, 3, 5], 3, None, [1, 3, 5]),
        ([11], 1, 10, [11]),
        ([1], 1, 11, [1]),  # the KV cache ends there
    ],
)
def test_neighbours_where_possible(
    free: list[int], count: int, after: int | None, expected: list[int]
) -> None:
    assert pool_with_free(12, free).allocate(count, after) == expected


def test_growing_one_block_at_a_time_stays_contiguous() -> None:
    manager = pool_with_free(12, [2, 6, 7, 8, 9])
    table = manager.allocate(1, 5)
    for _ in range(3):
        table += manager.allocate(1, table[-1])
    assert table == [6, 7, 8, 9]


def test_too_few_blocks_take_nothing() -> None:
    manager = BlockManager(6)
    cached(manager, 2)
    with pytest.raises(OutOfBlocks, match="6 blocks wanted, 5 free"):
        manager.allocate(6)
    assert manager.num_free == 5 and holds(manager, 0)


def test_quarantined_blocks_are_given_to_nobody() -> None:
    manager = BlockManager(4)
    blocks = manager.allocate(3)
    manager.quarantine(blocks[:2], "transfer")
    manager.release(blocks[2:])
    with pytest.raises(OutOfBlocks):
        manager.allocate(2)
    manager.settle(blocks[:2])
    assert sorted(manager.allocate(3)) == [1, 2, 3]


def test_a_block_retires_until_the_newest_step_that_may_write_it_is_done() -> None:
    manager = BlockManager(4)
    blocks = manager.allocate(3)
    manager.begin_step()
    manager.begin_step()
    manager.release(blocks[:1])
    assert (manager.num_retiring, manager.num_free) == (1, 0)
    manager.end_step()
    manager.begin_step()  # begun after the release: it cannot know the block
    assert (manager.num_retiring, manager.num_free) == (1, 0)
    manager.end_step()
    assert (manager.num_retiring, manager.num_free) == (0, 1)
    assert manager.allocate(1) == blocks[:1]


def test_misuse_is_an_assertion() -> None:
    manager = BlockManager(4)
    [block] = manager.allocate(1)
    manager.acquire([block])
    with pytest.raises(AssertionError, match="2 owners"):
        manager.quarantine([block], "transfer")
    manager.release([block])
    manager.commit(block, b"a")
    with pytest.raises(AssertionError, match="known content"):
        manager.quarantine([block], "transfer")
    with pytest.raises(AssertionError, match="committed twice"):
        manager.commit(block, b"b")
    manager.release([block])
    with pytest.raises(AssertionError, match="once too often"):
        manager.release([block])


@pytest.mark.parametrize(
    "break_it",
    [
        lambda m: m._refs.__setitem__(1, 2),
        lambda m: m._blank.add(1),
        lambda m: m._lru.pop(5),
        lambda m: m._block_of.clear(),
        lambda m: m._quarantined.__setitem__(2, "?"),
    ],
)
def test_check_integrity_notices(break_it: Callable[[BlockManager], object]) -> None:
    manager = BlockManager(8)
    table = manager.allocate(4)
    manager.commit(table[0], b"x")
    other = manager.allocate(1)
    manager.commit(other[0], b"y")
    manager.release(other)
    manager.check_integrity([table])
    break_it(manager)
    with pytest.raises(AssertionError):
        manager.check_integrity([table])


def test_a_pool_needs_two_blocks() -> None:
    with pytest.raises(ValueError, match="num_kv_blocks must be at least 2"):
        BlockManager(1)


def test_a_fragmented_pool_allocates_fast() -> None:
    spent = []
    for _ in range(3):
        manager = pool_with_free(100_000, list(range(1, 100_000, 2)))
        start = time.thread_time()
        blocks = manager.allocate(500)
        spent.append(time.thread_time() - start)
        assert blocks == list(range(1, 1000, 2))
    assert min(spent) < 0.05, "seconds of this thread's work"


def chain(tokens: list[int], salt: str = "", model: str = "m", block_size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    BlockHasher(model, block_size).extend(hashes, tokens, Tenant(salt))
    return hashes


def test_hashes_are_of_full_blocks_and_grow_as_tokens_come() -> None:
    hasher = BlockHasher("m", 4)
    tokens = list(range(11))
    hashes: list[bytes] = []
    for end in range(12):
        hasher.extend(hashes, tokens[:end], NOBODY)
        assert len(hashes) == end // 4
    assert hashes == chain(tokens) and all(len(digest) == 16 for digest in hashes)


def test_a_hash_names_all_that_came_before() -> None:
    base = chain(list(range(12)))
    other_head = chain([99, *range(1, 12)])
    other_tail = chain([*range(11), 99])
    assert not set(base) & set(other_head)
    assert base[:2] == other_tail[:2] and base[2] != other_tail[2]
    repeated = chain([7] * 12)
    assert len(set(repeated)) == 3  # equal blocks at different places


def test_salts_models_and_block_sizes_share_nothing() -> None:
    tokens = list(range(16))
    variants = [
        chain(tokens),
        chain(tokens, salt="a"),
        chain(tokens, salt="b"),
        chain(tokens, model="n"),
        chain(tokens, block_size=8),
    ]
    assert len({digest for hashes in variants for digest in hashes}) == 4 * 4 + 2


def test_a_salt_that_spells_out_a_block_is_no_key_to_it() -> None:
    """Digest of block 1 = H(parent + tokens): a salt of just these bytes must not stand for that
    block."""
    hasher = BlockHasher("m", 4)
    tokens = list(range(8))
    for salt in ("", "victim"):
        victim: list[bytes] = []
        hasher.extend(victim, tokens, Tenant(salt))
        block = b"".join(token.to_bytes(4, "little") for token in tokens[:4])

        class Bytes(str):
            def encode(self, *_: object) -> bytes:  # a name need not be text to make the point
                return victim[0] + block  # noqa: B023

        class Spelled(Tenant, frozen=True):
            @property
            def name(self) -> str:
                return Bytes()

        attacker: list[bytes] = []
        hasher.extend(attacker, tokens[4:], Spelled())
        assert attacker[0] != victim[1]


def test_tenants_are_their_salt_and_their_adapter() -> None:
    tenants = [Tenant("a", "b"), Tenant("ab"), Tenant("", "ab"), Tenant("1:a", "b"), NOBODY]
    tenants += [Tenant("a"), Tenant("", "a")]
    hasher = BlockHasher("m", 4)
    digests = set()
    for tenant in tenants:
        hashes: list[bytes] = []
        hasher.extend(hashes, [1, 2, 3, 4], tenant)
        digests |= {hashes[0], hasher.content([1, 2, 3, 4], tenant)}
    assert len(digests) == 2 * len(tenants) and len({t.name for t in tenants}) == len(tenants)


def test_blocks_are_of_the_rows_and_content_of_the_model() -> None:
    """A cache of another dtype shares no blocks, and may yet take the ticket's rows."""
    one, other = BlockHasher("m/bf16", 4, "m"), BlockHasher("m/fp8", 4, "m")
    hashes: list[list[bytes]] = [[], []]
    for hasher, found in zip((one, other), hashes, strict=True):
        hasher.extend(found, [1, 2, 3, 4], NOBODY)
    assert hashes[0] != hashes[1]
    assert one.content([1, 2], NOBODY) == other.content([1, 2], NOBODY)


def test_a_part_counts_in_the_blocks_that_it_overlaps_and_after_them() -> None:
    hasher = BlockHasher("m", 4)
    tokens = [7] * 16

    def blocks(*parts: ContentPart) -> list[bytes]:
        hashes: list[bytes] = []
        hasher.extend(hashes, tokens[:8], NOBODY, parts)
        hasher.extend(hashes, tokens, NOBODY, parts)
        return hashes

    plain = blocks()
    image = ContentPart(5, 6, b"i" * 16)
    with_image = blocks(image)
    assert with_image[0] == plain[0] and not set(with_image[1:]) & set(plain)
    others = [
        ContentPart(5, 6, b"j" * 16),  # another image
        ContentPart(6, 5, b"i" * 16),  # the same one a position later
        ContentPart(1, 6, b"i" * 16),
    ]
    for part in others:
        assert not set(blocks(part)[1:]) & set(with_image[1:])
        assert hasher.content(tokens, NOBODY, [part]) != hasher.content(tokens, NOBODY, [image])
    later = ContentPart(12, 4, b"k" * 16)
    assert blocks(image, later)[:3] == with_image[:3] and blocks(image, later)[3] != with_image[3]


def test_content_names_tokens_salt_and_model() -> None:
    hasher = BlockHasher("m", 4)
    contents = [
        hasher.content([1, 2], NOBODY),
        hasher.content([1, 2, 0], NOBODY),
        hasher.content([2, 1], NOBODY),
        hasher.content([1, 2], Tenant("s")),
        hasher.content([2], Tenant("\0\x01\0\0\0")),
        BlockHasher("m", 4, "n").content([1, 2], NOBODY),
    ]
    assert len(set(contents)) == len(contents)
    assert hasher.content((1, 2), NOBODY) == contents[0]
    hashes: list[bytes] = []
    hasher.extend(hashes, [1, 2, 3, 4], NOBODY)
    assert hasher.content([1, 2, 3, 4], NOBODY) != hashes[0]


@pytest.mark.parametrize("seed", range(5))
def test_free_space_is_what_counting_block_by_block_gives(seed: int) -> None:
    chance = random.Random(seed)
    manager = BlockManager(60)
    owned = manager.allocate(59)
    known = chance.sample(owned, 20)
    for block in known:
        manager.commit(block, block.to_bytes(2, "big"))
    freed = chance.sample(owned, (0, 1, 30, 58, 59)[seed])
    manager.release(freed)
    blank = set(freed) - set(known)
    runs = "".join("f" if block in blank else " " for block in range(60)).split()
    space = manager.free_space()
    assert (space.num_blank, space.num_cached) == (len(blank), len(freed) - len(blank))
    assert (space.num_runs, space.longest_run) == (len(runs), max(map(len, runs), default=0))
    assert space.fragmentation == pytest.approx(1 - space.longest_run / len(blank) if blank else 0)


def test_changes_of_the_cache_are_noted_for_who_asks() -> None:
    blocks = BlockManager(4)
    digests = [bytes([number]) * 16 for number in range(2)]
    changes: dict[bytes, bool] = {}
    owned = blocks.allocate(3)
    blocks.commit(owned[0], digests[0])
    blocks.cache_changes = changes
    blocks.commit(owned[1], digests[1])
    blocks.commit(owned[2], digests[0])  # held already, by the first block
    assert changes == {digests[1]: True}
    blocks.release(owned)
    changes.clear()
    blocks.allocate(3)  # evicts both
    assert changes == {digests[0]: False, digests[1]: False} and blocks.cached_digests() == []
