"""Pulls that begin before their prompt is computed, over both transports: parts, late and early
followers, reuse."""

import itertools
import time
from collections.abc import Iterator

import pytest
import torch
import zmq
from kvtransfer.kv_peers import (
    LAYOUT,
    Engine,
    LocalSource,
    ProcessSource,
    key,
    pattern,
    until_posted,
    until_verified,
)
from support.local_transfer import LocalTransferConfig, is_local, transfer_config
from support.waiting import stays, until

from pdserve.configs.transfer import TransferConfig
from pdserve.kvtransfer.connector import PullDone, PullFailed, PullSettled
from pdserve.kvtransfer.p2p import mailbox
from pdserve.kvtransfer.p2p.letters import Done, Party, Rejected
from pdserve.kvtransfer.p2p.mailbox import Mailbox
from pdserve.kvtransfer.transport.local_agent import LocalAgent
from pdserve.protocol.handoff import Source, Ticket
from pdserve.protocol.request_key import RequestKey

_names = itertools.count()
_pull_ids = itertools.count(1)


@pytest.fixture(scope="module", params=["local", "nixl"])
def config(request: pytest.FixtureRequest) -> TransferConfig:
    return transfer_config(request.param, lease_s=600.0)


@pytest.fixture(scope="module")
def source(config: TransferConfig) -> Iterator[LocalSource | ProcessSource]:
    source = (LocalSource if is_local(config) else ProcessSource)(
        "p", config, seed=5, incarnation=3
    )
    yield source
    source.close()


@pytest.fixture(scope="module")
def connected(config: TransferConfig, source: LocalSource | ProcessSource) -> Iterator[Engine]:
    engine = Engine("d", config)
    assert engine.connect(source.meta).connected
    yield engine
    engine.close()


@pytest.fixture
def sink(connected: Engine) -> Engine:
    connected.kv_cache.zero_()
    connected.events.clear()
    return connected


@pytest.fixture
def local() -> Iterator[LocalSource]:
    """A source in this process, to be tampered with."""
    source = LocalSource("tampered", LocalTransferConfig(lease_s=600.0), seed=5)
    yield source
    source.close()


@pytest.fixture
def local_sink(local: LocalSource) -> Iterator[Engine]:
    engine = Engine(f"d{next(_names)}", LocalTransferConfig())
    assert engine.connect(local.meta).connected
    yield engine
    engine.close()


def request_key() -> RequestKey:
    return key(f"request-{next(_names)}")


def follow(
    sink: Engine,
    source: LocalSource | ProcessSource,
    request: RequestKey,
    local: list[int],
    skip: int = 0,
) -> int:
    pull_id = next(_pull_ids)
    peer = Source(source.meta.engine_id, source.meta.incarnation, request)
    sink.receiver.follow(pull_id, peer, b"content", local, skip, 300.0)
    return pull_id


def arrived(sink: Engine, local: list[int], remote: list[int]) -> None:
    """Those rows are there, soon."""
    until(lambda: torch.equal(sink.kv_cache[local], pattern(5)[remote]))


def complete(
    sink: Engine, pull_id: int, ticket: Ticket, deadline_s: float = 300.0
) -> PullDone | PullFailed:
    sink.receiver.complete(pull_id, ticket, deadline_s)
    return sink.wait_for(PullDone, PullFailed, pull_id=pull_id)


def test_parts_arrive_while_the_prompt_is_computed(
    sink: Engine, source: LocalSource | ProcessSource
) -> None:
    request = request_key()
    pull_id = follow(sink, source, request, [20, 21, 22, 23])
    for count in (1, 3):
        source.publish_part(request, [8, 9, 5, 6][:count])
        arrived(sink, [20, 21, 22][:count], [8, 9, 5][:count])
    assert not sink.kv_cache[23].any(), "not published yet"
    ticket = source.publish(request, [8, 9, 5, 6])
    arrived(sink, [23], [6])  # the last part comes by itself too
    done = complete(sink, pull_id, ticket)
    assert isinstance(done, PullDone), done
    assert done.num_bytes == 4 * LAYOUT.block_bytes
    assert done.num_early_bytes >= 3 * LAYOUT.block_bytes
    assert [(e.key, e.outcome) for e in source.unpinned()] == [(request, "done")]
    expected = torch.zeros_like(sink.kv_cache)
    expected[20:24] = pattern(5)[[8, 9, 5, 6]]
    assert torch.equal(sink.kv_cache, expected)


def test_the_same_part_is_told_once(local: LocalSource, local_sink: Engine) -> None:
    request = request_key()
    began = time.time()
    pull_id = follow(local_sink, local, request, [20, 21])
    for written_at in (1.0, 2.0):
        local.engine.sender.publish_part(request, [8], b"content", written_at)
    assert local.engine.sender._metrics.parts._value.get() == 1
    ticket = local.engine.sender.publish(request, [8, 9], 32, b"content", 3.0)
    assert ticket.written_at == 3.0
    done = complete(local_sink, pull_id, ticket)
    assert isinstance(done, PullDone) and began < done.ended_at < time.time()
    assert 0 < done.read_s < time.time() - began


def test_cached_blocks_are_skipped(sink: Engine, source: LocalSource | ProcessSource) -> None:
    request = request_key()
    pull_id = follow(sink, source, request, [40, 41], skip=2)
    source.publish_part(request, [1])  # nothing that is wanted
    source.publish_part(request, [1, 2, 3])
    arrived(sink, [40], [3])
    done = complete(sink, pull_id, source.publish(request, [1, 2, 3, 4]))
    assert isinstance(done, PullDone) and done.num_bytes == 2 * LAYOUT.block_bytes
    assert torch.equal(sink.kv_cache[[40, 41]], pattern(5)[[3, 4]]) and not sink.kv_cache[:40].any()
    source.unpinned()


def test_who_follows_late_gets_the_newest_part(
    sink: Engine, source: LocalSource | ProcessSource
) -> None:
    request = request_key()
    source.publish_part(request, [1])
    source.publish_part(request, [1, 2, 3])
    pull_id = follow(sink, source, request, [10, 11, 12, 13])
    arrived(sink, [10, 11, 12], [1, 2, 3])
    assert isinstance(complete(sink, pull_id, source.publish(request, [1, 2, 3, 4])), PullDone)
    source.unpinned()


def test_who_follows_behind_the_end_gets_everything(
    sink: Engine, source: LocalSource | ProcessSource
) -> None:
    request = request_key()
    ticket = source.publish(request, [1, 2])
    pull_id = follow(sink, source, request, [10, 11])
    arrived(sink, [10, 11], [1, 2])
    assert isinstance(complete(sink, pull_id, ticket), PullDone)
    source.unpinned()


def test_without_any_part_the_ticket_says_all(
    sink: Engine, source: LocalSource | ProcessSource
) -> None:
    """Every letter of the sender was lost."""
    request = request_key()
    other = request_key()
    pull_id = follow(sink, source, other, [10, 11])
    assert isinstance(complete(sink, pull_id, source.publish(request, [1, 2])), PullDone)
    assert torch.equal(sink.kv_cache[[10, 11]], pattern(5)[[1, 2]])
    source.unpinned()


def test_parts_of_other_content_are_not_read(
    sink: Engine, source: LocalSource | ProcessSource
) -> None:
    request = request_key()
    pull_id = next(_pull_ids)
    sink.receiver.follow(pull_id, Source("p", 3, request), b"another prompt", [10, 11], 0, 300.0)
    source.publish_part(request, [1, 2])
    stays(lambda: not sink.kv_cache.any(), 0.1)
    sink.receiver.cancel(pull_id)
    assert sink.wait_for(PullFailed, pull_id=pull_id).settled


def test_a_cancelled_follower_reads_no_more_and_unpins_nothing(
    sink: Engine, source: LocalSource | ProcessSource
) -> None:
    request = request_key()
    pull_id = follow(sink, source, request, [10, 11])
    source.publish_part(request, [1])
    arrived(sink, [10], [1])
    sink.receiver.cancel(pull_id)
    failed = sink.wait_for(PullFailed, pull_id=pull_id)
    assert failed.settled and failed.num_verified == 1
    ticket = source.publish(request, [1, 2])
    stays(lambda: not sink.kv_cache[11].any(), 0.1)
    assert source.unpinned(0.2) == [], "whoever gets the ticket may be another engine"
    source.revoke(ticket.key)


def test_follow_of_a_peer_that_is_not_connected(sink: Engine) -> None:
    pull_id = next(_pull_ids)
    sink.receiver.follow(pull_id, Source("nobody", 1, request_key()), b"content", [1], 0, 300.0)
    assert sink.wait_for(PullFailed, pull_id=pull_id).reason == "not-connected"


def test_renewed_leases_go_on(sink: Engine, source: LocalSource | ProcessSource) -> None:
    request = request_key()
    source.lease(3.0)
    ticket = source.publish(request, [1])
    source.lease(600.0)
    sink.receiver.renew([ticket])
    assert source.unpinned(3.3) == [], "its first lease is over"
    source.lease(0.1)
    sink.receiver.renew([ticket])
    assert [e.outcome for e in source.unpinned()] == ["expired"]
    source.lease(600.0)


def test_a_part_reused_before_it_was_read_is_read_again_from_a_newer_one(
    local: LocalSource, local_sink: Engine
) -> None:
    """P was preempted behind its first part and computed the prompt again, into other blocks."""
    request = request_key()
    pull_id = follow(local_sink, local, request, [0, 1, 2])
    local.freeze()
    local.publish_part(request, [30, 31])
    until_posted(local_sink, pull_id, 2)
    local.bump(31)
    local.engine.kv_cache[31] = 7.0
    local.publish_part(request, [40, 41])
    local.thaw()
    arrived(local_sink, [0, 1], [40, 41])
    done = complete(local_sink, pull_id, local.publish(request, [40, 41, 42]))
    assert isinstance(done, PullDone), done
    arrived(local_sink, [0, 1, 2], [40, 41, 42])


def test_a_part_reused_before_it_was_read_waits_for_a_newer_one(
    local: LocalSource, local_sink: Engine
) -> None:
    request = request_key()
    pull_id = follow(local_sink, local, request, [0, 1, 2])
    local.freeze()
    local.publish_part(request, [30, 31])
    until_posted(local_sink, pull_id, 2)
    local.bump(30)
    local.thaw()
    stays(lambda: not local_sink.receiver.poll(), 0.1)
    done = complete(local_sink, pull_id, local.publish(request, [40, 41, 42]))
    assert isinstance(done, PullDone), done
    arrived(local_sink, [0, 1, 2], [40, 41, 42])


def test_a_complete_ticket_that_is_stale_fails_behind_good_parts(
    local: LocalSource, local_sink: Engine
) -> None:
    request = request_key()
    pull_id = follow(local_sink, local, request, [0, 1, 2])
    local.publish_part(request, [30, 31])
    until_verified(local_sink, pull_id, 2)
    local.freeze()
    ticket = local.publish(request, [30, 31, 32])
    until_posted(local_sink, pull_id, 3)
    local.bump(32)
    local.thaw()
    failed = complete(local_sink, pull_id, ticket)
    assert isinstance(failed, PullFailed), failed
    assert (failed.reason, failed.settled, failed.num_verified) == ("stale-generation", True, 2)
    assert [e.outcome for e in local.unpinned()] == ["rejected"]


def test_reads_of_one_pull_never_overlap_in_memory(local: LocalSource, local_sink: Engine) -> None:
    """The first piece is stale and could be read again at once, with all behind it; but the second
    piece's read, of old blocks, is slower than that.
    """
    request = request_key()
    pull_id = follow(local_sink, local, request, [0, 1, 2])
    local.freeze()
    local.publish_part(request, [30, 31])
    until_posted(local_sink, pull_id, 2)
    local.publish_part(request, [30, 31, 32])
    until_posted(local_sink, pull_id, 3)
    local.bump(30)
    local.bump(32)
    local.engine.kv_cache[30:33] = 9.0
    local.publish_part(request, [40, 41, 42])
    agent = local_sink.receiver.local_ranks[0].agent
    assert isinstance(agent, LocalAgent)
    agent._in_flight[-1].ready_at = time.monotonic() + 0.3
    local.thaw()
    arrived(local_sink, [0, 1, 2], [40, 41, 42])
    wanted = pattern(5)[[40, 41, 42]]
    stays(lambda: torch.equal(local_sink.kv_cache[[0, 1, 2]], wanted), 0.5)


def test_a_frozen_peers_part_keeps_its_blocks_and_leaves_the_verified(
    local: LocalSource, local_sink: Engine
) -> None:
    request = request_key()
    pull_id = follow(local_sink, local, request, [0, 1, 2])
    local.publish_part(request, [30])
    until_verified(local_sink, pull_id, 1)
    local.freeze()
    local.publish_part(request, [30, 31])
    until_posted(local_sink, pull_id, 2)
    local_sink.receiver.cancel(pull_id)
    failed = local_sink.wait_for(PullFailed, pull_id=pull_id)
    assert (failed.settled, failed.num_verified) == (False, 1)
    local.thaw()
    local_sink.wait_for(PullSettled, pull_id=pull_id)


def test_a_killed_peer_fails_who_follows_it(local: LocalSource, local_sink: Engine) -> None:
    request = request_key()
    pull_id = follow(local_sink, local, request, [0, 1])
    local.publish_part(request, [30])
    until_verified(local_sink, pull_id, 1)
    local.kill()
    local.publish_part(request, [30, 31])
    failed = local_sink.wait_for(PullFailed, pull_id=pull_id)
    assert (failed.reason, failed.num_verified) == ("peer-lost", 1)


def test_a_part_in_the_same_blocks_again_is_told(local: LocalSource, local_sink: Engine) -> None:
    """P was preempted and got its old blocks back, under new generations."""
    request = request_key()
    local.publish_part(request, [30, 31])
    local.bump(30)
    local.bump(31)
    pull_id = follow(local_sink, local, request, [0, 1, 2])
    local.publish_part(request, [30, 31])
    until_verified(local_sink, pull_id, 2)
    local_sink.receiver.cancel(pull_id)
    assert local_sink.wait_for(PullFailed, pull_id=pull_id).num_verified == 2


def test_a_ticket_of_another_length_is_an_error(local: LocalSource, local_sink: Engine) -> None:
    pull_id = follow(local_sink, local, request_key(), [0, 1, 2])
    with pytest.raises(ValueError, match="3 blocks"):
        local_sink.receiver.complete(pull_id, local.publish(request_key(), [30, 31]), 1.0)


@pytest.mark.parametrize("notice", [Done, Rejected])
def test_a_word_about_a_prompt_that_is_still_computed_ends_nothing(
    local: LocalSource, notice: type[Done | Rejected]
) -> None:
    """As of a ticket before a preemption: its blocks are still written."""
    computed = request_key()
    over = request_key()
    sender = local.engine.sender
    there = Party(local.meta.engine_id, local.meta.incarnation, local.meta.mailbox)
    sender.publish_part(computed, [3], b"content")
    local.publish(over, [4])
    peer = Mailbox("peer", 1, None)
    peer.attach()
    for request in (computed, over):
        peer.send(there, notice(request))
    assert [event.key for event in local.unpinned()] == [over], "letters keep their order"
    local.publish(computed, [3])
    peer.send(there, notice(computed))
    assert [event.key for event in local.unpinned()] == [computed]
    peer.detach()


BAD_TEXT = b"\x93\x92\xa2\xff\xfe\x01\x93\xa1d\x01\xa1x\x92\xa6follow\x94\xa1r\x01\xa1q\x01"


@pytest.mark.parametrize(
    "frame", [b"", b"nonsense", BAD_TEXT], ids=["empty", "nonsense", "not UTF-8"]
)
def test_stray_frames_do_not_end_the_mailbox(frame: bytes) -> None:
    here = Mailbox("here", 1, "127.0.0.1")
    there = Mailbox("there", 1, "127.0.0.1")
    got: list[Done] = []
    here.on(Done, lambda sender, notice: got.append(notice))
    for box in (here, there):
        box.attach()
    stray: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    stray.connect(here.party.mailbox)
    stray.send(frame)
    stays(here._thread.is_alive, 0.1)
    there.send(here.party, Done(key("a")))
    there.send(Party("here", 2, here.party.mailbox), Done(key("for another incarnation")))
    there.send(here.party, Done(key("b")))
    until(lambda: len(got) == 2)
    assert [notice.key for notice in got] == [key("a"), key("b")]
    stray.close(linger=0)
    for box in (here, there):
        box.detach()
        assert not box._thread.is_alive()


def test_ways_to_peers_that_are_gone_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Mailbox("here", 1, None)
    here.attach()
    monkeypatch.setattr(mailbox, "UNUSED_S", 0.05)
    for index in range(5):
        here.send(Party("gone", index, f"inproc://gone-{index}"), Done(key("a")))
        time.sleep(0.06)  # longer than UNUSED_S
    assert len(here._outboxes) == 1
    here.detach()
