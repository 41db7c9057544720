"""One error in each of the threads that an engine's process has beside its loop: what they do goes
on."""

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvtransfer.kv_peers import Engine, LocalSource, key
from kvtransfer.pool_peers import CHUNK, CONFIG, prompt
from kvtransfer.pool_peers import Engine as PoolEngine
from prometheus_client import CollectorRegistry
from support.failures import Faulty, from_now
from support.local_pool_backend import LocalPoolServer
from support.local_transfer import LocalTransferConfig
from support.waiting import until

from pdserve.background import tasks
from pdserve.background.threads import FAILURES
from pdserve.configs.transfer import PoolConfig
from pdserve.kvtransfer.connector import PoolDone, PoolFailed, PoolStored, PullDone, Unpinned
from pdserve.kvtransfer.p2p.letters import Done
from pdserve.kvtransfer.p2p.mailbox import Mailbox
from pdserve.kvtransfer.pool import lmcache_server
from pdserve.kvtransfer.pool.lmcache_server import SharedServer
from pdserve.kvtransfer.pool.metrics import PoolServerCollector
from pdserve.protocol.events import PeerStatus

SHORT_LEASES = LocalTransferConfig(lease_s=0.05)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def failures() -> Callable[[str], float]:
    """Errors of a thread since the test began."""
    return from_now(FAILURES)


def inject(target: Any, method: str) -> Faulty:
    faulty = Faulty(getattr(target, method))
    setattr(target, method, faulty)
    return faulty


@pytest.mark.parametrize("method", ["_end", "_wake"])
def test_leases_go_on_ending(method: str, failures: Callable[[str], float]) -> None:
    engine = Engine("p", SHORT_LEASES)
    inject(engine.sender, method)
    ended: list[Unpinned] = []
    for name in "ab":
        engine.sender.publish(key(name), [3], 16, b"content")
    until(lambda: len(ended) == 2, doing=lambda: ended.extend(engine.sender.poll()))
    assert {(event.key.request_id, event.outcome) for event in ended} == {
        ("a", "expired"),
        ("b", "expired"),
    }
    assert failures("kv leases") == 1
    engine.close()


def test_letters_go_on_coming(failures: Callable[[str], float]) -> None:
    box = Mailbox("here", 1, None)
    box.attach()
    got: list[Done] = []
    box.on(Done, lambda _, notice: got.append(notice))
    inbox = box._inbox
    broken: Any = SimpleNamespace(recv=Faulty(inbox.recv), close=inbox.close)
    box._inbox = broken
    box.send(box.party, Done(key("wakes the old socket's recv")))
    until(lambda: broken.recv.num_calls)
    box.send(box.party, Done(key("a")))
    until(lambda: len(got) == 2)
    assert failures("kv mailbox") == 1
    box.detach()


def test_a_link_answers_and_connects_again(failures: Callable[[str], float]) -> None:
    config = LocalTransferConfig()
    sink = Engine("d", config)
    source = LocalSource("p", config)
    assert sink.connect(source.meta).connected
    [link] = sink.receiver.local_ranks[0].links
    inject(link, "_wait")
    link._enqueue(lambda: None)
    assert not sink.wait_for(PeerStatus).connected
    assert sink.connect(source.meta).connected
    sink.receiver.pull(1, source.publish(key("a"), [3]), [3], 0, 5.0)
    sink.wait_for(PullDone, pull_id=1)
    assert failures("kv link") == 1
    sink.close()
    source.close()


@pytest.fixture
def pool() -> Iterator[tuple[LocalPoolServer, PoolEngine]]:
    server = LocalPoolServer()
    engine = PoolEngine(
        server, config=CONFIG.model_copy(update={"request_deadline_ms": 100, "breaker_s": 0.05})
    )
    yield server, engine
    server.faults.frozen = False
    engine.close()


def test_each_lane_of_the_pool_goes_on(
    pool: tuple[LocalPoolServer, PoolEngine], failures: Callable[[str], float]
) -> None:
    _, engine = pool
    for lane in engine.pool._lanes.values():
        lane.put(Faulty(lambda: None))
    tokens = prompt(CHUNK)
    engine.compute(tokens, range(4))
    assert isinstance(engine.store(tokens, range(4)), PoolStored)
    assert engine.find(tokens) == CHUNK
    assert isinstance(engine.retrieve(tokens, range(8, 12)), PoolDone)
    # nobody waits for a probe
    until(lambda: [failures(f"kv pool {kind}") for kind in engine.pool._lanes] == [1, 1, 1])


def test_a_probe_that_fails_in_an_unknown_way_is_followed_by_another(
    pool: tuple[LocalPoolServer, PoolEngine], failures: Callable[[str], float]
) -> None:
    server, engine = pool
    inject(engine.pool._backend, "probe")
    server.faults.frozen = True
    for _ in range(3):
        engine.find(prompt(CHUNK))
    until(lambda: engine.pool._breaker.is_open)
    server.faults.frozen = False
    engine.wait_available()
    assert failures("kv pool probe") == 1


@pytest.mark.parametrize(
    "method", ["_next_alarm", "end", "_wake"], ids=["_next_alarm", "_end", "_wake"]
)
def test_deadlines_of_the_pool_go_on(
    method: str, pool: tuple[LocalPoolServer, PoolEngine], failures: Callable[[str], float]
) -> None:
    _, engine = pool
    release = threading.Event()
    # so that the clock alone can end what comes behind
    engine.pool._lanes["retrieve"].put(release.wait)
    inject(engine.pool if method == "_next_alarm" else engine.pool.operations, method)
    ids = [engine.begin_retrieve(prompt(CHUNK), range(4), deadline_s=0.1) for _ in range(2)]
    ended: list[Any] = []
    until(lambda: len(ended) == 2, doing=lambda: ended.extend(engine.pool.poll()))
    assert {(event.op_id, event.reason) for event in ended if isinstance(event, PoolFailed)} == {
        (op_id, "deadline") for op_id in ids
    }
    assert failures("kv pool clock") == 1
    release.set()


def test_somebody_goes_on_to_look_for_the_shared_server(
    monkeypatch: pytest.MonkeyPatch, failures: Callable[[str], float]
) -> None:
    monkeypatch.setattr(lmcache_server, "LOOK_S", 0.001)
    looks: list[int] = []

    def look(shared: SharedServer) -> None:
        looks.append(1)
        if len(looks) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(SharedServer, "_serve_or_join", look)
    shared = SharedServer(PoolConfig(mode="start", address="127.0.0.1:1"))
    assert shared.wait_ready() == "127.0.0.1:1"
    until(lambda: len(looks) > 3)
    shared.close()
    assert failures("kv pool server") == 1


def test_the_worker_that_started_a_server_counts_what_it_evicts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lmcache_server, "LOOK_S", 0.001)
    monkeypatch.setattr(lmcache_server, "COUNT_S", 0.0)
    said: Iterator[int | OSError] = iter([3, OSError("refused"), 7])

    def evicted_chunks() -> int:
        number = next(said, 7)
        if isinstance(number, OSError):
            raise number
        return number

    own = SimpleNamespace(
        wait_ready=lambda: None, evicted_chunks=evicted_chunks, close=lambda: None, address="here"
    )
    monkeypatch.setattr(lmcache_server, "PoolServer", lambda config: own)
    shared = SharedServer(PoolConfig(mode="start"))
    registry = CollectorRegistry()
    assert shared.wait_ready() == "here"
    registry.register(PoolServerCollector(lambda: shared.evicted_chunks))
    until(lambda: registry.get_sample_value("pdserve_kv_pool_evicted_chunks_total") == 7)
    shared.close()


def test_a_pool_server_ends_though_its_memory_cannot_be_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[Any] = []
    process = SimpleNamespace(
        read=lambda *_: b"", getpid=lambda: 7, kill=lambda *what: done.append(what)
    )
    monkeypatch.setattr(lmcache_server, "os", process)
    monkeypatch.setattr(
        lmcache_server, "sys", SimpleNamespace(stdin=SimpleNamespace(fileno=lambda: 0))
    )
    seconds = itertools.count()
    clock = SimpleNamespace(sleep=lambda _: None, monotonic=lambda: next(seconds))
    monkeypatch.setattr(lmcache_server, "time", clock)
    with pytest.raises(OSError):
        lmcache_server._end_with_parent(tmp_path)  # a folder
    assert done == [(7, signal.SIGTERM), (7, signal.SIGKILL)]
