"""A link's states at their edges, in process, where faults come on command."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvtransfer.kv_peers import Engine, LocalSource, expire, key, until_posted
from support.local_transfer import LocalTransferConfig
from support.waiting import stays, until

from pdserve.kvtransfer.connector import PullDone, PullFailed, PullSettled
from pdserve.kvtransfer.p2p.link import peer_link, self_test
from pdserve.kvtransfer.transport.local_agent import LocalAgent
from pdserve.protocol.events import PeerStatus

CONFIG = LocalTransferConfig()


@pytest.fixture
def sink() -> Iterator[Engine]:
    engine = Engine("d", CONFIG)
    yield engine
    engine.close()


@pytest.fixture
def source() -> Iterator[LocalSource]:
    source = LocalSource("p", CONFIG)
    yield source
    source.close()


@pytest.fixture
def frozen_generations(source: LocalSource, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it when nothing is read: the next read ends as ever, and the source freezes when another
    one follows, which is the read of the generations."""
    post = LocalAgent.post
    posted = list[Any]()

    def freezing(agent: LocalAgent, handle: Any) -> bool:
        posted.append(handle)
        if len(posted) == 2:
            source.freeze()
        return post(agent, handle)

    return lambda: monkeypatch.setattr(LocalAgent, "post", freezing)


def test_generations_are_read_after_the_data(sink: Engine, source: LocalSource) -> None:
    assert sink.connect(source.meta).connected
    source.freeze()
    sink.receiver.pull(1, source.publish(key("a"), [3]), [3], 0, 300.0)
    until_posted(sink, 1, 1)
    source.bump(3)  # while the data is under way
    source.thaw()
    failed = sink.wait_for(PullFailed, PullDone)
    assert failed.reason == "stale-generation" and failed.settled


def test_reuse_while_generations_are_on_their_way_is_caught_or_too_late_to_matter(
    sink: Engine, source: LocalSource, frozen_generations: Callable[[], None]
) -> None:
    """The table is copied at the end of its read: a block reused before that is caught, though its
    bytes were good."""
    assert sink.connect(source.meta).connected
    frozen_generations()
    sink.receiver.pull(1, source.publish(key("a"), [3]), [3], 0, 300.0)
    until(lambda: sink.kv_cache[3].any() and source.faults.frozen)
    source.bump(3)
    source.thaw()
    assert sink.wait_for(PullFailed, PullDone).reason == "stale-generation"


def test_deadline_while_verifying_is_settled(
    sink: Engine, source: LocalSource, frozen_generations: Callable[[], None]
) -> None:
    assert sink.connect(source.meta).connected
    frozen_generations()
    sink.receiver.pull(1, source.publish(key("a"), [3]), [3], 0, 300.0)
    until(lambda: sink.kv_cache[3].any() and source.faults.frozen)
    expire(sink.receiver, 1)
    failed = sink.wait_for(PullFailed, PullDone)
    assert failed.reason == "deadline" and failed.settled
    source.thaw()
    sink.receiver.pull(2, source.publish(key("b"), [4]), [4], 0, 300.0)
    assert isinstance(sink.wait_for(PullDone, PullFailed, pull_id=2), PullDone)
    assert sink.receiver.poll() == []


def test_pull_cancelled_before_the_self_test_ended_is_settled(
    sink: Engine, source: LocalSource
) -> None:
    ticket = source.publish(key("a"), [3])
    source.freeze()
    sink.receiver.connect(source.meta)
    sink.receiver.pull(1, ticket, [3], 0, 300.0)
    sink.receiver.cancel(1)
    failed = sink.wait_for(PullFailed)
    assert failed.reason == "cancelled" and failed.settled
    source.thaw()
    assert sink.wait_for(PeerStatus).connected


def test_self_test_that_never_ends(
    sink: Engine, source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "PROBE_DEADLINE_S", 0.2)
    ticket = source.publish(key("a"), [3])
    source.freeze()
    sink.receiver.connect(source.meta)
    sink.receiver.pull(1, ticket, [3], 0, 300.0)
    assert sink.wait_for(PullFailed).settled
    status = sink.wait_for(PeerStatus)
    assert not status.connected and "self-test" in status.detail
    monkeypatch.setattr(self_test, "PROBE_DEADLINE_S", 300.0)
    sink.receiver.connect(source.meta)  # waits for the read that is still out
    sink.receiver.pull(2, ticket, [3], 0, 300.0)
    source.thaw()
    assert sink.wait_for(PeerStatus).connected
    assert isinstance(sink.wait_for(PullDone, PullFailed), PullDone)


def events_of(sink: Engine) -> list[Any]:
    """All that came and nobody waited for."""
    sink.events += sink.receiver.poll()
    return sink.events


def test_new_incarnation_supersedes_the_connected_one(sink: Engine, source: LocalSource) -> None:
    assert sink.connect(source.meta).connected
    old = source.publish(key("a"), [3])
    source.freeze()
    sink.receiver.pull(1, old, [3], 0, 300.0)
    successor = LocalSource("p", CONFIG, incarnation=2)
    try:
        sink.receiver.connect(successor.meta)
        until(lambda: {PeerStatus, PullFailed} <= set(map(type, events_of(sink))))
        [status] = [event for event in sink.events if isinstance(event, PeerStatus)]
        assert status.connected and status.incarnation == 2
        # Not before the old link knows that it is superseded: its read might end well.
        source.thaw()
        sink.wait_for(PullSettled, pull_id=1)
        sink.receiver.pull(2, successor.publish(key("b"), [3]), [4], 0, 300.0)
        assert isinstance(sink.wait_for(PullDone, PullFailed, pull_id=2), PullDone)
        sink.receiver.connect(source.meta)
        # neither the old one's end nor its return is news
        stays(lambda: sink.receiver.poll() == [], 0.1)
    finally:
        successor.close()


def test_waiting_costs_no_thread_per_past_incarnation(sink: Engine) -> None:
    for incarnation in range(1, 4):
        source = LocalSource("q", CONFIG, incarnation=incarnation)
        assert sink.connect(source.meta).connected
        source.close()
    until(lambda: len(sink.receiver.local_ranks[0].links) == 1)
    [link] = sink.receiver.local_ranks[0].links
    assert (link.meta.engine_id, link.meta.incarnation) == ("q", 3)


def test_a_bug_in_a_transport_fails_the_pull_instead_of_hanging(
    sink: Engine, source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sink.connect(source.meta).connected

    def broken(*arguments: object) -> bool:
        raise KeyError("bug")

    ticket = source.publish(key("a"), [3])
    with monkeypatch.context() as patch:
        patch.setattr(LocalAgent, "post", broken)
        sink.receiver.pull(1, ticket, [3], 0, 300.0)
        failed = sink.wait_for(PullFailed)
    assert failed.reason == "error" and not failed.settled
    sink.wait_for(PullSettled, pull_id=1)
    assert sink.connect(source.meta).connected
    sink.receiver.pull(2, ticket, [3], 0, 300.0)
    assert isinstance(sink.wait_for(PullDone, PullFailed), PullDone)


def test_a_peer_that_stays_frozen_is_cut_off(
    sink: Engine, source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is settled without a thaw, and nothing lands after a thaw."""
    monkeypatch.setattr(peer_link, "SEVER_AFTER_S", 0.2)
    assert sink.connect(source.meta).connected
    source.freeze()
    sink.receiver.pull(901, source.publish(key("cut-off"), [1, 2]), [5, 6], 0, 300.0)
    expire(sink.receiver, 901)
    failed = sink.wait_for(PullFailed, pull_id=901)
    assert (failed.reason, failed.settled) == ("deadline", False)
    sink.wait_for(PullSettled, pull_id=901)
    source.thaw()
    stays(lambda: not sink.kv_cache[[5, 6]].any(), 0.1)
    assert sink.connect(source.meta).connected
    sink.receiver.pull(902, source.publish(key("again"), [1, 2]), [5, 6], 0, 300.0)
    assert isinstance(sink.wait_for(PullDone, PullFailed, pull_id=902), PullDone)
