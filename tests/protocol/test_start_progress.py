"""The stages of an engine's start: which a real one passes, what is logged, which deadline each
has."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import pytest
from support.grammars import ListedGrammars
from support.local_transfer import LocalTransferConfig
from support.waiting import stays, until

from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.configs.schema import StartConfig, WorkerConfig
from pdserve.configs.transfer import PoolConfig, TransferConfig
from pdserve.engine.build import build_engine
from pdserve.engine.grammars.builder import GrammarBuilder
from pdserve.protocol.start_progress import LOG_PERIOD_S, WORK, Progress, Stage, StartProgress
from pdserve.worker.hosts import engine_host
from pdserve.worker.hosts.engine_host import EngineHost


class Recorded(StartProgress):
    """All that was ever seen from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Progress] = []

    def enter(self, stage: Stage) -> None:
        super().enter(stage)
        self.seen.append(self.now)

    def report(self, done: int, total: int) -> None:
        super().report(done, total)
        self.seen.append(self.now)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_an_engine_says_where_its_start_is(tiny_llama: Path, load_format: Any) -> None:
    progress = Recorded()
    model = ModelConfig(path=str(tiny_llama), load_format=load_format)
    build_engine(model, EngineConfig(device="cpu", num_kv_blocks=8), progress)
    stages = list(dict.fromkeys(now.stage for now in progress.seen))
    assert stages == ["config", "device", "weights", "kv_memory"]
    weights = [now for now in progress.seen if now.stage == "weights" and now.total]
    [size] = {now.total for now in weights}
    assert load_format == "dummy" or size == (tiny_llama / "model.safetensors").stat().st_size
    done = [now.done for now in weights]
    assert done == sorted(done) and len(done) > 10 and 0.9 * size < done[-1] <= size


@pytest.fixture
def config_of_host(tiny_llama: Path) -> WorkerConfig:
    return WorkerConfig(
        model=ModelConfig(path=str(tiny_llama)),
        engine=EngineConfig(device="cpu", num_kv_blocks=8),
        transfer=LocalTransferConfig(),
    )


def test_a_host_registers_its_memory_last(config_of_host: WorkerConfig) -> None:
    host = EngineHost(config_of_host, "Decode#x", 1, "inproc://start-progress")
    try:
        host.start()
        stages = ["config", "device", "weights", "kv_memory", "registration"]
        seen = list(host.progress.seconds)
        assert [stage for stage in seen if stage != "grammars"] == stages
        assert host.progress.now == Progress("connection")
    finally:
        host._close()


def test_a_host_is_not_ready_before_it_can_say_hello(
    config_of_host: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Hello says what builds grammars. While that is still loading, the start is in this stage,
    and has its deadline."""
    loaded = threading.Event()

    def load() -> ListedGrammars:
        assert loaded.wait(60), "the test never lets it load"
        return ListedGrammars()

    monkeypatch.setattr(engine_host, "grammar_builder", lambda *_, **__: GrammarBuilder(load))
    host = EngineHost(config_of_host, "Decode#x", 1, "inproc://not-ready")
    with ThreadPoolExecutor(1) as threads:
        started = threads.submit(host.start)
        until(lambda: host.progress.now == Progress("grammars") or started.done())
        stays(lambda: not started.done(), 0.1)
        loaded.set()
        started.result(60)
        threads.submit(host._close).result(60)
    assert host.progress.now == Progress("connection")
    assert list(host.progress.seconds)[-1] == "grammars"


def test_each_stage_has_its_work_and_its_deadline() -> None:
    stages = get_args(Stage)
    assert list(WORK) == list(stages)
    assert list(StartConfig.model_fields) == [f"{stage}_s" for stage in stages]
    config = WorkerConfig(
        start=StartConfig(weights_s=7, pool_s=3),
        transfer=TransferConfig(pool=PoolConfig(start_deadline_s=100)),
    )
    assert (config.start_deadline_s("weights"), config.start_deadline_s("pool")) == (7, 103)
    assert all(config.start_deadline_s(stage) > 0 for stage in stages)


def test_progress_is_written_as_people_read_it() -> None:
    assert (
        str(Progress("weights", 3_100_000_000, 16_000_000_000))
        == "loading weights: 3.1 of 16.0 GB (19 %)"
    )
    assert (
        str(Progress("graphs", 7, 35))
        == "compiling kernels and capturing CUDA graphs: 7 of 35 (20 %)"
    )
    assert str(Progress("device")) == "initialising the device"


def test_stages_are_logged_at_once_and_their_progress_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = iter([0.0, 1.0, 2.0, 2.0 + LOG_PERIOD_S, 20.0, 20.0, 21.0, 21.0])
    progress = StartProgress(lambda: next(clock))
    with caplog.at_level(logging.INFO, "pdserve.protocol.start_progress"):
        progress.enter("weights")
        progress.report(1, 4)
        progress.report(2, 4)
        progress.enter("kv_memory")
        progress.finish()
    assert [record.message for record in caplog.records] == [
        "start: loading weights",
        "start: loading weights: 0.0 of 0.0 GB (50 %) after 6 s",
        "start: allocating KV memory",
        "started; seconds: weights 19.0, kv_memory 1.0",
    ]
    assert progress.now == Progress("connection")
