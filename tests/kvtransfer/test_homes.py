"""Hand-overs between engines of several homes. A ticket is read only from the ranks of its home,
into the blocks of one of our homes, and is compared with the generations of its home.

Homes of P have the same block numbers and generations, and different bytes.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from kvtransfer.kv_peers import expire, key
from kvtransfer.kv_ranks import CONFIG, HEADS, LAYERS, Elsewhere, Ranks, content
from support.shares import Degrees, dims_of, share_of
from support.waiting import stays, until

from pdserve.kvtransfer.connector import PullDone, PullFailed, PullSettled, Unpinned
from pdserve.kvtransfer.transport.local_agent import LocalAgent, LocalFaults
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import Source, Ticket

ONE, TP2, PP2, DP2, DP3 = Degrees(), Degrees(tp=2), Degrees(pp=2), Degrees(dp=2), Degrees(dp=3)
TP2_DP2, ALL = Degrees(tp=2, dp=2), Degrees(2, 2, 2)
DEGREES = [(DP2, ONE), (ONE, DP2), (DP2, DP3), (TP2_DP2, PP2), (PP2, TP2_DP2), (TP2_DP2, DP2)]
DEGREES += [(ALL, ONE), (ONE, ALL), (ALL, TP2_DP2), (DP2, ALL), (DP3, TP2), (TP2_DP2, TP2_DP2)]
THEIRS, OURS = [5, 6, 7, 20, 2], [9, 1, 2, 3, 11]

_names = itertools.count()
_pull_ids = itertools.count(1)


def faults_of(side: Ranks, rank: int) -> LocalFaults:
    agent = side.rank_receivers[rank].agent
    assert isinstance(agent, LocalAgent)
    return agent.faults


class Joined:
    """P and D, connected. linked: D's rank 0 reaches its others as if they lived elsewhere."""

    def __init__(
        self, p: Degrees, d: Degrees, *, linked: bool = False, d_size: int = 16, heads: int = HEADS
    ) -> None:
        self.p = Ranks("p", CONFIG["local"], p, True, num_heads=heads)
        self.d = Ranks("d", CONFIG["local"], d, False, d_size, linked, heads)
        self.p_homes, self.d_homes = range(p.dp), range(d.dp)
        connect(self.p, self.d)

    def pull(self, ticket: Ticket, blocks: list[int], home: int = 0) -> PullDone | PullFailed:
        return pull(self.d, ticket, blocks, home)

    def follow(self, name: str, blocks: list[int], home: int = 0) -> int:
        pull_id = next(_pull_ids)
        source = Source("p", 1, key(name))
        self.d.receiver.follow(pull_id, source, b"content", blocks, 0, 300.0, home)
        return pull_id

    def under_way(self, rank: int) -> list[Any]:
        """D's pulls as a rank of it knows them."""
        links = self.d.rank_receivers[rank].links
        return [pull for link in links for pull in link.pulls.under_way]

    def close(self) -> None:
        self.d.close()
        self.p.close()


def connect(source: Any, sink: Ranks) -> PeerStatus:
    sink.receiver.connect(source.meta())
    status = sink.wait(PeerStatus)
    assert status.connected and status.bytes_per_s > 0, status
    assert not sink.receiver.poll(), "the engine is told once"
    return status


def pull(
    sink: Ranks, ticket: Ticket, blocks: list[int], home: int = 0, skip: int = 0
) -> PullDone | PullFailed:
    sink.receiver.pull(next(_pull_ids), ticket, blocks[skip:], skip, 300.0, home)
    ended: PullDone | PullFailed = sink.wait(PullDone, PullFailed)
    return ended


def unpinned(source: Any, count: int) -> list[Unpinned]:
    """Wait for prompts that the source no longer keeps for D, at least `count`."""
    told: list[Unpinned] = []
    until(lambda: len(told) >= count, doing=lambda: told.extend(source.unpinned()))
    return told


@pytest.fixture
def joined(request: pytest.FixtureRequest) -> Iterator[Joined]:
    p, d, *more = request.param
    made = Joined(p, d, **(more[0] if more else {}))
    yield made
    made.close()


def between(*pairs: tuple[Any, ...]) -> Any:
    def name(pair: tuple[Any, ...]) -> str:
        return "-".join([str(pair[0]), "to", str(pair[1]), *(pair[2] if len(pair) > 2 else ())])

    return pytest.mark.parametrize("joined", pairs, indirect=True, ids=name)


def assert_home_to_home(source: Any, sink: Ranks, p_home: int, d_home: int) -> None:
    """All but the first block of a prompt of P's home move into D's home, and nowhere else."""
    for kv_cache in sink.kv_caches:
        kv_cache.zero_()
    ticket = source.publish(f"request-{next(_names)}", THEIRS, p_home)
    assert ticket.home == p_home
    done = pull(sink, ticket, OURS, d_home, skip=1)
    assert isinstance(done, PullDone), done
    whole = content(16, p_home, sink.num_heads)
    num_bytes = 0
    for rank, kv_cache in enumerate(sink.kv_caches):
        want = torch.zeros_like(kv_cache)
        if dims_of(rank, sink.degrees).home == d_home:
            heads, layers = share_of(rank, sink.degrees, sink.num_heads, LAYERS)
            want[OURS[1:]] = whole[THEIRS[1:]][:, heads, layers]
            num_bytes += 4 * kv_cache[0].nbytes
        assert torch.equal(kv_cache, want), f"rank {rank}"
    assert done.num_bytes == num_bytes, "of the ranks of one home"
    assert unpinned(source, 1) == [Unpinned(ticket.key, "done")], (
        "once, by all ranks of the home together"
    )


def assert_every_home_to_every_home(source: Any, sink: Ranks) -> None:
    for p_home, d_home in itertools.product(range(source.meta().num_homes), range(sink.degrees.dp)):
        assert_home_to_home(source, sink, p_home, d_home)


@between(*DEGREES, (DP2, TP2_DP2, {"linked": True}))
def test_every_rank_of_the_home_gets_its_heads(joined: Joined) -> None:
    assert_every_home_to_every_home(joined.p, joined.d)


@between(
    (TP2_DP2, ONE, {"heads": 1}), (TP2_DP2, TP2_DP2, {"heads": 1}), (ONE, TP2_DP2, {"heads": 1})
)
def test_latents_are_read_from_any_rank_of_the_home(joined: Joined) -> None:
    assert_every_home_to_every_home(joined.p, joined.d)


@pytest.mark.processes
def test_homes_over_nixl() -> None:
    source = Elsewhere(TP2_DP2)
    try:
        for degrees in (ONE, Degrees(pp=2, dp=2)):
            sink = Ranks(f"d{next(_names)}", CONFIG["nixl"], degrees, False)
            try:
                connect(source, sink)
                assert_every_home_to_every_home(source, sink)
                good, stale = (source.publish(f"{name}-{degrees}", THEIRS, 1) for name in "ab")
                source.bump(20, 0)
                done = pull(sink, good, OURS)
                assert isinstance(done, PullDone), done
                source.bump(20, 1)
                failed = pull(sink, stale, OURS)
                assert isinstance(failed, PullFailed) and failed.reason == "stale-generation"
                assert [each.outcome for each in unpinned(source, 2)] == ["done", "rejected"]
            finally:
                sink.close()
    finally:
        source.close()


@between((DP2, ONE), (TP2_DP2, DP2, {"d_size": 64}))
def test_generations_are_those_of_the_tickets_home(joined: Joined) -> None:
    p = joined.p
    blocks = OURS[: 5 * 16 // joined.d.block_size] if joined.d.block_size == 16 else [4, 0]
    tickets = [p.publish(f"request-{home}", THEIRS, home) for home in joined.p_homes]
    p.bump(20, 1)
    assert isinstance(joined.pull(tickets[0], blocks), PullDone), "another home's block was reused"
    failed = joined.pull(tickets[1], blocks)
    assert isinstance(failed, PullFailed) and failed.reason == "stale-generation", failed
    assert p.publish("again", THEIRS, 1).generations[3] == tickets[1].generations[3] + 1
    assert p.publish("other", THEIRS, 0).generations == tickets[0].generations


@between((DP3, ONE))
def test_pulls_from_several_homes_are_verified_each_by_its_own_table(joined: Joined) -> None:
    """Slow enough for their generations to be read together."""
    p, d = joined.p, joined.d
    for rank in range(3):
        faults_of(p, rank).delay_s = 0.02
    for blocks in ([1, 2], [22, 23]):
        tickets = [p.publish(f"{home}/{blocks}", blocks, home) for home in joined.p_homes]
        p.bump(blocks[0], 1)
        pulls = {next(_pull_ids): (home, [2 * home, 2 * home + 1]) for home in joined.p_homes}
        for pull_id, (home, into) in pulls.items():
            d.receiver.pull(pull_id, tickets[home], into, 0, 300.0)
        for _ in pulls:
            ended = d.wait(PullDone, PullFailed)
            home, into = pulls[ended.pull_id]
            assert isinstance(ended, PullFailed) == (home == 1), ended
            if home != 1:
                assert torch.equal(d.kv_caches[0][into], content(16, home)[blocks])


@between((TP2_DP2, DP2))
def test_a_frozen_home_keeps_only_the_memory_of_pulls_from_it(joined: Joined) -> None:
    p, d = joined.p, joined.d
    faults = faults_of(p, 3)
    faults.frozen = True
    stuck = next(_pull_ids)
    d.receiver.pull(stuck, p.publish("a", [4, 5], 1), [4, 5], 0, 300.0, 1)
    until(lambda: joined.under_way(1))
    assert not joined.under_way(0), "ranks of other homes have no part in it"
    assert isinstance(joined.pull(p.publish("b", [4, 5], 0), [4, 5], 1), PullDone)
    expire(d.rank_receivers[1], stuck)
    failed = d.wait(PullFailed)
    assert failed.reason == "deadline" and not failed.settled
    stays(lambda: not d.receiver.poll(), 0.1)
    faults.frozen = False
    assert d.wait(PullSettled).pull_id == stuck
    assert isinstance(joined.pull(p.publish("c", [4, 5], 1), [6, 7], 1), PullDone)


@between((ONE, TP2_DP2), (ONE, TP2_DP2, {"linked": True}))
def test_a_pull_that_is_given_up_ends_on_the_ranks_of_its_home(joined: Joined) -> None:
    p, d = joined.p, joined.d
    faults_of(p, 0).frozen = True
    pull_id = next(_pull_ids)
    d.receiver.pull(pull_id, p.publish("a", [4, 5]), [4, 5], 0, 300.0, 1)
    until(lambda: joined.under_way(2) and joined.under_way(3))
    d.receiver.cancel(pull_id)
    failed = d.wait(PullFailed)
    assert failed.reason == "cancelled" and failed.detail.startswith("rank ")
    assert not failed.settled
    faults_of(p, 0).frozen = False
    assert d.wait(PullSettled).pull_id == pull_id
    d.receiver.cancel(pull_id)
    assert not d.receiver._pulls and not d.receiver.poll()


@between((DP2, DP2))
def test_a_home_of_one_rank_says_what_it_has_verified(joined: Joined) -> None:
    p, d = joined.p, joined.d
    p.publish_part("a", [1, 2], 1)
    pull_id = joined.follow("a", [3, 4, 5], 1)
    until(lambda: [pull.verified for pull in joined.under_way(1)] == [2])
    assert not joined.under_way(0)
    d.receiver.cancel(pull_id)
    failed = d.wait(PullFailed)
    assert failed.settled and failed.num_verified == 2
    assert torch.equal(d.kv_caches[1][[3, 4]], content(16, 1)[[1, 2]])
    assert not d.kv_caches[0].any()


@between((DP2, DP2))
def test_a_prompt_that_is_computed_again_in_another_home_is_read_there(joined: Joined) -> None:
    """Its blocks have the same numbers and generations as in the first home, where they were reused
    before D could verify them."""
    p, d = joined.p, joined.d
    p.publish_part("a", [1, 2], 0)
    faults_of(p, 0).frozen = True
    pull_id = joined.follow("a", [3, 4, 5], 1)
    until(lambda: [len(pull.pieces) for pull in joined.under_way(1)] == [1])
    p.publish_part("a", [1, 2], 1)
    newest = p.sender.newest[key("a")]
    assert newest is not None and newest.home == 1, "another home's blocks are other rows"
    d.receiver.complete(pull_id, p.publish("a", [1, 2, 3], 1), 300.0)
    p.bump(1, 0)
    faults_of(p, 0).frozen = False
    done = d.wait(PullDone, PullFailed)
    assert isinstance(done, PullDone), done
    assert torch.equal(d.kv_caches[1][[3, 4, 5]], content(16, 1)[[1, 2, 3]])
    assert not d.kv_caches[0].any()


@between((DP2, DP2))
def test_homes_that_are_not_there_are_refused(joined: Joined) -> None:
    p, d = joined.p, joined.d
    ticket = p.publish("a", [1])
    for home in (-1, 2):
        with pytest.raises(ValueError, match=f"home must be one of the engine's, not {home}"):
            d.receiver.pull(next(_pull_ids), ticket, [1], 0, 300.0, home)
        with pytest.raises(ValueError, match=f"home must be one of the engine's, not {home}"):
            joined.follow("a", [1], home)
        with pytest.raises(ValueError, match=rf"home must lie in \[0, 2\), not {home}"):
            p.publish(f"b{home}", [1], home)
        failed = joined.pull(msgspec.structs.replace(ticket, home=home), [1], 1)
        assert isinstance(failed, PullFailed) and failed.settled
        assert f"of home {home}, the peer's last home is 1" in failed.detail
    with pytest.raises(ValueError, match="local_blocks must lie in"):
        d.receiver.pull(next(_pull_ids), ticket, [99], 0, 300.0, 1)
    assert not d.receiver._pulls and not d.receiver.poll()


def test_a_peer_is_described_with_its_homes() -> None:
    p = Ranks("p", CONFIG["local"], TP2_DP2, True)
    d = Ranks("d", CONFIG["local"], ONE, False)
    try:
        meta = p.meta()
        assert meta.num_homes == 2 and [rank.home for rank in meta.ranks] == [0, 0, 1, 1]
        assert meta.token_bytes == d.meta().token_bytes, "of one home's ranks"
        assert p.generations.flags.c_contiguous
        assert meta.generation_address == p.generations.ctypes.data
        lacking = msgspec.structs.replace(meta, ranks=meta.ranks[:3])
        d.receiver.connect(lacking)
        status = d.wait(PeerStatus)
        assert not status.connected
        assert "KV head 2 of layer 0 is stored on no rank of the peer's home 1" in status.detail
    finally:
        d.close()
        p.close()


def test_a_rate_is_that_of_one_home() -> None:
    d = Ranks("d", CONFIG["local"], TP2_DP2, False)
    try:
        told = PeerStatus(engine_id="p", incarnation=1, connected=True, transport="local")
        for rank, rate in enumerate((1.0, 2.0, 4.0, 8.0)):
            news = d.receiver._peer(rank, msgspec.structs.replace(told, bytes_per_s=rate))
            assert len(news) == (rank == 3)
        [status] = news
        assert isinstance(status, PeerStatus) and status.bytes_per_s == 3.0
    finally:
        d.close()
