"""Routers hear of a worker's pace and load, and a worker uses the times in a Submit."""

import itertools
import time
from pathlib import Path

import pytest
from engine.harness import paper_engine
from support.pair import ROUTER, SESSION, prompt_of

from pdserve.configs.router import SloConfig
from pdserve.configs.schema import ClusterConfig
from pdserve.configs.transfer import TransferConfig
from pdserve.protocol.commands import Command, Start, Submit, Subscribe
from pdserve.protocol.events import Event, EventBatch, Load, Snapshot
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.worker import load_report
from pdserve.worker.load_report import LoadReport
from pdserve.worker.loop import WorkerLoop
from pdserve.worker.metrics import WorkerMetrics

SLO = SloConfig(ttft_ms=500, tpot_ms=25)
_names = itertools.count()


class Served:
    """A worker without a connector that runs an engine on paper."""

    def __init__(self, folder: Path, slo: SloConfig | None = SLO) -> None:
        self.engine = paper_engine(folder, slo=slo, num_kv_blocks=300)
        self.events: list[Event] = []
        self.loop = WorkerLoop(
            self.engine,
            WorkerMetrics(self.engine),
            TransferConfig(),
            "both",
            "w",
            1,
            None,
            None,
            self._sent,
        )
        self.do(Subscribe(router_id=ROUTER, session=SESSION))

    def _sent(self, target: str, batch: EventBatch) -> None:
        self.events += batch.events

    def do(self, command: Command) -> None:
        self.loop.handle(command)
        self.loop.turn()

    def submit(self, length: int, max_tokens: int = 50, **more: object) -> Submit:
        more.setdefault("starts", (Start(0),))
        command = Submit(
            key=RequestKey(ROUTER, SESSION, str(next(_names))),
            phase="full",
            prompt_token_ids=tuple(prompt_of(length)),
            sampling=SamplingParams(temperature=0, seed=0, max_tokens=max_tokens, ignore_eos=True),
            **more,  # type: ignore[arg-type]
        )
        self.do(command)
        return command

    def last(self, kind: type[Snapshot] | type[Load]) -> Snapshot | Load:
        return [event for event in self.events if isinstance(event, kind)][-1]


def test_a_snapshot_has_the_pace(tiny_llama: Path) -> None:
    worker = Served(tiny_llama)
    for _ in range(3):
        worker.submit(140)
    for _ in range(30):
        worker.loop.turn()
    pace = worker.loop.snapshot().pace
    assert pace is not None
    assert pace.tpot_ms == 25 and pace.base_step_ms > 0 and pace.row_ms >= 0
    assert pace.prompt_tokens_per_s > 0


def test_without_a_pace_none_is_told(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_report, "PERIOD_S", 0.0)
    worker = Served(tiny_llama, slo=None)
    for _ in range(5):
        worker.submit(40)
    assert worker.loop.snapshot().pace is None
    assert not any(isinstance(event, Load) for event in worker.events)


def test_a_load_comes_when_much_has_changed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_report, "PERIOD_S", 0.0)
    worker = Served(tiny_llama)
    worker.submit(30)
    assert not any(isinstance(event, Load) for event in worker.events), "one is not much"
    worker.submit(30)
    load = worker.last(Load)
    assert isinstance(load, Load) and load.num_running == 2 and load.pace is not None


def test_a_report_tells_since_when_no_command_was_read(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_report, "PERIOD_S", 0.0)
    worker = Served(tiny_llama)
    worker.submit(30)
    step = worker.engine.step

    def slow_step(**how: bool) -> object:
        time.sleep(0.05)
        return step(**how)

    monkeypatch.setattr(worker.engine, "step", slow_step)
    for _ in range(3):
        worker.submit(400)
    load = worker.last(Load)
    assert isinstance(load, Load) and 0.05 <= load.unread_s < 5


def test_a_report_compares_with_what_was_heard() -> None:
    report = LoadReport()
    assert report.is_due(5.0) and not report.is_due(5.05) and report.is_due(5.11)
    report.told(3000, 40)

    def changed(queue_tokens: int, num_running: int) -> bool:
        load = Load(queue_tokens=queue_tokens, num_running=num_running, num_waiting=0, pace=None)
        return report.has_changed(load)

    assert not changed(4024, 44) and changed(4025, 44) and changed(1900, 40)
    assert changed(3000, 45) and changed(3000, 35)
    report.told(0, 1)
    assert not changed(0, 2) and changed(0, 3)


def test_the_times_of_a_submit_are_anchored_here(tiny_llama: Path) -> None:
    worker = Served(tiny_llama)
    before = time.monotonic()
    command = worker.submit(20, waited_ms=3000.0, starts=(Start(0, (5, 6), 700.0), Start(1, (7,))))
    after = time.monotonic()
    request = worker.engine._requests._requests[command.key]
    assert before - 3.1 <= request.called_at <= after - 3.0
    first, second = (seq.first_token_at for seq in request.sequences)
    assert first is not None and before - 0.8 <= first <= after - 0.7
    assert second is None, "nobody said"


def test_the_promise_reaches_the_worker() -> None:
    cluster = ClusterConfig.model_validate({"slo": {"ttft_ms": 700, "tpot_ms": 9}})
    assert cluster.worker("decode").slo == cluster.worker("prefill").slo == cluster.slo
