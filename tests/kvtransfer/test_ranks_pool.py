"""The KV pool of an engine with several ranks: each keeps its own part, and an operation is over
when it is on all ranks of its home. Homes find what another one has stored."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtransfer.pool_peers import CHUNK, SIZE, Engine, prompt
from support.local_pool_backend import LocalPoolServer
from support.pair import linked
from support.shares import Degrees, dims_of, num_ranks
from support.waiting import until

from pdserve.kvtransfer.connector import (
    KVPool,
    PoolDone,
    PoolEvent,
    PoolFailed,
    PoolSettled,
    PoolStored,
    Wake,
    unchanged,
)
from pdserve.kvtransfer.pool.remote_pool import RanksPool, RemotePool, serve_pool
from pdserve.kvtransfer.remote import Service
from pdserve.worker.hosts.pool_servers import shard_of

PATIENCE_S = 60.0
TP2, DP2, TP2_DP2 = Degrees(tp=2), Degrees(dp=2), Degrees(tp=2, dp=2)
FULL = range(4 * CHUNK // SIZE)


class Linked:
    """Ranks of one stage, each with its own blocks: the pools of those beside the first are reached
    over sockets."""

    def __init__(self, server: LocalPoolServer, degrees: Degrees = TP2) -> None:
        dims = [dims_of(rank, degrees) for rank in range(num_ranks(degrees))]
        self.homes = [each.home for each in dims]
        self.ranks = [Engine(server, shard=shard_of(each)) for each in dims]
        self.services: list[Service[Any]] = []
        others = []
        for rank in range(1, len(dims)):
            near, far = linked()
            self.services.append(serve_pool(far, partial(self._pool_of, rank)))
            others.append(RemotePool(near, lambda: None, self.homes[rank]))
        self.pool = RanksPool(self.ranks[0].pool, others)
        self._op_ids = itertools.count(1)
        self._events: list[PoolEvent] = []

    def _pool_of(self, rank: int, wake: Wake) -> KVPool:
        self.ranks[rank].pool.operations._wake = wake
        pool: KVPool = self.ranks[rank].pool
        return pool

    def compute(self, tokens: Sequence[int], blocks: Sequence[int], home: int = 0) -> None:
        for rank, of in zip(self.ranks, self.homes, strict=True):
            if of == home:
                rank.compute(tokens, blocks)

    def holds(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[bool]:
        """True for each rank that holds the rows of these tokens."""
        return [rank.holds(tokens, blocks) for rank in self.ranks]

    def store(self, tokens: Sequence[int], blocks: Sequence[int], home: int = 0) -> int:
        op_id = next(self._op_ids)
        valid = unchanged(self.ranks[0].generations, blocks)
        assert self.pool.store(op_id, tokens, "", blocks, valid, home)
        return op_id

    def retrieve(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        deadline_s: float = 300.0,
        home: int = 0,
    ) -> int:
        op_id = next(self._op_ids)
        self.pool.retrieve(op_id, tokens, "", 0, blocks, deadline_s, home)
        return op_id

    def event(self, op_id: int) -> PoolEvent:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            self._events += self.pool.poll()
            if self._events:
                event = self._events.pop(0)
                assert event.op_id == op_id
                return event
            time.sleep(0.001)
        raise AssertionError("no event")

    def close(self) -> None:
        self.pool.close()
        for service in self.services:
            service.close()


@pytest.fixture
def server() -> LocalPoolServer:
    return LocalPoolServer()


@pytest.fixture
def pair(server: LocalPoolServer) -> Iterator[Callable[..., Linked]]:
    made: list[Linked] = []

    def make(degrees: Degrees = TP2) -> Linked:
        made.append(Linked(server, degrees))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert not server.in_use


def test_each_rank_stores_and_finds_its_own_rows(
    server: LocalPoolServer, pair: Callable[[], Linked]
) -> None:
    first, second = pair(), pair()
    tokens = prompt(4 * CHUNK)
    first.compute(tokens, FULL)
    first.ranks[1].blocks[:] += 1  # its rows are its own
    stored = first.event(first.store(tokens, FULL))
    assert isinstance(stored, PoolStored) and stored.num_tokens == 4 * CHUNK
    assert len(server.chunks) == 8, "four chunks of each rank"
    found = second.event(second.retrieve(tokens, FULL))
    assert isinstance(found, PoolDone) and found.num_tokens == 4 * CHUNK
    assert found.num_bytes == stored.num_bytes > 0
    second.ranks[1].blocks[list(FULL)] -= 1
    for rank in second.ranks:
        for block in FULL:
            wanted = first.ranks[0].blocks[block]
            assert ((rank.blocks[block] - wanted).abs() < 1e-6).all()


def test_a_hit_is_what_every_rank_has(server: LocalPoolServer, pair: Callable[[], Linked]) -> None:
    first, second = pair(), pair()
    tokens = prompt(4 * CHUNK)
    first.compute(tokens, FULL)
    first.event(first.store(tokens, FULL))
    seals = first.ranks[1].pool._chunks.prefix(tokens, "").seals
    del server.chunks[seals[2]]
    found = second.event(second.retrieve(tokens, FULL))
    assert isinstance(found, PoolDone) and found.num_tokens == 2 * CHUNK
    del server.chunks[seals[0]]
    op_id = second.retrieve(tokens, FULL)
    missed = second.event(op_id)
    assert isinstance(missed, PoolFailed) and missed.reason == "miss"
    assert missed.detail.startswith("rank 1")
    if not missed.settled:  # rank 0 was about to copy what it has found
        assert second.event(op_id) == PoolSettled(op_id)


def test_blocks_settle_when_no_rank_touches_them(
    server: LocalPoolServer, pair: Callable[[], Linked]
) -> None:
    first, second = pair(), pair()
    tokens = prompt(4 * CHUNK)
    first.compute(tokens, FULL)
    first.event(first.store(tokens, FULL))
    faults = second.ranks[1].gated_copies()
    faults.copies_frozen = True
    op_id = second.retrieve(tokens, FULL)
    second.ranks[1].until_copying(op_id)
    second.pool.cancel(op_id)
    failed = second.event(op_id)
    # rank 0 may have been done already
    assert isinstance(failed, PoolFailed) and failed.reason == "cancelled" and not failed.settled
    time.sleep(0.05)
    assert not second.pool.poll(), "its blocks are still written"
    faults.copies_frozen = False
    assert second.event(op_id) == PoolSettled(op_id)
    again = second.event(second.retrieve(tokens, FULL))
    assert isinstance(again, PoolDone)


def test_a_rank_that_refuses_fails_the_store(
    server: LocalPoolServer, pair: Callable[[], Linked], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair(), pair()
    tokens = prompt(4 * CHUNK)
    first.compute(tokens, FULL)
    monkeypatch.setattr(first.ranks[1].pool, "_store_cap", 0)
    op_id = first.store(tokens, FULL)
    failed = first.event(op_id)
    assert isinstance(failed, PoolFailed) and failed.reason == "refused"
    if not failed.settled:  # rank 0 was copying
        assert first.event(op_id) == PoolSettled(op_id)
    missed = second.event(second.retrieve(tokens, FULL))
    assert isinstance(missed, PoolFailed) and missed.reason == "miss"
    monkeypatch.setattr(first.ranks[0].pool, "_store_cap", 0)
    assert not first.pool.store(99, tokens, "", FULL, lambda: True), "nobody is asked"


@pytest.mark.parametrize("degrees", [DP2, TP2_DP2], ids=str)
def test_homes_share_chunks_and_touch_their_own_blocks(
    server: LocalPoolServer, pair: Callable[..., Linked], degrees: Degrees
) -> None:
    engine = pair(degrees)
    tokens, there = prompt(4 * CHUNK), list(range(20, 20 + len(FULL)))
    engine.compute(tokens, FULL, home=1)
    stored = engine.event(engine.store(tokens, FULL, home=1))
    assert isinstance(stored, PoolStored) and stored.num_bytes > 0
    assert len(server.chunks) == 4 * degrees.tp, "the parts of one home"
    assert not any(engine.ranks[rank].pool.operations.num_stored_blocks for rank in (0, 1))
    found = engine.event(engine.retrieve(tokens, there, home=0))
    assert isinstance(found, PoolDone) and found.num_tokens == 4 * CHUNK
    assert found.num_bytes == stored.num_bytes
    assert engine.holds(tokens, there) == [home == 0 for home in engine.homes]
    again = engine.event(engine.store(tokens, there, home=0))
    assert isinstance(again, PoolStored) and again.num_bytes == 0, "the pool has them"
    back = engine.event(engine.retrieve(tokens, there, home=1))
    assert isinstance(back, PoolDone) and all(engine.holds(tokens, there))
    other = pair(Degrees(tp=degrees.tp))
    assert isinstance(other.event(other.retrieve(tokens, FULL)), PoolDone), "as has no homes"


def test_an_operation_of_a_home_waits_for_its_ranks_alone(
    server: LocalPoolServer, pair: Callable[..., Linked]
) -> None:
    engine = pair(TP2_DP2)
    tokens = prompt(4 * CHUNK)
    engine.compute(tokens, FULL)
    engine.event(engine.store(tokens, FULL))
    faults = engine.ranks[3].gated_copies()
    faults.copies_frozen = True
    stuck = engine.retrieve(tokens, FULL, home=1)
    engine.ranks[3].until_copying(stuck)
    assert isinstance(engine.event(engine.retrieve(tokens, FULL, home=0)), PoolDone)
    engine.pool.cancel(stuck)
    failed = engine.event(stuck)
    assert isinstance(failed, PoolFailed) and failed.reason == "cancelled" and not failed.settled
    assert failed.detail.startswith("rank 2") or failed.detail.startswith("rank 3")
    time.sleep(0.05)
    assert not engine.pool.poll(), "its blocks are still written"
    faults.copies_frozen = False
    assert engine.event(stuck) == PoolSettled(stuck)
    engine.pool.cancel(stuck)
    assert not engine.pool._operations and not engine.pool.poll()
    assert isinstance(engine.event(engine.retrieve(tokens, FULL, home=1)), PoolDone)


def test_a_home_without_rank_0_refuses_by_an_event(
    pair: Callable[..., Linked], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = pair(TP2_DP2)
    tokens = prompt(4 * CHUNK)
    engine.compute(tokens, FULL, home=1)
    with monkeypatch.context() as patch:
        for rank in (2, 3):
            patch.setattr(engine.ranks[rank].pool, "_store_cap", 0)
        refused = engine.event(engine.store(tokens, FULL, home=1))
    assert isinstance(refused, PoolFailed) and refused.reason == "refused" and refused.settled
    short = engine.event(engine.store(tokens[:1], FULL[:1], home=1))
    assert isinstance(short, PoolFailed) and short.reason == "refused", "it has no whole chunk"
    wrong = engine.event(engine.retrieve(tokens, [9999], home=1))
    assert isinstance(wrong, PoolFailed) and wrong.reason == "error" and wrong.settled
    assert "blocks must lie in" in wrong.detail
    for ask in (engine.store, engine.retrieve):
        with pytest.raises(ValueError, match="home must be one of the engine's, not 2"):
            ask(tokens, FULL, home=2)
    monkeypatch.setattr(engine.ranks[0].pool._breaker, "is_open", True)
    assert not engine.pool.available
    assert not engine.pool.store(99, tokens, "", FULL, lambda: True, 1), "nobody is asked"
    assert not engine.pool._operations and not engine.pool.poll()


def test_a_dead_rank_concerns_its_home(pair: Callable[..., Linked]) -> None:
    engine = pair(DP2)
    tokens = prompt(4 * CHUNK)
    engine.compute(tokens, FULL)
    engine.services[0].close()
    assert isinstance(engine.event(engine.store(tokens, FULL)), PoolStored)
    assert isinstance(engine.event(engine.retrieve(tokens, FULL)), PoolDone)

    def is_gone() -> bool:
        try:
            engine.retrieve(tokens, FULL, home=1)
        except ConnectionError:
            return True
        return False

    until(is_gone)


class Scripted:
    """A pool that says what the test lets it say."""

    chunk_tokens = CHUNK
    available = True

    def __init__(self, home: int = 0) -> None:
        self.home = home
        self.events: list[PoolEvent] = []
        self.is_asked = self.cancelled = False

    def retrieve(self, *_: object) -> None:
        self.is_asked = True

    def cancel(self, op_id: int) -> None:
        self.cancelled = True

    def poll(self) -> list[PoolEvent]:
        events, self.events = self.events, []
        return events


ANSWERS = st.one_of(
    st.integers(1, 9).map(lambda chunks: [PoolDone(1, chunks * CHUNK, 10, 0.5)]),
    st.sampled_from(["miss", "deadline"]).map(lambda why: [PoolFailed(1, why, "", True)]),
    st.just([PoolFailed(1, "deadline", "", False), PoolSettled(1)]),
)


@given(st.lists(ANSWERS, min_size=2, max_size=4), st.integers(0, 1), st.data())
def test_one_answer_comes_when_all_have_answered_and_blocks_are_whole_when_all_have_settled(
    scripts: list[list[PoolEvent]], home: int, data: st.DataObject
) -> None:
    everybody: list[Any] = [Scripted(home % 2) for home in range(2 * len(scripts))]
    pools = [pool for pool in everybody if pool.home == home]
    ranks = RanksPool(everybody[0], everybody[1:])
    ranks.retrieve(1, [], "", 0, [], 1.0, home)
    left = [list(script) for script in scripts]
    said: list[PoolEvent] = []
    while any(left):
        rank = data.draw(st.sampled_from([i for i, rest in enumerate(left) if rest]))
        pools[rank].events.append(left[rank].pop(0))
        has_failed = any(isinstance(event, PoolFailed) for event in said)
        said += ranks.poll()
        all_answered = all(len(rest) < len(s) for rest, s in zip(left, scripts, strict=True))
        assert bool(said) == all_answered
        if has_failed or any(isinstance(event, PoolSettled) for event in said):
            assert isinstance(said[0], PoolFailed) and not said[0].settled
        assert (len(said) == 2) <= (not any(left))
    first = said[0]
    failed = [event for script in scripts for event in script if isinstance(event, PoolFailed)]
    if not failed:
        found = [event.num_tokens for [event] in scripts if isinstance(event, PoolDone)]
        assert [first] == said and isinstance(first, PoolDone)
        assert first.num_tokens == min(found)
        assert first.num_bytes == 10 * len(scripts)
    else:
        assert isinstance(first, PoolFailed) and all(pool.cancelled for pool in pools)
        assert len(said) == (1 if first.settled else 2)
    assert not ranks._operations
    assert all(pool.is_asked == (pool.home == home) for pool in everybody)
    assert not any(pool.cancelled for pool in everybody if pool.home != home)
