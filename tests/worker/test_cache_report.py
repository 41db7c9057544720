"""A worker reports its prefix cache, and a router uses the report."""

import random
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import pytest
from support.pair import ROUTER, SESSION, Pair, deltas, submit

from pdserve.engine.memory.block_manager import BlockManager
from pdserve.protocol.block_digests import Tenant
from pdserve.protocol.commands import Resync, RouterLost, Subscribe
from pdserve.protocol.events import CACHE_KEY_BYTES, CacheChange, CacheState, Hello, Snapshot
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.fleet.prefix_index import CachedBlocks, PromptBlocks
from pdserve.worker import cache_report
from pdserve.worker.cache_report import PERIOD_S, CacheReport


def digest_of(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "big"), digest_size=16).digest()


def keys_of(digests: list[bytes]) -> set[int]:
    return set(memoryview(b"".join(d[:8] for d in digests)).cast("Q").tolist())


class Churn:
    """A block manager whose cache changes at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.blocks = BlockManager(24)
        self._owned: list[list[int]] = []

    def step(self) -> None:
        if self._owned and (self.random.random() < 0.5 or self.blocks.num_free < 4):
            self.blocks.release(self._owned.pop(self.random.randrange(len(self._owned))))
            return
        taken = self.blocks.allocate(self.random.randrange(1, 4))
        for block in taken:
            self.blocks.commit(block, digest_of(self.random.randrange(60)))
        self._owned.append(taken)


@pytest.mark.parametrize("seed", range(8))
def test_a_router_that_joins_late_and_loses_messages_ends_with_what_the_worker_holds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_report, "KEYS_PER_MESSAGE", 3)
    churn = Churn(seed)
    report = CacheReport([churn.blocks])
    cached = CachedBlocks()
    now = 1000.0
    lose = random.Random(seed)
    num_resyncs = 0
    for turn in range(700):
        churn.step()
        now += 0.05
        stream: list[CacheChange | CacheState] = [report.begin((ROUTER, 1))] if turn == 100 else []
        part = report.next_part()
        stream += [part[1]] if part is not None else []
        stream += report.changes(now, anyone=turn >= 100)
        for event in stream:
            if turn < 500 and lose.random() < 0.03:
                continue
            cached.changed(event) if isinstance(event, CacheChange) else cached.filled(event, now)
        if turn > 100 and turn % 20 == 0 and cached.wants_resync(report.number, now):
            num_resyncs += 1
            cached.filled(report.begin((ROUTER, 1)), now)
    now += PERIOD_S
    while (part := report.next_part()) is not None:
        cached.filled(part[1], now)
    for change in report.changes(now, anyone=True):
        cached.changed(change)
    assert num_resyncs > 0 and not cached.wants_resync(report.number, now + 100)
    expected = keys_of(churn.blocks.cached_digests())
    assert len(cached) == len(expected) > 3 and all(
        cached.num_held([key], 0, 1, now) for key in expected
    )


def test_changes_wait_for_a_period_unless_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_report, "KEYS_PER_MESSAGE", 3)
    blocks = BlockManager(12)
    report = CacheReport([blocks])
    owned = blocks.allocate(10)

    def commit(first: int, count: int) -> None:
        for number in range(first, first + count):
            blocks.commit(owned[number], digest_of(number))

    assert report.due() == float("inf") and report.changes(50.0, anyone=True) == []
    commit(0, 1)
    assert [len(c.stored) for c in report.changes(50.0, anyone=True)] == [8]
    commit(1, 2)
    assert report.due() == 50.0 + PERIOD_S and report.changes(50.05, anyone=True) == []
    commit(3, 2)
    told = report.changes(50.06, anyone=True)
    assert [(c.number, len(c.stored), len(c.dropped)) for c in told] == [(2, 24, 0), (3, 8, 0)]
    commit(5, 1)
    assert (
        report.changes(51.0, anyone=False) == []
        and report.changes(60.0, anyone=True) == []
        and report.number == 3
    )


@pytest.fixture
def pair(tiny_llama: Path) -> Iterator[Pair]:
    pair = Pair(tiny_llama, d={"num_kv_blocks": 9})
    yield pair
    pair.close()


def run(pair: Pair, request_id: str, prompt: list[int]) -> None:
    key = RequestKey(ROUTER, SESSION, request_id)
    sampling = SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
    pair.d.command(submit(key, "full", prompt, sampling))
    pair.until(lambda: any(delta.finish_reason for delta in deltas(pair.d, key)))


def follow(events: list, cached: CachedBlocks) -> None:
    for event in events:
        if isinstance(event, CacheChange):
            cached.changed(event)
        elif isinstance(event, CacheState):
            cached.filled(event, 0.0)


def test_a_worker_tells_what_it_computed_and_what_it_evicted(pair: Pair) -> None:
    hello = next(e for e in pair.d.events if isinstance(e, Hello))
    first = [7] * 70
    second = [8] * 100

    def num_cached(prompt: list[int], salt: str = "") -> int:
        cached = CachedBlocks()
        follow(pair.d.events, cached)
        return PromptBlocks(prompt, Tenant(salt)).num_cached_tokens(
            cached, hello.rows_digest, hello.block_size, 0.0
        )

    assert num_cached(first) == 0
    run(pair, "a", first)
    pair.until(lambda: num_cached(first) == 64)
    assert num_cached(first[:33]) == 32 and num_cached(first[:32]) == 16, (
        "the last token is always computed"
    )
    assert num_cached(first, salt="tenant") == 0 and num_cached([7, 9] * 35) == 0
    run(pair, "b", second)  # seven of eight blocks
    pair.until(lambda: num_cached(second) == 96)
    assert num_cached(first) == 16


def test_a_worker_tells_everything_to_who_comes_later_or_asks_again(pair: Pair) -> None:
    prompt = list(range(3, 73))
    run(pair, "a", prompt)
    pair.d.command(Subscribe(router_id="late", session=1))
    pair.turn()
    told = pair.d.by_session["late/1"]
    assert [type(event) for event in told] == [Hello, CacheState, Snapshot]
    _, state, snapshot = told
    assert isinstance(state, CacheState) and isinstance(snapshot, Snapshot)
    assert len(state.stored) == 4 * 8 and state.final and snapshot.cache_number == state.number
    pair.d.command(Resync(router_id="late", session=1))
    pair.d.command(Resync(router_id="stranger", session=1))
    pair.turn()
    again = told[3]
    assert (
        isinstance(again, CacheState)
        and again.stored == state.stored
        and "stranger/1" not in pair.d.by_session
    )
    pair.d.command(RouterLost(router_id="late", session=1))


def test_decoding_sends_no_change_for_a_token(pair: Pair) -> None:
    pair.d.loop.turn()
    key = RequestKey(ROUTER, SESSION, "long")
    sampling = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    pair.d.command(submit(key, "full", [5] * 20, sampling))
    pair.until(lambda: any(delta.finish_reason for delta in deltas(pair.d, key)))
    pair.until(
        lambda: sum(len(e.stored) for e in pair.d.events if isinstance(e, CacheChange)) == 3 * 8
    )
    assert sum(isinstance(e, CacheChange) for e in pair.d.events) <= 3


def test_what_one_home_holds_the_worker_holds() -> None:
    homes = [BlockManager(4), BlockManager(4)]
    report = CacheReport(homes)

    def hold(home: int, number: int) -> list[int]:
        blocks = homes[home].allocate(1)
        homes[home].commit(blocks[0], digest_of(number))
        return blocks

    def evict(home: int, blocks: list[int]) -> None:
        homes[home].release(blocks)
        homes[home].release(homes[home].allocate(homes[home].num_free))

    def told(now: float) -> tuple[bytes, bytes]:
        changes = report.changes(now, anyone=True)
        return b"".join(c.stored for c in changes), b"".join(c.dropped for c in changes)

    key, other = digest_of(1)[:CACHE_KEY_BYTES], digest_of(2)[:CACHE_KEY_BYTES]
    first, second = hold(0, 1), hold(1, 1)
    hold(1, 2)
    assert told(10.0) == (key + other, b"")
    assert report.begin(("router", 1)).stored in (key + other, other + key)
    evict(0, first)
    assert told(20.0) == (key, b""), "home 1 has it yet"
    evict(1, second)
    assert told(30.0) == (b"", key)
    assert report.begin(("router", 2)).stored == other
