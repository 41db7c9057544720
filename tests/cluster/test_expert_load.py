"""`pdserve expert-load` without Ray: from the command to a router's handle and back, and the file
that an engine reads."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import pytest
from router.fake_worker import FakeWorker, World
from router.harness import until

from pdserve.cluster import client as cluster_client
from pdserve.cluster.cli import main
from pdserve.cluster.deployments.router_replica import RouterReplica
from pdserve.cluster.loop_thread import LoopThread
from pdserve.cluster.operate.commands import summary
from pdserve.cluster.orders import ClusterError, OrdersClient
from pdserve.kernels.experts.load_file import read_load
from pdserve.router.expert_load import ExpertLoadReport
from pdserve.router.fleet.fleet import Fleet

ROWS: dict[str, dict[int, tuple[int, ...]]] = {
    "Prefill#p": {1: (8, 0, 0, 0), 3: (1, 3, 2, 2)},
    "Decode#a": {1: (1, 1, 1, 1), 3: (4, 0, 0, 0)},
    "Decode#b": {1: (0, 0, 0, 4), 3: (0, 0, 1, 3)},
}


class Router(RouterReplica):
    """Only the handle's methods, over a fleet of the test; Serve calls the others."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __del__(self) -> None:  # type: ignore[override]
        pass


class Operator(OrdersClient):
    """The client, whose calls reach a router in the loop that made it."""

    def __init__(self, fleet: Fleet) -> None:
        self._router = Router(fleet)
        self._loop = asyncio.get_running_loop()
        self._thread = LoopThread("operator", "closed")
        self._orders = self

    async def remote(self, data: bytes) -> bytes:
        call = asyncio.run_coroutine_threadsafe(self._router.admin(data), self._loop)
        return await asyncio.wrap_future(call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
async def operator(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Operator]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    world = World()
    fleet = Fleet(worker_silence_s=600.0)
    for name, rows in ROWS.items():
        worker = FakeWorker(world, name, "prefill" if name[0] == "P" else "decode")
        worker.expert_rows = rows
        fleet.join(worker)
    await until(lambda: len(fleet.workers) == len(ROWS))
    operator = Operator(fleet)
    monkeypatch.setattr(cluster_client, "connect", lambda address, app: operator)
    yield operator
    operator._thread.close()
    await fleet.close()
    await world.close()


async def run(*words: str) -> int:
    return await asyncio.to_thread(main, ["expert-load", *words])


@pytest.mark.parametrize(
    ("role", "workers", "rows"),
    [
        ([], "Decode#a, Decode#b, Prefill#p", {1: (9, 1, 1, 5), 3: (5, 3, 3, 5)}),
        (["--role", "decode"], "Decode#a, Decode#b", {1: (1, 1, 1, 5), 3: (4, 0, 1, 3)}),
    ],
)
async def test_the_command_writes_what_an_engine_reads(
    role: list[str],
    workers: str,
    rows: dict[int, tuple[int, ...]],
    operator: Operator,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "load.json"
    assert await run("--out", str(file), *role) == 0
    assert read_load(file, (1, 3), 4) == rows
    assert f"counted by {workers};" in capsys.readouterr().out


async def test_both_methods_of_the_client_give_the_same(operator: Operator) -> None:
    report = await operator.aexpert_load("prefill")
    assert report == ExpertLoadReport(
        workers=["Prefill#p"], layers={1: [8, 0, 0, 0], 3: [1, 3, 2, 2]}
    )
    assert await asyncio.to_thread(operator.expert_load, "prefill") == report
    with pytest.raises(ValueError, match="role must be prefill, decode or both, not 'all'"):
        await operator.aexpert_load("all")
    with pytest.raises(ClusterError, match="no worker has the role both") as caught:
        await operator.aexpert_load("both")
    assert caught.value.status == 404


async def test_what_cannot_be_written_is_said(
    operator: Operator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("--out", str(tmp_path)) == 2
    assert "is a folder, but a file is needed" in capsys.readouterr().err
    file = tmp_path / "load.json"
    assert await run("--out", str(file), "--role", "both") == 2
    assert "no worker has the role both" in capsys.readouterr().err
    assert not file.exists()


def test_a_summary_says_how_uneven_the_load_is() -> None:
    layers = {1: [6, 1, 1, 0], 3: [0, 0, 0, 0], 5: [1000, 1000, 1000, 1000]}
    assert summary(ExpertLoadReport(workers=["a", "b"], layers=layers)) == (
        "4,008 rows to 4 experts in each of 3 layers, counted by a, b; the busiest expert got 3.0 "
        "times its layer's mean"
    )
