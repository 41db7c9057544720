"""One error in each of the background tasks of routers and worker shells, without Ray: the work
goes on, or the process says that it must be replaced."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from router.harness import until
from router.workers import made
from support.failures import Faulty, from_now

from pdserve.background import tasks
from pdserve.background.tasks import FAILURES
from pdserve.cluster.deployments import metrics_bridge, worker_replica
from pdserve.cluster.deployments.http_server import Address, HttpServer
from pdserve.cluster.deployments.metrics_bridge import MetricsBridge
from pdserve.cluster.deployments.worker_replica import WorkerReplica
from pdserve.cluster.links import serve_links
from pdserve.cluster.links.batching import Batcher
from pdserve.cluster.links.membership import publish
from pdserve.cluster.links.serve_links import MembershipWatcher
from pdserve.cluster.scaling import autoscaler, decode_guard
from pdserve.cluster.scaling.autoscaler import Autoscaler
from pdserve.cluster.scaling.decode_guard import DecodeGuard
from pdserve.configs.schema import ClusterConfig
from pdserve.router.admin import Count
from pdserve.router.fleet.link import WorkerLink


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)
    for module in (autoscaler, decode_guard, metrics_bridge):
        monkeypatch.setattr(module, "PERIOD_S", 0.001)
    monkeypatch.setattr(serve_links, "REJOIN_S", 0.001)


@pytest.fixture
def failures() -> Callable[[str], float]:
    """Counts the failures of a task since the test began."""
    return from_now(FAILURES)


class Members:
    """A fleet that fails at its first join and at its first leave."""

    def __init__(self) -> None:
        self.present: set[str] = set()
        self.join = Faulty(lambda link: self.present.add(link.worker_id))
        self.leave = Faulty(self.present.discard)

    @property
    def worker_ids(self) -> set[str]:
        return self.present


async def test_joins_and_leaves_go_on(
    monkeypatch: pytest.MonkeyPatch, failures: Callable[[str], float]
) -> None:
    def link(handle: Any, worker_id: str) -> WorkerLink:
        stands_for: Any = SimpleNamespace(worker_id=worker_id)
        return stands_for

    monkeypatch.setattr(serve_links, "ServeLink", link)
    handle: Any = SimpleNamespace(
        deployment_id=SimpleNamespace(app_name="background", name="Decode"),
        options=lambda **_: None,
    )
    members = Members()
    watcher = MembershipWatcher(members, [handle])
    watcher.start()
    publish("background#Decode", frozenset({"Decode#a", "Decode#b"}))
    await until(lambda: members.present == {"Decode#a", "Decode#b"})
    publish("background#Decode", frozenset({"Decode#b"}))
    await until(lambda: members.present == {"Decode#b"})
    assert failures("membership watcher") == 2
    watcher.stop()


@pytest.mark.parametrize("error", [KeyError, ValueError])
async def test_counts_go_on_following_load(
    error: type[Exception], failures: Callable[[str], float]
) -> None:
    """The rank and the controller may each fail; a ValueError of somewhere is no word that nothing
    can be scaled."""
    targets = {"decode": 1}
    asked: list[str] = []

    async def get() -> dict[str, Count]:
        asked.append("get")
        if len(asked) == 1:
            raise error("by test")
        return {"decode": Count(target=targets["decode"], running=1)}

    async def put(wanted: dict[str, int]) -> list[str]:
        targets.update(wanted)
        return []

    bounds = {"autoscaling": {"min": 1, "max": 4, "up_delay_s": 0}}
    config = ClusterConfig.model_validate({"mode": "aggregated", "decode": bounds})
    fleet: Any = SimpleNamespace(workers=[made("Decode#b", "both", queue_tokens=1 << 30)])
    counts: Any = SimpleNamespace(get=get, set=put)
    scaler = Autoscaler(fleet, counts, config, Faulty(lambda: True))
    scaler.start()
    await until(lambda: targets["decode"] > 1)
    scaler.stop()
    assert failures("autoscaler") == 2


async def test_somebody_goes_on_to_decode(
    monkeypatch: pytest.MonkeyPatch, failures: Callable[[str], float]
) -> None:
    monkeypatch.setattr(decode_guard, "NONE_S", 0.0)
    posted: list[Any] = []
    fleet: Any = SimpleNamespace(
        workers=[made("Prefill#a", "prefill")], post=lambda *what: posted.append(what)
    )
    guard = DecodeGuard(fleet, Faulty(lambda: True, faults=3))
    guard.start()
    await until(lambda: posted)
    guard.stop()
    assert failures("decode guard") == 3


async def test_metrics_go_on_to_rays_exporter(failures: Callable[[str], float]) -> None:
    source = Faulty(faults=2)
    bridge = MetricsBridge(source)
    await until(lambda: source.num_calls > 3)
    bridge.close()
    assert failures("metrics bridge") == 2


async def test_a_batcher_that_fails_sends_the_next_message(
    failures: Callable[[str], float],
) -> None:
    sent: list[list[bytes]] = []

    async def call(messages: list[bytes]) -> None:
        sent.append(messages)

    batcher = Batcher(call, 100)
    take: Any = Faulty(batcher._take)
    batcher._take = take  # type: ignore[method-assign]
    first = asyncio.create_task(batcher.send(b"a"))
    await until(lambda: failures("batcher") == 1)
    await batcher.send(b"b")
    await first
    assert sent == [[b"a", b"b"]]


async def test_an_http_server_that_fails_says_so_and_can_be_closed(
    failures: Callable[[str], float],
) -> None:
    server = HttpServer(SimpleNamespace(), Address("127.0.0.1", 0), 60)  # type: ignore[arg-type]
    serve: Any = Faulty()

    async def broken(**_: Any) -> None:
        serve()

    server._server.serve = broken  # type: ignore[assignment]
    server.start()
    await until(lambda: not server.running)
    assert failures("http server") == 1
    await server.close()


async def test_a_shell_that_cannot_watch_its_engine_ends(
    monkeypatch: pytest.MonkeyPatch,
    failures: Callable[[str], float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody would notice the engine's end."""
    ends: list[int] = []
    killed: list[float] = []

    def kill(wait_s: float) -> bool:
        killed.append(wait_s)
        return True

    monkeypatch.setattr(worker_replica.os, "_exit", ends.append)
    monkeypatch.setattr(worker_replica.logging, "shutdown", lambda: None)
    run = SimpleNamespace(remote=Faulty())
    shell: Any = SimpleNamespace(
        worker_id="Decode#x", _stopping=False, _engine=SimpleNamespace(run=run)
    )
    shell._end_of_engine = lambda: WorkerReplica._end_of_engine(shell)
    shell._end = lambda reason: WorkerReplica._end(shell, reason)
    shell._processes = SimpleNamespace(kill=kill)
    await WorkerReplica._run(shell)
    assert ends == [1] and len(killed) == 1
    assert failures("engine watch") == 1 and "KeyError: 'by test'" in caplog.text
    shell._stopping = True
    run.remote = Faulty()
    await WorkerReplica._run(shell)
    assert ends == [1], "it was to end anyway"


async def test_a_batch_that_a_shell_cannot_read_is_passed_on_and_told(
    failures: Callable[[str], float],
) -> None:
    """An exception would keep the later batches from all routers."""
    shell: Any = SimpleNamespace(_snapshot=None)
    WorkerReplica._overhear(shell, b"\xc1")
    assert failures("overhear") == 1 and shell._snapshot is None
