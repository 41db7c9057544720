"""Prefixes that a peer has cached, without a pin, between engines of unlike ranks and homes. A peer
that is asked answers with what `find` returns. What all ranks have verified is kept.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from kvtransfer.kv_ranks import CONFIG, Ranks, content
from kvtransfer.test_homes import faults_of
from support.shares import Degrees
from support.waiting import stays, until

from pdserve.kvtransfer.connector import Lent, PullDone, PullFailed, PullSettled
from pdserve.kvtransfer.p2p.letters import Lend, Party
from pdserve.kvtransfer.p2p.link import link_pulls
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import Ticket

ONE, TP2, PP2, DP2, TP2_DP2 = Degrees(), Degrees(2), Degrees(1, 2), Degrees(dp=2), Degrees(2, dp=2)
THEIRS, OURS = [5, 6, 7, 20, 2], [9, 1, 2, 3, 11]
DIGESTS = [bytes([number]) * 16 for number in range(5)]
_pull_ids = itertools.count(1)


class Lending:
    """A holder whose last home has THEIRS written, and who asks it."""

    def __init__(self, holder: Degrees, asker: Degrees) -> None:
        self.holder = Ranks("h", CONFIG["local"], holder, True)
        self.asker = Ranks("x", CONFIG["local"], asker, False)
        self.home = holder.dp - 1
        self.num_held = len(THEIRS)
        table = self.holder.generations[self.home]
        self.generations = [int(table[block]) for block in THEIRS]
        self.holder.sender.lend(self.find)
        self.asker.receiver.connect(self.holder.meta())
        assert self.asker.wait(PeerStatus).connected

    def find(self, digests: Sequence[bytes]) -> tuple[int, list[tuple[int, int]]]:
        held = list(zip(THEIRS, self.generations, strict=True))[: self.num_held]
        wanted = [pair for pair, a, b in zip(held, digests, DIGESTS, strict=False) if a == b]
        return self.home, wanted

    def ask(self) -> tuple[int, Ticket]:
        pull_id = next(_pull_ids)
        meta = self.holder.meta()
        self.asker.receiver.ask(pull_id, meta.engine_id, meta.incarnation, DIGESTS)
        lent: Lent = self.asker.wait(Lent)
        assert lent.pull_id == pull_id
        return pull_id, lent.ticket

    def pull(self, pull_id: int, ticket: Ticket, home: int = 0, deadline_s: float = 300.0) -> None:
        self.asker.receiver.pull(pull_id, ticket, OURS, 0, deadline_s, home)

    def close(self) -> None:
        self.asker.close()
        self.holder.close()


@pytest.fixture
def lending(request: pytest.FixtureRequest) -> Iterator[Lending]:
    made = Lending(*request.param)
    yield made
    made.close()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_pulls, "PIECE_BLOCKS", 1)
    monkeypatch.setattr(link_pulls, "PIECES_AT_ONCE", 1)


def between(*pairs: Any) -> Any:
    return pytest.mark.parametrize("lending", pairs, indirect=True, ids=str)


@between((ONE, ONE), (TP2, ONE), (ONE, TP2), (PP2, TP2), (DP2, ONE), (ONE, DP2), (TP2_DP2, DP2))
def test_what_is_lent_arrives(lending: Lending, small_pieces: None) -> None:
    pull_id, ticket = lending.ask()
    assert (ticket.home, ticket.lease_s, ticket.num_tokens) == (lending.home, 0.0, 5 * 16)
    assert ticket.content == DIGESTS[4] and ticket.block_ids == tuple(THEIRS)
    home = lending.asker.degrees.dp - 1
    lending.pull(pull_id, ticket, home)
    assert lending.asker.wait(PullDone).pull_id == pull_id
    if lending.asker.degrees in (ONE, DP2):
        assert torch.equal(lending.asker.kv_caches[home][OURS], content(16, lending.home)[THEIRS])
    assert not lending.holder.unpinned() and not lending.holder.sender.newest


@between((ONE, ONE))
def test_a_holder_of_less_and_of_nothing(lending: Lending) -> None:
    for held in (2, 0):
        lending.num_held = held
        _, ticket = lending.ask()
        assert ticket.block_ids == tuple(THEIRS[:held])
        assert ticket.content == (DIGESTS[held - 1] if held else b"")


@between((ONE, ONE))
def test_the_ticket_has_the_generations_of_the_writing(lending: Lending) -> None:
    """The block has a new owner by the time of the question: it is stale, whatever is there now."""
    lending.holder.bump(THEIRS[0])
    pull_id, ticket = lending.ask()
    lending.pull(pull_id, ticket)
    failed = lending.asker.wait(PullFailed)
    assert (failed.reason, failed.settled, failed.num_verified) == ("stale-generation", True, 0)


@between((ONE, ONE), (ONE, TP2), (TP2, PP2))
def test_what_was_verified_before_a_stale_block_counts(
    lending: Lending, small_pieces: None
) -> None:
    pull_id, ticket = lending.ask()
    lending.holder.bump(THEIRS[3], lending.home)
    lending.pull(pull_id, ticket)
    failed = lending.asker.wait(PullFailed)
    assert (failed.reason, failed.settled, failed.num_verified) == ("stale-generation", True, 3)
    stays(lambda: not lending.asker.receiver.poll(), 0.05)
    assert not lending.asker.receiver._pulls


@between((TP2, TP2))
def test_of_several_ranks_the_least_counts(lending: Lending, small_pieces: None) -> None:
    """The second rank's holder is frozen behind its second piece; the first one has everything."""
    pull_id, ticket = lending.ask()
    second = lending.asker.rank_receivers[1]
    faults_of(lending.holder, 1).frozen = True
    lending.pull(pull_id, ticket)
    until(
        lambda: any(
            isinstance(event, PullDone) for event in lending.asker.rank_receivers[0]._events
        )
    )
    assert not second._events
    lending.asker.receiver.cancel(pull_id)
    failed = lending.asker.wait(PullFailed)
    assert failed.num_verified == 0 and not failed.settled
    faults_of(lending.holder, 1).frozen = False
    assert lending.asker.wait(PullSettled).pull_id == pull_id
    assert not lending.asker.receiver._pulls and not lending.asker.receiver.poll()


@between((ONE, ONE))
def test_answers_of_others_and_to_other_questions_are_dropped(lending: Lending) -> None:
    receiver = lending.asker.receiver
    _, ticket = lending.ask()
    pull_id = next(_pull_ids)
    meta = lending.holder.meta()
    peer = Party(meta.engine_id, meta.incarnation, meta.mailbox)
    lending.holder.sender.mailbox.send = lambda *_: None  # type: ignore[method-assign]
    receiver.ask(pull_id, meta.engine_id, meta.incarnation, DIGESTS)
    pinned = msgspec.structs.replace(ticket, lease_s=1.0)
    foreign = msgspec.structs.replace(ticket, engine_id="other")
    receiver._take_lent(Party("other", 1, ""), Lend(pull_id, ticket))
    receiver._take_lent(peer, Lend(pull_id, foreign))
    receiver._take_lent(peer, Lend(pull_id, pinned))
    receiver._take_lent(peer, Lend(pull_id + 1, ticket))
    assert not receiver.poll()
    receiver._take_lent(peer, Lend(pull_id, ticket))
    receiver._take_lent(peer, Lend(pull_id, ticket))
    assert receiver.poll() == [Lent(pull_id, ticket)]
    receiver.ask(pull_id + 2, meta.engine_id, meta.incarnation, DIGESTS)
    receiver.cancel(pull_id + 2)
    receiver._take_lent(peer, Lend(pull_id + 2, ticket))
    assert not receiver.poll()
