"""From what workers pushed to what Serve is asked for, without Ray: workers, counts and clock are
made by hand."""

import asyncio
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from router import workers
from router.workers import made
from support.clock import Clock
from support.waiting import until_async

from pdserve.cluster.scaling import autoscaler
from pdserve.cluster.scaling.autoscaler import Autoscaler
from pdserve.configs.schema import ClusterConfig
from pdserve.router.admin import CannotScale, Count
from pdserve.router.fleet.worker_state import WorkerState

BOUNDS = {"autoscaling": {"min": 1, "max": 4, "up_delay_s": 3, "down_delay_s": 10}}


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues stay as they were reported."""
    clock = Clock()
    for module in (autoscaler, workers):
        monkeypatch.setattr(module, "time", clock)


class FakeCounts:
    def __init__(self, **targets: int) -> None:
        self.targets = targets
        self.running = dict(targets)
        self.broken = False
        self.refuses = False
        self.num_asked = 0

    async def get(self) -> dict[str, Count]:
        self.num_asked += 1
        if self.broken:
            raise ConnectionError("the controller is gone")
        return {
            key: Count(target=self.targets[key], running=self.running[key]) for key in self.targets
        }

    async def set(self, targets: Mapping[str, int]) -> list[str]:
        if self.refuses:
            raise CannotScale("external_scaler_enabled")
        self.targets |= targets
        return []


class Stage:
    def __init__(self, *workers: WorkerState, **config: Any) -> None:
        fleet: Any = SimpleNamespace(workers=list(workers))
        self.fleet = fleet
        ids = [worker.worker_id for worker in workers]
        self.counts = FakeCounts(
            prefill=sum(i.startswith("Prefill") for i in ids),
            decode=sum(i.startswith("Decode") for i in ids),
        )
        self.now = 0.0
        self.first = True
        tree = ClusterConfig.model_validate({"prefill": BOUNDS, "decode": BOUNDS, **config})
        self.scaler = Autoscaler(fleet, self.counts, tree, lambda: self.first, lambda: self.now)

    async def seconds(self, count: int) -> dict[str, int]:
        for _ in range(count):
            await self.scaler.look()
            self.now += 1.0
        return self.counts.targets


async def test_a_prefill_queue_brings_prefill_workers() -> None:
    """10,000 tokens a second: 8,000 tokens are 800 ms, the target is 500."""
    stage = Stage(
        made("Prefill#a", "prefill", queue_tokens=8000),
        made("Decode#b", "decode"),
        slo={"ttft_ms": 1000},
    )
    assert await stage.seconds(3) == {"prefill": 1, "decode": 1}
    assert await stage.seconds(1) == {"prefill": 2, "decode": 1}
    assert await stage.seconds(30) == {"prefill": 2, "decode": 1}, "one is on its way"


async def test_token_intervals_bring_decode_workers() -> None:
    stage = Stage(
        made("Prefill#a", "prefill"),
        made("Decode#b", "decode", token_interval_s=0.030, num_running=20),
        slo={"tpot_ms": 20},
    )
    assert await stage.seconds(4) == {"prefill": 1, "decode": 2}


async def test_roles_are_what_counts() -> None:
    """A worker of Decode prefills: the queue is two workers', and the one that decodes is alone."""
    workers = [
        made("Prefill#a", "prefill", queue_tokens=3000),
        made("Decode#b", "prefill", queue_tokens=3000),
        made("Decode#c", "decode", num_running=3),
    ]
    config = {"decode": {"replicas": 2, "autoscaling": {**BOUNDS["autoscaling"], "sequences": 2}}}
    stage = Stage(*workers, slo={"ttft_ms": 1000}, **config)
    assert await stage.seconds(4) == {"prefill": 1, "decode": 3}


async def test_what_is_idle_goes_and_what_drains_is_left_alone() -> None:
    workers = [
        made(f"{name}#{i}", name.lower()) for name in ("Prefill", "Decode") for i in range(2)
    ]
    parts = {key: {"replicas": 2, **BOUNDS} for key in ("prefill", "decode")}
    stage = Stage(*workers, **parts)
    workers[3].left_at = 1.0
    assert await stage.seconds(11) == {"prefill": 1, "decode": 2}
    workers[3].left_at = None
    assert await stage.seconds(11) == {"prefill": 1, "decode": 1}


async def test_without_room_it_goes_on_deciding() -> None:
    """The third worker of three never comes; when there is no load, the second goes too."""
    workers = [*(made(f"Prefill#{i}", "prefill") for i in range(2)), made("Decode#b", "decode")]
    stage = Stage(*workers, prefill={"replicas": 2, **BOUNDS})
    stage.counts.targets["prefill"] = 3
    assert await stage.seconds(60) == {"prefill": 3, "decode": 1}
    assert await stage.seconds(1) == {"prefill": 1, "decode": 1}


async def test_the_controller_is_asked_every_few_seconds_and_before_a_decision() -> None:
    stage = Stage(
        made("Prefill#a", "prefill", queue_tokens=8000),
        made("Decode#b", "decode"),
        slo={"ttft_ms": 1000},
        prefill={},
    )
    await stage.seconds(20)
    assert stage.counts.num_asked == 4
    stage = Stage(
        made("Prefill#a", "prefill", queue_tokens=8000),
        made("Decode#b", "decode"),
        slo={"ttft_ms": 1000},
    )
    await stage.seconds(3)
    stage.counts.targets["prefill"] = 4  # by hand, just now
    assert await stage.seconds(10) == {"prefill": 4, "decode": 1}


@pytest.mark.parametrize("max_prefill", [1, 4])
async def test_it_never_stops_the_only_worker_that_decodes(max_prefill: int) -> None:
    """Roles were exchanged: of two idle workers of Prefill Serve might stop the one that
    decodes."""
    workers = [
        made("Prefill#1", "decode"),
        made("Prefill#2", "prefill"),
        made("Decode#1", "prefill"),
    ]
    bounds = {"autoscaling": {**BOUNDS["autoscaling"], "max": max_prefill}}
    stage = Stage(*workers, prefill=bounds)
    assert await stage.seconds(40) == {"prefill": 2, "decode": 1}
    stage.fleet.workers.append(made("Prefill#3", "decode"))
    stage.counts.targets["prefill"] = stage.counts.running["prefill"] = 3
    assert (await stage.seconds(40))["prefill"] == 2


async def test_aggregated_workers_follow_their_own_queue() -> None:
    stage = Stage(made("Decode#b", "both", queue_tokens=9000), mode="aggregated")
    assert await stage.seconds(4) == {"prefill": 0, "decode": 2}


async def test_only_the_first_router_decides_and_no_error_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(autoscaler, "PERIOD_S", 0.01)
    bounds = {"autoscaling": {**BOUNDS["autoscaling"], "up_delay_s": 0}}
    stage = Stage(made("Decode#b", "both", queue_tokens=1 << 30), mode="aggregated", decode=bounds)
    stage.first = False
    stage.counts.broken = True
    stage.scaler.start()
    await asyncio.sleep(0.1)
    stage.counts.broken = False
    await asyncio.sleep(0.1)
    assert stage.counts.targets["decode"] == 1
    stage.first = True
    stage.counts.broken = True
    await asyncio.sleep(0.1)
    stage.counts.broken = False
    await until_async(lambda: stage.counts.targets["decode"] > 1)
    stage.scaler.stop()


async def test_without_bounds_nothing_runs() -> None:
    stage = Stage(made("Decode#b", "both"), mode="aggregated", decode={"replicas": 1})
    stage.scaler.start()
    assert stage.scaler._task is None


async def test_a_cluster_that_cannot_be_scaled_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(autoscaler, "PERIOD_S", 0.01)
    monkeypatch.setattr(autoscaler, "logger", logging.getLogger("of_the_test"))
    bounds = {"autoscaling": {**BOUNDS["autoscaling"], "up_delay_s": 0}}
    stage = Stage(made("Decode#b", "both", queue_tokens=1 << 30), mode="aggregated", decode=bounds)
    stage.counts.refuses = True
    stage.scaler.start()
    await until_async(lambda: caplog.records)
    await asyncio.sleep(0.1)  # it may not say it again
    assert [record.message for record in caplog.records] == [
        "autoscaling stops: external_scaler_enabled"
    ]
