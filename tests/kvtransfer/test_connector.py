"""Tests the connector's semantics over both transports: the in-process one, and NIXL between two
processes."""

import itertools
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch
from kvtransfer.kv_peers import LAYOUT, Engine, LocalSource, ProcessSource, Source, key, pattern
from prometheus_client import CollectorRegistry
from support.local_transfer import is_local, transfer_config

from pdserve.configs.transfer import TransferConfig
from pdserve.kvtransfer.connector import PullDone, PullFailed
from pdserve.protocol.events import PeerStatus
from pdserve.protocol.handoff import Ticket
from pdserve.protocol.request_key import RequestKey

LEASE_S = 1.0
_names = itertools.count()


@pytest.fixture(scope="module", params=["local", "nixl"])
def config(request: pytest.FixtureRequest) -> TransferConfig:
    return transfer_config(request.param, lease_s=600.0)


@pytest.fixture(scope="module")
def source(config: TransferConfig) -> Iterator[Source]:
    make = LocalSource if is_local(config) else ProcessSource
    source = make("p", config, seed=7, incarnation=20)
    yield source
    source.close()


@pytest.fixture(scope="module")
def registry(config: TransferConfig) -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture(scope="module")
def connected(
    config: TransferConfig, source: Source, registry: CollectorRegistry
) -> Iterator[Engine]:
    engine = Engine("d", config, registry=registry)
    status = engine.connect(source.meta)
    assert status.connected, status
    yield engine
    engine.close()


@pytest.fixture
def sink(connected: Engine) -> Engine:
    connected.kv_cache.zero_()
    connected.events.clear()
    return connected


def request_key() -> RequestKey:
    return key(f"request-{next(_names)}")


_pull_ids = itertools.count(1)


def pull(
    sink: Engine, ticket: Ticket, local: list[int], skip: int = 0, deadline_s: float = 300.0
) -> PullDone | PullFailed:
    pull_id = next(_pull_ids)
    sink.receiver.pull(pull_id, ticket, local, skip, deadline_s)
    ended: PullDone | PullFailed = sink.wait_for(PullDone, PullFailed, pull_id=pull_id)
    return ended


def test_self_test_names_a_transport_and_a_bandwidth(
    sink: Engine, source: Source, config: TransferConfig
) -> None:
    status = sink.connect(source.meta)
    assert status.connected and status.engine_id == "p" and status.incarnation == 20
    assert status.transport == ("local" if is_local(config) else "cma")
    assert status.bytes_per_s > 1e6


@pytest.mark.parametrize(
    ("remote", "local", "descriptors"),
    [
        ([5], [9], 1),
        ([10, 11, 12, 13], [20, 21, 22, 23], 1),
        ([3, 9, 4, 60], [1, 8, 2, 63], 3),  # 3->1 and 4->2 meet once sorted
        ([40, 30, 20], [0, 1, 2], 3),
    ],
)
def test_pull_is_bit_equal(
    sink: Engine, source: Source, remote: list[int], local: list[int], descriptors: int
) -> None:
    request = request_key()
    done = pull(sink, source.publish(request, remote), local)
    assert isinstance(done, PullDone), done
    assert done.num_bytes == len(remote) * LAYOUT.block_bytes
    assert done.num_descriptors == descriptors
    expected = torch.zeros_like(sink.kv_cache)
    expected[local] = pattern(7)[remote]
    assert torch.equal(sink.kv_cache, expected)
    events = source.unpinned()
    assert [(e.key, e.outcome) for e in events] == [(request, "done")]


def test_skip_moves_only_the_rest(sink: Engine, source: Source) -> None:
    done = pull(sink, source.publish(request_key(), [1, 2, 3, 4]), [50, 51], skip=2)
    assert isinstance(done, PullDone) and done.num_bytes == 2 * LAYOUT.block_bytes
    assert torch.equal(sink.kv_cache[[50, 51]], pattern(7)[[3, 4]])
    assert not sink.kv_cache[:50].any()
    assert source.unpinned()[0].outcome == "done"


def test_pull_of_nothing_only_tells_the_sender(sink: Engine, source: Source) -> None:
    done = pull(sink, source.publish(request_key(), [1, 2]), [], skip=2)
    assert isinstance(done, PullDone) and done.num_bytes == done.num_descriptors == 0
    assert not sink.kv_cache.any()
    assert source.unpinned()[0].outcome == "done"


def test_reused_block_is_stale(sink: Engine, source: Source) -> None:
    ticket = source.publish(request_key(), [30, 31, 32])
    source.bump(31)
    failed = pull(sink, ticket, [0, 1, 2])
    assert isinstance(failed, PullFailed) and failed.reason == "stale-generation" and failed.settled
    assert source.unpinned()[0].outcome == "rejected"


def test_reuse_of_a_skipped_block_does_not_matter(sink: Engine, source: Source) -> None:
    ticket = source.publish(request_key(), [33, 34])
    source.bump(33)
    assert isinstance(pull(sink, ticket, [0], skip=1), PullDone)
    source.unpinned()


def test_ticket_of_another_incarnation_is_refused(sink: Engine, source: Source) -> None:
    request = request_key()
    ticket = source.publish(request, [1])
    failed = pull(sink, msgspec.structs.replace(ticket, incarnation=19), [0])
    assert (
        isinstance(failed, PullFailed) and failed.reason == "stale-incarnation" and failed.settled
    )
    source.revoke(request)


def test_unknown_engine_is_not_connected(sink: Engine, source: Source) -> None:
    request = request_key()
    ticket = source.publish(request, [1])
    failed = pull(sink, msgspec.structs.replace(ticket, engine_id="nobody"), [0])
    assert isinstance(failed, PullFailed) and failed.reason == "not-connected" and failed.settled
    source.revoke(request)


def test_ticket_with_blocks_outside_the_pool_is_an_error(sink: Engine, source: Source) -> None:
    request = request_key()
    ticket = source.publish(request, [1])
    failed = pull(sink, msgspec.structs.replace(ticket, block_ids=(64,)), [0])
    assert isinstance(failed, PullFailed) and failed.reason == "error" and failed.settled
    source.revoke(request)


def test_ticket_of_a_home_that_the_peer_does_not_have_is_an_error(
    sink: Engine, source: Source
) -> None:
    request = request_key()
    ticket = source.publish(request, [1])
    failed = pull(sink, msgspec.structs.replace(ticket, home=1), [0])
    assert isinstance(failed, PullFailed) and failed.reason == "error" and failed.settled
    assert failed.detail == "the ticket's blocks are of home 1, the peer's last home is 0"
    source.revoke(request)


def test_arguments_that_do_not_fit_are_value_errors(sink: Engine, source: Source) -> None:
    request = request_key()
    ticket = source.publish(request, [1, 2])
    with pytest.raises(ValueError, match="local_blocks must hold"):
        sink.receiver.pull(next(_pull_ids), ticket, [0], 0, 1.0)
    with pytest.raises(ValueError, match="local_blocks must lie"):
        sink.receiver.pull(next(_pull_ids), ticket, [0, 64], 0, 1.0)
    source.revoke(request)


def test_reject_unpins(sink: Engine, source: Source) -> None:
    request = request_key()
    sink.receiver.reject(source.publish(request, [1]))
    events = source.unpinned()
    assert [(e.key, e.outcome) for e in events] == [(request, "rejected")]


@pytest.fixture
def short(source: Source) -> Iterator[Source]:
    """A source whose tickets have the lease LEASE_S."""
    source.lease(LEASE_S)
    yield source
    source.lease(600.0)


def test_lease_expires_once_and_late_notice_is_dropped(sink: Engine, short: Source) -> None:
    source = short
    request = request_key()
    before = time.monotonic()
    wakes = source.wakes()
    ticket = source.publish(request, [1, 2])
    events = source.unpinned()
    assert [(e.key, e.outcome) for e in events] == [(request, "expired")]
    assert time.monotonic() - before > 0.9 * LEASE_S
    assert source.wakes() == wakes + 1
    assert isinstance(pull(sink, ticket, [0, 1]), PullDone)  # expired, not reused: still true
    assert source.unpinned(0.05) == []


def test_revoke_is_silent(sink: Engine, short: Source) -> None:
    source = short
    request = request_key()
    ticket = source.publish(request, [1])
    source.revoke(request)
    sink.receiver.reject(ticket)
    assert source.unpinned(LEASE_S + 0.3) == []


def test_concurrent_pulls_all_arrive(sink: Engine, source: Source) -> None:
    tickets = [source.publish(request_key(), [b, b + 20, b + 40]) for b in range(20)]
    ids = []
    for index, ticket in enumerate(tickets):
        ids.append(next(_pull_ids))
        sink.receiver.pull(ids[-1], ticket, [3 * index, 3 * index + 1, 3 * index + 2], 0, 300.0)
    ends = [sink.wait_for(PullDone, PullFailed) for _ in ids]  # in any order
    assert sorted(end.pull_id for end in ends) == ids and all(
        isinstance(end, PullDone) for end in ends
    ), ends
    expected = torch.stack([pattern(7)[b + 20 * j] for b in range(20) for j in range(3)])
    assert torch.equal(sink.kv_cache[:60], expected)
    seen = 0
    while seen < 20:
        events = source.unpinned()
        assert events and all(e.outcome == "done" for e in events)
        seen += len(events)


def test_incompatible_pool_is_named(config: TransferConfig, source: Source) -> None:
    other = Engine("d-other", config, fingerprint="another model")
    try:
        status = other.connect(source.meta)
        assert not status.connected
        assert source.meta.model in status.detail and other.sender.meta().model in status.detail
    finally:
        other.close()


def test_older_incarnation_is_ignored(sink: Engine, source: Source) -> None:
    sink.receiver.connect(msgspec.structs.replace(source.meta, incarnation=3))
    request = request_key()
    assert isinstance(pull(sink, source.publish(request, [2]), [2]), PullDone)
    source.unpinned()
    assert not [e for e in sink.events if isinstance(e, PeerStatus)]


def test_disconnect_then_connect_again(sink: Engine, source: Source) -> None:
    sink.receiver.disconnect("p", 20)
    assert not sink.wait_for(PeerStatus).connected
    request = request_key()
    ticket = source.publish(request, [2])
    failed = pull(sink, ticket, [2])
    assert isinstance(failed, PullFailed) and failed.reason == "not-connected"
    assert sink.connect(source.meta).connected
    assert isinstance(pull(sink, ticket, [2]), PullDone)
    assert source.unpinned()[0].outcome == "done"


def test_connect_then_pull_at_once_waits_for_the_self_test(sink: Engine, source: Source) -> None:
    sink.receiver.disconnect("p", 20)
    ticket = source.publish(request_key(), [6])
    sink.receiver.connect(source.meta)
    assert isinstance(pull(sink, ticket, [6]), PullDone)
    source.unpinned()


def test_metrics_count_what_moved(
    sink: Engine, source: Source, registry: CollectorRegistry, config: TransferConfig
) -> None:
    label = {"transport": "local" if is_local(config) else "cma"}

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(name, {**label, **labels}) or 0.0

    before = [
        value("pdserve_kv_transfer_bytes_total"),
        value("pdserve_kv_transfers_total", outcome="done"),
    ]
    pull(sink, source.publish(request_key(), [1, 2, 9]), [1, 2, 3])
    source.unpinned()
    assert value("pdserve_kv_transfer_bytes_total") == before[0] + 3 * LAYOUT.block_bytes
    assert value("pdserve_kv_transfers_total", outcome="done") == before[1] + 1
