"""KV hand-over between two network namespaces as two hosts: over TCP, through death and a cut link,
in bounded time."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator

import pytest
from kvtransfer.net_hosts import LAYOUT, NUM_BLOCKS, POOL_BYTES, Remote
from support.waiting import stays, until

from benchmarks.support.two_hosts import WITHOUT_PTRACE, Net, available, inside, two_hosts
from pdserve.configs.transfer import TransferConfig
from pdserve.kvtransfer.connector import PullDone, PullFailed, PullSettled
from pdserve.protocol.events import PeerStatus

pytestmark = pytest.mark.processes

RATE_MBIT = 400
# 1.3 s: on a busy machine a link is cut in a few tenths
WHOLE_POOL_S = POOL_BYTES * 8 / (RATE_MBIT * 1e6)
CONFIG = TransferConfig(connector="nixl", lease_s=30.0)  # UCX chooses
ALL = list(range(NUM_BLOCKS))
PATIENCE_S = 20.0  # a peer whose reads do not end is cut off after SEVER_AFTER_S, 30


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    reason = available()
    if reason:
        pytest.skip(reason)
    with two_hosts(RATE_MBIT) as net:
        yield net


@pytest.fixture(scope="module")
def sink(net: Net) -> Iterator[Remote]:
    sink = Remote(inside(net.d), "d", CONFIG)
    yield sink
    sink.end()


@pytest.fixture(scope="module")
def source(net: Net, sink: Remote) -> Iterator[Remote]:
    source = Remote(inside(net.p), "p", CONFIG, 1, 1)
    status = sink.connect(source.meta())
    assert status.connected and status.transport == "tcp", status
    yield source
    source.end()


@contextlib.contextmanager
def begun(
    net: Net, source: Remote, sink: Remote, pull_id: int, deadline_s: float
) -> Iterator[None]:
    """Within it a pull of the whole KV cache is in its middle, and the link is so slow that it
    stays there."""
    with net.slow():
        sink.clear()
        ticket = source.publish(f"pull {pull_id}", ALL)
        sink.pull(pull_id, ticket, ALL, deadline_s)
        assert sink.event(PullDone, WHOLE_POOL_S / 3) is None
        yield


def assert_pulls(source: Remote, sink: Remote, pull_id: int, seed: int) -> PullDone:
    sink.clear()
    sink.pull(pull_id, source.publish(f"pull {pull_id}", ALL), ALL, 300.0)
    done = sink.event(PullDone, PATIENCE_S)
    assert done is not None and done.pull_id == pull_id and sink.num_equal(seed) == NUM_BLOCKS
    return done


def test_pull_over_tcp_is_bit_equal(source: Remote, sink: Remote) -> None:
    done = assert_pulls(source, sink, 1, seed=1)
    assert (
        done.transport == "tcp" and done.num_bytes == POOL_BYTES == NUM_BLOCKS * LAYOUT.block_bytes
    )
    assert done.seconds > 0.8 * WHOLE_POOL_S
    assert [unpinned.outcome for unpinned in source.unpinned()] == ["done"]


def test_cut_link_fails_by_deadline_and_settles_when_mended(
    net: Net, source: Remote, sink: Remote
) -> None:
    with begun(net, source, sink, 2, deadline_s=2.0):
        net.cut()
        try:
            failed = sink.event(PullFailed, PATIENCE_S)
            assert failed is not None and (failed.reason, failed.settled) == ("deadline", False)
            # bytes may still be on their way: quarantine holds
            assert sink.event(PullSettled, 0.5) is None
        finally:
            net.mend()
    settled = sink.event(PullSettled, PATIENCE_S)
    assert settled is not None and settled.pull_id == 2
    landed = sink.digest()
    stays(lambda: sink.digest() == landed, 0.3)
    assert_pulls(source, sink, 3, seed=1)


def test_killed_host_is_lost_settles_and_a_successor_works(
    net: Net, source: Remote, sink: Remote
) -> None:
    with begun(net, source, sink, 4, deadline_s=300.0):
        source.kill()
        failed = sink.event(PullFailed, PATIENCE_S)
    assert failed is not None and (failed.reason, failed.settled) == ("peer-lost", False)
    settled = sink.event(PullSettled, PATIENCE_S)
    assert settled is not None and settled.pull_id == 4
    landed = sink.digest()
    stays(lambda: sink.digest() == landed, 0.3)
    assert sink.num_equal(1) < NUM_BLOCKS

    successor = Remote(inside(net.p), "p", CONFIG, 2, 2)
    try:
        status: PeerStatus = sink.connect(successor.meta())
        assert status.connected and status.transport == "tcp", status
        assert_pulls(successor, sink, 5, seed=2)
    finally:
        successor.end()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("silent", [False, True], ids=["while bytes flow", "link cut"])
def test_severed_read_is_lost_and_not_a_byte_lands_after(
    net: Net, sink: Remote, silent: bool
) -> None:
    """The only way to end a read whose peer lives."""
    source = Remote(inside(net.p), "q", CONFIG, 1 + silent, 3)
    try:
        assert sink.connect(source.meta()).connected
        with begun(net, source, sink, 6, deadline_s=300.0):
            if silent:
                net.cut()
            assert sink.sever(source.meta().ranks[0].agent_name) == 1
            failed = sink.event(PullFailed, PATIENCE_S)
        assert failed is not None and (failed.reason, failed.settled) == ("peer-lost", False)
        settled = sink.event(PullSettled, PATIENCE_S)
        assert settled is not None and settled.pull_id == 6
        landed = sink.digest()
        net.mend()
        stays(lambda: sink.digest() == landed, 1.5 * WHOLE_POOL_S)
        assert sink.num_equal(3) < NUM_BLOCKS
        assert sink.connect(source.meta()).connected
        assert_pulls(source, sink, 7, seed=3)
    finally:
        net.mend()
        source.end()


def test_host_that_falls_silent_for_good_is_given_up(net: Net, sink: Remote) -> None:
    """Its kernel says no goodbye either, and TCP would wait for a quarter of an hour."""
    source = Remote(inside(net.p), "r", CONFIG, 1, 4)
    try:
        assert sink.connect(source.meta()).connected
        with begun(net, source, sink, 8, deadline_s=2.0):
            net.cut()
            source.kill()
            failed = sink.event(PullFailed, PATIENCE_S)
        assert failed is not None and (failed.reason, failed.settled) == ("deadline", False)
        assert sink.event(PullSettled, 0.5) is None
        assert sink.sever("r/1/0") == 1
        settled = sink.event(PullSettled, PATIENCE_S)
        assert settled is not None and settled.pull_id == 8
    finally:
        net.mend()
        source.end()


@pytest.mark.xfail(
    strict=True, reason="UCX aborts the source: ucp_request.inl, unexpected error: Endpoint timeout"
)
def test_reader_that_dies_while_its_source_is_frozen_costs_nobody_else(net: Net) -> None:
    """The source thaws with a read in its socket whose reader is gone."""
    source = Remote(inside(net.p), "s", CONFIG, 1, 5)
    reader = Remote(inside(net.d), "e", CONFIG)
    try:
        assert reader.connect(source.meta()).connected
        ticket = source.publish("read", [0])
        source.freeze()
        reader.pull(9, ticket, [0], 300.0)
        until(lambda: reader.has_posted(9))
        time.sleep(0.3)  # its bytes leave the process, which nothing can see
        reader.kill()
        source.thaw()
        stays(source.is_alive, 5.0)
    finally:
        reader.end()
        source.end()


@pytest.mark.slow
def test_cma_that_is_not_permitted_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """One host, as seen from a container: the pair's reads go by TCP, and the log says why they are
    slow."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv to take a capability away")
    source = Remote([], "t", CONFIG, 1, 6)
    allowed = Remote([], "f", CONFIG)
    denied = Remote(WITHOUT_PTRACE, "g", CONFIG)
    try:
        assert allowed.connect(source.meta()).transport == "cma"
        assert "CMA is not permitted" not in capfd.readouterr().err
        assert denied.connect(source.meta()).transport == "tcp"
        assert "CMA is not permitted" in capfd.readouterr().err
        assert_pulls(source, denied, 10, seed=6)
    finally:
        for engine in (source, allowed, denied):
            engine.end()


@pytest.mark.slow
def test_peers_of_other_segment_sizes_are_refused_and_not_aborted() -> None:
    source = Remote([], "u", CONFIG, 1, 7)
    other = Remote(["env", "UCX_TCP_TX_SEG_SIZE=8k", "UCX_TCP_RX_SEG_SIZE=64k"], "o", CONFIG)
    try:
        status = other.connect(source.meta())
        assert not status.connected and "set them alike" in status.detail
    finally:
        source.end()
        other.end()
