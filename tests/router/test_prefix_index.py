"""The router's picture of what workers hold: gaps, bounds, and what it expects of what it has
sent."""

import asyncio
from collections.abc import Callable

import pytest
from router.harness import Harness, until

from pdserve.protocol.block_digests import NOBODY, BlockHasher, Tenant
from pdserve.protocol.commands import Resync
from pdserve.protocol.events import CacheChange, CacheState
from pdserve.router.fleet import prefix_index
from pdserve.router.fleet.prefix_index import (
    ASK_AGAIN_S,
    EXPECTED_S,
    MAX_EXPECTED,
    CachedBlocks,
    PromptBlocks,
)

Make = Callable[..., Harness]
TOKENS = tuple(range(100, 300))


def stored(tokens: tuple[int, ...] = TOKENS, salt: str = "", block_size: int = 16) -> bytes:
    digests: list[bytes] = []
    BlockHasher("model", block_size).extend(digests, tokens, Tenant(salt))
    return b"".join(digest[:8] for digest in digests)


def state(data: bytes, number: int = 0, part: int = 0, final: bool = True) -> CacheState:
    return CacheState(number=number, part=part, final=final, stored=data)


def known(data: bytes) -> CachedBlocks:
    cached = CachedBlocks()
    cached.filled(state(data), 100.0)
    return cached


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("length", [1, 16, 17, 64, 65, 128, 129, 199, 200])
def test_the_longest_held_prefix_counts_in_whole_blocks(block_size: int, length: int) -> None:
    cached = known(stored(block_size=block_size))
    prompt = PromptBlocks((*TOKENS[:length], 1, 2, 3), NOBODY)
    assert (
        prompt.num_cached_tokens(cached, "model", block_size, 0.0)
        == length // block_size * block_size
    )
    assert prompt.num_cached_tokens(cached, "another", block_size, 0.0) == 0
    exact = PromptBlocks(TOKENS[:length], NOBODY)
    assert (
        exact.num_cached_tokens(cached, "model", block_size, 0.0)
        == (length - 1) // block_size * block_size
    )


def test_a_prompt_that_nobody_holds_is_hashed_a_little_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[int] = []
    extend = BlockHasher.extend

    def count(self: BlockHasher, hashes: list[bytes], tokens: tuple[int, ...], who: Tenant) -> None:
        before = len(hashes)
        extend(self, hashes, tokens, who)
        hashed.append(len(hashes) - before)

    other = known(stored())
    monkeypatch.setattr(BlockHasher, "extend", count)
    prompt = PromptBlocks(tuple(range(16 * 4000)), NOBODY)
    assert prompt.num_cached_tokens(CachedBlocks(), "model", 16, 0.0) == 0
    assert prompt.num_cached_tokens(other, "model", 16, 0.0) == 0
    assert sum(hashed) == prefix_index.FIRST_RUN


def test_a_gap_empties_the_index_and_asks_once_in_a_while() -> None:
    cached = known(stored())
    cached.changed(CacheChange(number=1, stored=b"", dropped=b""))
    assert len(cached) == 12 and not cached.wants_resync(1, 200.0)
    cached.changed(CacheChange(number=3, stored=b"", dropped=b""))
    assert len(cached) == 0
    assert cached.wants_resync(None, 200.0) and not cached.wants_resync(3, 200.0 + ASK_AGAIN_S / 2)
    cached.changed(CacheChange(number=4, stored=stored(), dropped=b""))
    assert len(cached) == 0, "changes of a state that is not known"
    assert cached.wants_resync(4, 201.0 + ASK_AGAIN_S), "the answer was lost"
    cached.filled(state(stored(), number=4), 210.0)
    assert len(cached) == 12 and not cached.wants_resync(4, 300.0)


def test_a_snapshot_shows_that_the_last_change_was_lost() -> None:
    cached = known(stored())
    assert not cached.wants_resync(0, 200.0) and cached.wants_resync(1, 200.0) and len(cached) == 0


def test_a_lost_part_is_noticed_and_a_stuck_state_too() -> None:
    cached = CachedBlocks()
    cached.filled(state(stored(), part=0, final=False), 100.0)
    cached.filled(state(stored(), part=2, final=True), 100.0)
    assert len(cached) == 0 and cached.wants_resync(None, 100.0 + ASK_AGAIN_S)
    cached.filled(state(stored(), part=0, final=False), 110.0)
    assert not cached.wants_resync(0, 111.0) and len(cached) == 12
    assert cached.wants_resync(0, 110.0 + ASK_AGAIN_S) and len(cached) == 0


def test_changes_between_parts_win_over_the_parts() -> None:
    data = stored()
    cached = CachedBlocks()
    cached.filled(state(data[:32], part=0, final=False), 1.0)
    cached.changed(CacheChange(number=1, stored=b"", dropped=data[64:80]))
    cached.changed(CacheChange(number=2, stored=data[72:80], dropped=b""))
    cached.filled(state(data[32:], part=1), 1.0)
    keys = memoryview(data).cast("Q").tolist()
    assert [key for key in keys if not cached.num_held([key], 0, 1, 1.0)] == keys[8:9]
    cached.changed(CacheChange(number=3, stored=data[64:72], dropped=b""))
    assert len(cached) == 12


def test_what_was_sent_there_is_expected_for_a_while_unless_it_was_dropped() -> None:
    cached = known(b"")
    prompt = PromptBlocks(TOKENS, NOBODY)
    keys = prompt.keys("model", 16, 4)
    cached.expect(keys, 50.0)
    assert len(keys) == 4
    assert prompt.num_cached_tokens(cached, "model", 16, 50.0 + EXPECTED_S / 2) == 64
    assert prompt.num_cached_tokens(cached, "model", 16, 51.0 + EXPECTED_S) == 0
    cached.changed(CacheChange(number=1, stored=b"", dropped=stored()[16:24]))
    assert prompt.num_cached_tokens(cached, "model", 16, 50.0) == 32
    cached.expect(range(2 * MAX_EXPECTED), 50.0)
    assert not cached.num_held([keys[0]], 0, 1, 50.0) and cached.num_held(
        [2 * MAX_EXPECTED - 1], 0, 1, 50.0
    )


def test_a_worker_that_tells_too_much_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_KEYS", 10)
    cached = known(stored())
    assert len(cached) == 0 and not cached.wants_resync(5, 1000.0)
    cached.changed(CacheChange(number=1, stored=stored(), dropped=b""))
    assert len(cached) == 0


async def test_the_fleet_asks_a_worker_for_what_it_missed(make: Make) -> None:
    harness = await make(0, 1).start()
    worker = harness.decodes[0]
    [seen] = harness.fleet.workers
    worker.push(None, [CacheChange(number=1, stored=stored(), dropped=b"")])
    await until(lambda: len(seen.cached) == 12)
    worker.push(None, [CacheChange(number=4, stored=b"", dropped=b"")])
    await until(lambda: any(isinstance(command, Resync) for command in worker.commands))
    assert len(seen.cached) == 0 and harness.fleet.intake.num_resyncs == 1
    worker.push(None, [state(stored(), number=4)])
    await until(lambda: len(seen.cached) == 12)
    worker.cache_number = 4
    worker.push(None, [worker.snapshot()])
    await asyncio.sleep(0.02)
    assert len(seen.cached) == 12 and harness.fleet.intake.num_resyncs == 1
