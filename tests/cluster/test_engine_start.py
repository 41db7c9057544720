"""The watch over an engine's start, with an engine that is a few coroutines: no Ray is started."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError
from support.clock import Clock
from support.waiting import until_async

from pdserve.cluster.deployments import engine_start
from pdserve.cluster.deployments.engine_start import EngineStart, StartError
from pdserve.cluster.deployments.start_board import StartRecord
from pdserve.cluster.operate.readiness import News, last_error, told
from pdserve.configs.schema import StartConfig, WorkerConfig
from pdserve.protocol.start_progress import Progress, Stage

SHELL_LOG = "/logs/replica.log"
ENGINE_LOG = "/logs/worker.err"


class Scene:
    """An engine, its board and its watch. `now` is what the engine answers; None: it does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **deadlines: float) -> None:
        self.now: Progress | None = None
        self.result: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.board: dict[str, StartRecord] = {}
        self.posted: list[Progress] = []
        self.killed: list[object] = []
        monkeypatch.setattr(ray, "kill", self.killed.append)
        monkeypatch.setattr(engine_start, "LOOK_S", 0.01)
        self.engine = SimpleNamespace(
            start=SimpleNamespace(remote=self._start),
            progress=SimpleNamespace(remote=self._progress),
        )
        config = WorkerConfig(start=StartConfig(**deadlines))
        self.watch = EngineStart(
            self.engine, config, "Decode#x", "10.0.0.1", 2, SHELL_LOG, self._post, self._remove
        )

    async def serving(self) -> dict[str, Any]:
        async with self.watch:
            return await self.watch.serving()

    async def passes(self, *stages: Progress) -> None:
        for stage in stages:
            self.now = stage
            while stage not in self.posted:
                await asyncio.sleep(0.005)

    async def _start(self) -> dict[str, Any]:
        return await self.result

    async def _progress(self) -> tuple[Progress, str]:
        await asyncio.sleep(0.02)  # its way through Ray
        while self.now is None:
            await asyncio.sleep(0.005)
        return self.now, ENGINE_LOG

    def _post(self, record: StartRecord) -> None:
        self.board[record.worker_id] = record
        self.posted.append(record.progress)

    def _remove(self, worker_id: str) -> None:
        del self.board[worker_id]


class WithoutBoard(Scene):
    """Its board is out of reach."""

    def _post(self, record: StartRecord) -> None:
        raise RuntimeError("no GCS")

    def _remove(self, worker_id: str) -> None:
        raise RuntimeError("no GCS")


async def failure(scene: Scene) -> str:
    with pytest.raises(StartError) as caught:
        async with asyncio.timeout(60):
            await scene.serving()
    assert scene.killed == [scene.engine] and not scene.board
    return str(caught.value)


async def test_stages_are_posted_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    serving = asyncio.ensure_future(scene.serving())
    steps = [Progress("config"), Progress("weights", 1, 4), Progress("weights", 3, 4)]
    await scene.passes(*steps)
    assert scene.board["Decode#x"].files == (SHELL_LOG, ENGINE_LOG)
    assert scene.board["Decode#x"].node == "10.0.0.1"
    scene.result.set_result({"device": "cpu"})
    assert await serving == {"device": "cpu"}
    assert scene.posted == [Progress("process"), *steps, Progress("connection")]
    assert not scene.board and not scene.killed


async def test_a_process_that_never_starts_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    said = await failure(Scene(monkeypatch, process_s=0.05))
    assert said == (
        "worker Decode#x made no progress for 0.05 s while starting the engine's process (stage "
        "process). It is on node "
        "10.0.0.1, with 2 GPU: see the raylet's log on that node (raylet.out) for why Ray does "
        "not start it, or raise "
        f"start.process_s. Its logs on 10.0.0.1: {SHELL_LOG}"
    )


@pytest.mark.parametrize("stage", ["weights", "registration"])
@pytest.mark.parametrize("answers", [True, False])
async def test_a_stage_that_does_not_end_fails_by_name(
    monkeypatch: pytest.MonkeyPatch, stage: Stage, answers: bool
) -> None:
    """If `answers` is False, a library holds Python's lock."""
    scene = Scene(monkeypatch, **{f"{stage}_s": 0.1})
    failing = asyncio.ensure_future(failure(scene))
    await scene.passes(Progress("config"), Progress(stage, 1, 4))
    if not answers:
        scene.now = None
    said = await failing
    assert f"no progress for 0.1 s while {Progress(stage, 1, 4)} (stage {stage})" in said
    assert f"or raise start.{stage}_s" in said and ENGINE_LOG in said


async def test_a_slow_stage_with_progress_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte more is progress; a line is due each percent only."""
    clock = Clock()
    monkeypatch.setattr(engine_start, "time", SimpleNamespace(monotonic=clock, time=time.time))
    scene = Scene(monkeypatch, weights_s=1.0)
    serving = asyncio.ensure_future(scene.serving())
    for done in range(15):
        scene.now = Progress("weights", done, 10_000_000)
        await until_async(lambda: scene.watch._now == scene.now)
        clock.seconds += 0.9  # longer than the deadline in all
    scene.result.set_result({})
    assert await serving == {}
    assert scene.posted == [
        Progress("process"),
        Progress("weights", 0, 10_000_000),
        Progress("connection"),
    ]


async def test_what_the_engine_raised_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    failing = asyncio.ensure_future(failure(scene))
    await scene.passes(Progress("weights", 1, 4))
    cause = ValueError("the folder lacks lm_head")
    scene.result.set_exception(RayTaskError("start", "a traceback", cause))
    said = await failing
    assert said == (
        "worker Decode#x failed while loading weights: ValueError: the folder lacks lm_head. "
        f"Its logs on 10.0.0.1: {SHELL_LOG}, {ENGINE_LOG}"
    )


async def test_a_stage_that_fails_between_two_looks_is_the_one_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)
    failing = asyncio.ensure_future(failure(scene))
    await scene.passes(Progress("config"))
    scene.now = Progress("device")
    scene.result.set_exception(
        RayTaskError("start", "a traceback", RuntimeError("no kernel image"))
    )
    assert "failed while initialising the device: RuntimeError: no kernel image" in await failing


async def test_a_process_that_dies_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    failing = asyncio.ensure_future(failure(scene))
    await scene.passes(Progress("kv_memory"))
    scene.result.set_exception(ActorDiedError())
    assert "failed while allocating KV memory: ActorDiedError: " in await failing


async def test_an_engine_that_nobody_reaches_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, connection_s=0.05)
    scene.result.set_result({})
    with pytest.raises(
        StartError, match=r"for 0\.05 s while connecting to the engine .* start\.connection_s"
    ):
        async with scene.watch:
            await scene.watch.serving()
            await scene.watch.connected(asyncio.Event().wait())
    assert scene.killed == [scene.engine] and not scene.board


async def test_a_board_out_of_reach_keeps_nobody_from_starting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene = WithoutBoard(monkeypatch)
    scene.result.set_result({"device": "cpu"})
    assert await scene.serving() == {"device": "cpu"}


def record(
    stage: Stage, done: int = 0, total: int = 0, files: tuple[str, ...] = (SHELL_LOG,)
) -> StartRecord:
    return StartRecord("Decode#x", "10.0.0.1", Progress(stage, done, total), 0.0, files)


def test_each_step_of_a_start_is_said_once() -> None:
    news = News()

    def lines(*records: StartRecord) -> list[str]:
        return [line.removeprefix("pdserve: Decode#x: ") for line in news.of_starts(records)]

    assert lines(record("process")) == ["starting the engine's process"]
    assert lines(record("process")) == []
    located = record("weights", 0, 1000, (SHELL_LOG, ENGINE_LOG))
    assert lines(located) == [
        "loading weights: 0.0 of 0.0 GB (0 %)",
        f"logs on 10.0.0.1: {SHELL_LOG}, {ENGINE_LOG}",
    ]
    said = [lines(record("weights", done, 1000, located.files)) for done in range(1001)]
    assert len([line for line in said if line]) == 10, "a line each tenth"
    assert lines() == []


def deployments(**messages: str) -> Any:
    status = SimpleNamespace(value="UPDATING")
    made = {name: SimpleNamespace(status=status, message=text) for name, text in messages.items()}
    return SimpleNamespace(deployments=made)


def test_serves_messages_are_said_once_with_the_reason() -> None:
    news = News()
    head = "A replica failed to start with exception. Retrying 2 more time(s). Error:"
    failed = f"{head}\nTraceback:\n  x\nValueError: no"
    assert list(news.of_serve(deployments(Decode="", Router=""))) == [
        "pdserve: Decode: updating, Router: updating"
    ]
    assert list(news.of_serve(deployments(Decode=failed, Router=""))) == [
        f"pdserve: Decode: {head}\nValueError: no"
    ]
    assert list(news.of_serve(deployments(Decode=failed, Router=""))) == []
    assert told("waits for 30 s.\nThis may be slow.") == "waits for 30 s.\nThis may be slow."
    chained = (
        "RayTaskError: x\nValueError: first\n\nThe above\n\n"
        "pdserve.cluster.deployments.engine_start.StartError: worker Decode#x"
    )
    assert (
        last_error(chained)
        == "pdserve.cluster.deployments.engine_start.StartError: worker Decode#x"
    )
