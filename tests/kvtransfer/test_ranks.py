"""Pulls between engines of different tensor parallel degree and different stages, over both
transports. Every rank of D finds the bytes of its own KV heads and layers, whichever ranks of P
store them. A rank that fails makes the pull fail, and leaves the memory safe.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvtransfer.kv_peers import expire, rows
from kvtransfer.kv_ranks import BLOCK_SIZE, CONFIG, HEADS, LAYERS, Elsewhere, Ranks, content
from support.shares import Degrees, share_of
from support.waiting import stays, until

from pdserve.kvtransfer.connector import PullDone, PullFailed, PullSettled, Unpinned
from pdserve.kvtransfer.transport.local_agent import LocalAgent, LocalFaults
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import KVCacheMeta

ONE, TP2, TP4 = Degrees(), Degrees(tp=2), Degrees(tp=4)
PP2, PP3, BOTH = Degrees(pp=2), Degrees(pp=3), Degrees(2, 2)
DEGREES = [(ONE, TP2), (TP2, ONE), (TP2, TP4), (TP4, TP2), (TP4, ONE), (TP2, TP2)]
DEGREES += [(PP2, TP2), (BOTH, ONE), (ONE, PP2), (PP3, PP2), (PP2, PP2), (TP4, BOTH)]
SIZES = [(ONE, TP2, 64, 16), (TP2, ONE, 16, 64), (PP2, ONE, 16, 64), (BOTH, PP3, 64, 16)]
NIXL = [(ONE, TP2), (TP4, TP2), (PP2, TP2), (TP4, BOTH), (BOTH, PP3, 64, 16)]


def names_of(pair: tuple[Any, ...]) -> str:
    return "-to-".join(str(degrees) for degrees in pair[:2])


_names = itertools.count()


def everywhere(pairs: list[tuple[Any, ...]]) -> list[Any]:
    """Each pair over every transport. NIXL starts processes: most of its pairs are slow."""
    return [
        pytest.param(
            transport,
            pair,
            id=f"{transport}-{names_of(pair)}",
            marks=[pytest.mark.slow] if transport == "nixl" and pair not in NIXL else [],
        )
        for transport in ("local", "nixl", "linked")
        for pair in pairs
    ]


@pytest.fixture(scope="module")
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pair(transport: str, request: pytest.FixtureRequest) -> Iterator[tuple[Any, Ranks]]:
    from_degree, to_degree, *sizes = request.param
    p_size, d_size = sizes or (BLOCK_SIZE, BLOCK_SIZE)
    near = transport != "nixl"
    linked = transport == "linked"
    source: Any = (
        Ranks("p", CONFIG["local"], from_degree, True, p_size)
        if near
        else Elsewhere(from_degree, p_size)
    )
    sink = Ranks(f"d{next(_names)}", CONFIG[transport], to_degree, False, d_size, linked)
    try:
        sink.receiver.connect(source.meta())
        status = sink.wait(PeerStatus)
        assert status.connected and status.bytes_per_s > 0, status
        yield source, sink
    finally:
        sink.close()
        source.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transport,pair", everywhere(DEGREES), indirect=True)
def test_every_rank_gets_its_heads(pair: tuple[Any, Ranks]) -> None:
    source, sink = pair
    theirs = [5, 6, 7, 20, 2]
    ours = [9, 1, 2, 3, 11]
    ticket = source.publish("a", theirs)
    sink.receiver.pull(1, ticket, ours[1:], 1, 300.0)
    done = sink.wait(PullDone, PullFailed)
    assert isinstance(done, PullDone), done
    whole = content()
    assert done.num_bytes == whole[0].nbytes * 4
    for rank, kv_cache in enumerate(sink.kv_caches):
        heads, layers = share_of(rank, sink.degrees, HEADS, LAYERS)
        want = torch.zeros_like(kv_cache)
        want[ours[1:]] = whole[theirs[1:]][:, heads, layers]
        assert torch.equal(kv_cache, want)
    unpinned: list[Unpinned] = []
    until(lambda: unpinned, doing=lambda: unpinned.extend(source.unpinned()))
    assert unpinned == [Unpinned(ticket.key, "done")], "once, by all ranks together"

    reused = source.publish("b", theirs)
    source.bump(20)
    sink.receiver.pull(2, reused, ours, 0, 300.0)
    failed = sink.wait(PullDone, PullFailed)
    assert isinstance(failed, PullFailed) and failed.reason == "stale-generation", failed
    if not failed.settled:
        sink.wait(PullSettled)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transport,pair", everywhere(SIZES), indirect=True)
def test_every_rank_gets_its_heads_in_blocks_of_its_size(pair: tuple[Any, Ranks]) -> None:
    source, sink = pair
    theirs = [4, 0, 2]
    ours = [9, 1, 2, 3, 11, 7, 20, 5, 6, 21, 23, 10]
    skip = 3
    if sink.block_size > 16:
        theirs = [5, 6, 7, 20, 2, 3, 9, 8, 1, 0, 10, 11]
        ours = [4, 0, 2]
        skip = 1
    sink.receiver.pull(1, source.publish("a", theirs), ours[skip:], skip, 300.0)
    done = sink.wait(PullDone, PullFailed)
    assert isinstance(done, PullDone), done
    whole = rows(content(192 // len(theirs))[theirs])
    first = skip * sink.block_size
    for rank, kv_cache in enumerate(sink.kv_caches):
        heads, layers = share_of(rank, sink.degrees, HEADS, LAYERS)
        assert torch.equal(rows(kv_cache[ours[skip:]]), whole[first:, heads, layers])
        others = [block for block in range(len(kv_cache)) if block not in ours[skip:]]
        assert not kv_cache[others].any()

    reused = source.publish("b", theirs)
    source.bump(theirs[-1])
    sink.receiver.pull(2, reused, ours, 0, 300.0)
    failed = sink.wait(PullDone, PullFailed)
    assert isinstance(failed, PullFailed) and failed.reason == "stale-generation", failed


def faults_of(side: Ranks, rank: int) -> LocalFaults:
    agent = side.rank_receivers[rank].agent
    assert isinstance(agent, LocalAgent)
    return agent.faults


@pytest.mark.parametrize("transport", ["local", "linked"], indirect=True)
@pytest.mark.parametrize("pair", [(TP2, TP2), (TP4, ONE), (PP2, ONE)], indirect=True, ids=names_of)
def test_one_frozen_rank_keeps_the_memory_of_all_until_it_is_quiet(
    pair: tuple[Ranks, Ranks],
) -> None:
    source, sink = pair
    faults = faults_of(source, 1)
    faults.frozen = True
    ticket = source.publish("a", [4, 5])
    sink.receiver.pull(1, ticket, [4, 5], 0, 300.0)
    expire(sink.rank_receivers[-1], 1)
    failed = sink.wait(PullDone, PullFailed)
    assert isinstance(failed, PullFailed) and failed.reason == "deadline" and not failed.settled
    stays(lambda: not sink.receiver.poll(), 0.1)  # bytes of the frozen rank may still land
    faults.frozen = False
    assert sink.wait(PullSettled).pull_id == 1
    sink.receiver.pull(2, source.publish("b", [4, 5]), [6, 7], 0, 300.0)
    assert isinstance(sink.wait(PullDone, PullFailed), PullDone)


@pytest.mark.parametrize("transport", ["local", "linked"], indirect=True)
@pytest.mark.parametrize("pair", [(TP2, ONE), (PP2, TP2)], indirect=True, ids=names_of)
def test_a_dead_rank_loses_the_peer(pair: tuple[Ranks, Ranks]) -> None:
    source, sink = pair
    faults_of(source, 1).dead = True
    sink.receiver.pull(1, source.publish("a", [4]), [4], 0, 300.0)
    failed = sink.wait(PullDone, PullFailed)
    assert isinstance(failed, PullFailed) and failed.reason == "peer-lost"
    if not failed.settled:
        sink.wait(PullSettled)


def test_heads_that_nobody_stores_are_refused() -> None:
    source = Ranks("p", CONFIG["local"], TP2, filled=True)
    sink = Ranks("d", CONFIG["local"], ONE, filled=False)
    try:
        half = source.meta()
        alone = KVCacheMeta(
            **{name: getattr(half, name) for name in half.__struct_fields__}
            | {"ranks": half.ranks[:1]}
        )
        sink.receiver.connect(alone)
        status = sink.wait(PeerStatus)
        assert not status.connected and "KV head 2 of layer 0 is stored on no rank" in status.detail
    finally:
        sink.close()
        source.close()
