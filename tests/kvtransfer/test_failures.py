"""Peers that die, freeze and come back; over NIXL with real signals, in process by injected
faults."""

import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
from kvtransfer.kv_peers import (
    Engine,
    LocalSource,
    ProcessSource,
    Source,
    expire,
    key,
    pattern,
    until_posted,
)
from support.local_transfer import LocalTransferConfig, is_local
from support.waiting import stays

from pdserve.configs.transfer import TransferConfig
from pdserve.kvtransfer.connector import PullDone, PullFailed, PullSettled
from pdserve.protocol.events import PeerStatus

CONFIGS = {
    "local": LocalTransferConfig(),
    # Over CMA a frozen peer is read all the same and a pull ends inside the post; over TCP it takes
    # part in every read.
    "nixl-tcp": TransferConfig(connector="nixl", ucx_tls="tcp"),
}


@pytest.fixture(scope="module", params=CONFIGS)
def config(request: pytest.FixtureRequest) -> TransferConfig:
    return CONFIGS[request.param]


@pytest.fixture(scope="module")
def sink(config: TransferConfig) -> Iterator[Engine]:
    engine = Engine("d", config)
    yield engine
    engine.close()


def make_source(config: TransferConfig, incarnation: int) -> Source:
    make = LocalSource if is_local(config) else ProcessSource
    return make("p", config, incarnation=incarnation, seed=incarnation)


@pytest.fixture(scope="module")
def source(config: TransferConfig, sink: Engine) -> Iterator[Source]:
    source = make_source(config, 1)
    assert sink.connect(source.meta).connected  # a frozen one would not answer the first time
    yield source
    source.close()


def test_transport_is_the_one_asked_for(
    sink: Engine, source: Source, config: TransferConfig
) -> None:
    status = sink.connect(source.meta)
    assert status.connected
    assert status.transport == ("local" if is_local(config) else "tcp")


def test_deadline_of_a_frozen_peer_settles_after_the_thaw(sink: Engine, source: Source) -> None:
    ticket = source.publish(key("frozen"), [3, 4])
    sink.kv_cache.zero_()
    source.freeze()
    try:
        sink.receiver.pull(100, ticket, [7, 8], 0, 300.0)
        expire(sink.receiver, 100)
        failed = sink.wait_for(PullFailed, PullDone)
        assert (failed.pull_id, failed.reason, failed.settled) == (100, "deadline", False)
        stays(lambda: sink.receiver.poll() == [], 0.3)  # quarantine holds while the peer is frozen
    finally:
        source.thaw()
    assert sink.wait_for(PullSettled).pull_id == 100
    landed = sink.kv_cache.clone()
    stays(lambda: torch.equal(sink.kv_cache, landed), 0.2)
    assert source.unpinned()[0].outcome == "rejected"


def test_cancel_of_a_read_in_flight_settles_later(sink: Engine, source: Source) -> None:
    ticket = source.publish(key("cancelled"), [5])
    source.freeze()
    try:
        sink.receiver.pull(200, ticket, [9], 0, 300.0)
        until_posted(sink, 200, 1)
        sink.receiver.cancel(200)
        sink.receiver.cancel(200)
        failed = sink.wait_for(PullFailed)
        assert (failed.pull_id, failed.reason, failed.settled) == (200, "cancelled", False)
    finally:
        source.thaw()
    sink.wait_for(PullSettled, pull_id=200)
    assert source.unpinned()[0].outcome == "rejected"
    sink.receiver.pull(201, source.publish(key("after"), [6]), [9], 0, 300.0)
    assert isinstance(sink.wait_for(PullDone, PullFailed, pull_id=201), PullDone)
    assert torch.equal(sink.kv_cache[9], pattern(1)[6])
    assert source.unpinned()[0].outcome == "done"
    assert sink.receiver.poll() == []  # one failure and one settling, no more


def test_killed_peer_is_lost_and_a_new_incarnation_works(
    sink: Engine, source: Source, config: TransferConfig
) -> None:
    in_flight = source.publish(key("in flight"), [1, 2])
    later = source.publish(key("later"), [3])
    source.freeze()
    sink.receiver.pull(300, in_flight, [0, 1], 0, 300.0)
    until_posted(sink, 300, 1)
    source.kill()
    failed = sink.wait_for(PullFailed)
    assert (failed.pull_id, failed.reason, failed.settled) == (300, "peer-lost", False)
    status = sink.wait_for(PeerStatus)
    assert not status.connected and status.incarnation == 1
    sink.wait_for(PullSettled, pull_id=300)
    sink.receiver.pull(301, later, [2], 0, 300.0)
    assert sink.wait_for(PullFailed, pull_id=301).reason == "not-connected"

    status = sink.connect(source.meta)  # still the dead one
    assert not status.connected and status.detail

    successor = make_source(config, 2)
    try:
        assert sink.connect(successor.meta).connected
        sink.receiver.pull(302, later, [2], 0, 300.0)
        assert sink.wait_for(PullFailed, pull_id=302).reason == "stale-incarnation"
        sink.receiver.pull(303, successor.publish(key("new"), [11, 12]), [4, 5], 0, 300.0)
        assert isinstance(sink.wait_for(PullDone, PullFailed, pull_id=303), PullDone)
        assert torch.equal(sink.kv_cache[[4, 5]], pattern(2)[[11, 12]])
        assert successor.unpinned()[0].outcome == "done"
    finally:
        successor.close()


def test_peer_that_died_unnoticed_is_lost_at_the_next_pull(
    sink: Engine, config: TransferConfig
) -> None:
    source = make_source(config, 3)
    sink.receiver.connect(source.meta)
    sink.wait(lambda e: isinstance(e, PeerStatus) and e.incarnation == 3 and e.connected)
    tickets = [source.publish(key(f"late {i}"), [i]) for i in range(3)]
    source.kill()
    for index, ticket in enumerate(tickets):
        sink.receiver.pull(400 + index, ticket, [index], 0, 300.0)
    failed = [sink.wait_for(PullFailed) for _ in tickets]
    assert [f.pull_id for f in failed] == [400, 401, 402]
    assert failed[0].reason == "peer-lost"
    assert {f.reason for f in failed[1:]} <= {"peer-lost", "not-connected"}
    for event in failed:
        if not event.settled:
            sink.wait_for(PullSettled, pull_id=event.pull_id)
    source.close()


def test_close_with_a_read_in_flight_returns_and_keeps_the_memory(config: TransferConfig) -> None:
    source = make_source(config, 4)
    engine = Engine("closing", config)
    try:
        assert engine.connect(source.meta).connected
        ticket = source.publish(key("closing"), [1])
        source.freeze()
        engine.receiver.pull(500, ticket, [1], 0, 300.0)
        until_posted(engine, 500, 1)
        engine.close()  # while the read cannot end
        assert engine.wait_for(PullFailed).settled is False
    finally:
        source.thaw()
        assert engine.wait_for(PullSettled).pull_id == 500  # its thread still watches the read
        source.close()


def test_severed_read_of_a_frozen_peer_is_lost_and_settles(
    sink: Engine, config: TransferConfig
) -> None:
    """Nothing else ends it, and nothing lands after: not when the peer thaws either. (Then UCX 1.21
    ends the peer's process: it answers what it finds in a socket that was cut, and takes the error
    for fatal.)
    """
    source = make_source(config, 6)
    try:
        sink.receiver.connect(source.meta)
        sink.wait(lambda e: isinstance(e, PeerStatus) and e.incarnation == 6 and e.connected)
        ticket = source.publish(key("severed"), [1, 2])
        sink.kv_cache.zero_()
        source.freeze()
        sink.receiver.pull(600, ticket, [1, 2], 0, 300.0)
        until_posted(sink, 600, 1)
        assert sink.receiver.local_ranks[0].agent.sever(source.meta.ranks[0].agent_name) > 0
        failed = sink.wait_for(PullFailed)
        assert (failed.pull_id, failed.reason, failed.settled) == (600, "peer-lost", False)
        assert sink.wait_for(PullSettled).pull_id == 600
        source.thaw()
        stays(lambda: not sink.kv_cache.any(), 0.3)
    finally:
        source.thaw()
        source.close()


def cpu_seconds(pid: int | None) -> float:
    """CPU time of a process. Without a pid, only that of this process's connector threads, because
    other tests leave threads of Ray's behind."""
    if pid is not None:
        return sum(psutil.Process(pid).cpu_times()[:2])
    ours = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("kv ")}
    return sum(t.user_time + t.system_time for t in psutil.Process().threads() if t.id in ours)


@pytest.mark.lengthy
def test_idle_engines_sleep(config: TransferConfig, sink: Engine) -> None:
    """Connected, nothing outstanding: our threads wait without a timeout, NIXL's progress thread
    polls each ms. (Tickets of tests before may be out until their lease ends: a sender listens each
    ms as long as one is.)
    """
    source = make_source(config, 7)
    try:
        sink.receiver.connect(source.meta)
        sink.wait(lambda e: isinstance(e, PeerStatus) and e.incarnation == 7 and e.connected)
        pid = source.process.pid if isinstance(source, ProcessSource) else None
        for _ in range(9):
            before = cpu_seconds(pid)
            began = time.monotonic()
            time.sleep(4.0)  # the time over which CPU is counted
            share = (cpu_seconds(pid) - before) / (time.monotonic() - began)
            if share < 0.03:
                break
        assert share < 0.03
    finally:
        source.close()
