"""Background tasks: what they raise is logged and counted, and those that are kept go on."""

import asyncio
import logging
import re
from pathlib import Path

import pytest
from support.failures import counts

import pdserve
from pdserve.background import tasks
from pdserve.background.tasks import FAILURES, failed, keep, once

# Tasks that are no background: somebody awaits each of them, and gets what it raises.
AWAITED = {
    "background/tasks.py",
    "bench/load.py",
    "cluster/client.py",
    "cluster/deployments/engine_start.py",
    "cluster/deployments/rank_pings.py",
    "cluster/deployments/router_replica.py",
    "cluster/deployments/worker_replica.py",
    "plan/simulation/scene.py",
    "router/http/client_watch.py",
    "router/request/generation.py",
}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)


def count(name: str) -> float:
    return counts(FAILURES)[name]


def test_nothing_runs_in_the_background_but_by_this_module() -> None:
    root = Path(pdserve.__file__).parent
    starts = re.compile(r"\b(create_task|ensure_future)\(")
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if starts.search(path.read_text())
    }
    assert found == AWAITED


async def test_a_kept_task_goes_on_after_errors_and_each_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    went_on = asyncio.Event()
    runs: list[int] = []

    async def run() -> None:
        runs.append(len(runs))
        if len(runs) < 4:
            raise KeyError(f"run {len(runs)}")
        went_on.set()
        await asyncio.Event().wait()

    task = keep("kept", run)
    assert count("kept") == 0, "there before the first failure"
    await asyncio.wait_for(went_on.wait(), 60)
    assert runs == [0, 1, 2, 3] and count("kept") == 3 and not task.done()
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 3 and all(
        "background task kept failed" in record.message for record in errors
    )
    assert "KeyError: 'run 2'" in caplog.text and "in run" in caplog.text, "with its traceback"
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() and count("kept") == 3


async def test_a_kept_task_ends_when_it_returns() -> None:
    async def run() -> None:
        pass

    await asyncio.wait_for(keep("returns", run), 60)
    assert count("returns") == 0


async def test_a_pause_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 3600.0)
    failing = asyncio.Event()

    async def run() -> None:
        failing.set()
        raise ValueError

    task = keep("pauses", run, longest_pause_s=3600.0)
    await failing.wait()
    task.cancel()
    await asyncio.wait_for(asyncio.wait({task}), 60)
    assert task.cancelled()


async def test_what_is_awaited_may_be_cancelled_without_the_task() -> None:
    """A cancelled future raises CancelledError in whoever awaits it: that is an error like
    others."""
    went_on = asyncio.Event()

    async def run() -> None:
        if not count("elsewhere"):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
        went_on.set()

    await asyncio.wait_for(keep("elsewhere", run), 60)
    assert went_on.is_set() and count("elsewhere") == 1


@pytest.mark.parametrize(
    ("steady_s", "expected"), [(3600.0, [1, 2, 4, 5, 5]), (0.0, [1, 1, 1, 1, 1])]
)
async def test_pauses_grow_up_to_a_bound_and_are_short_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, steady_s: float, expected: list[float]
) -> None:
    pauses: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        """Only the task of this test is looked at: threads of Ray sleep by asyncio, too."""
        task = asyncio.current_task()
        if task is None or task.get_name() != "grows":
            return await real_sleep(seconds)
        pauses.append(seconds)

    async def run() -> None:
        if len(pauses) < 5:
            raise ValueError

    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(tasks, "STEADY_S", steady_s)
    monkeypatch.setattr(tasks.asyncio, "sleep", sleep)
    await keep("grows", run, longest_pause_s=5.0)
    assert pauses == expected


async def test_an_error_ends_what_runs_once(caplog: pytest.LogCaptureFixture) -> None:
    async def work(error: Exception | None) -> None:
        if error is not None:
            raise error

    for error in (None, OSError("disk")):
        task = once("single", work(error))
        await asyncio.wait({task})
        await asyncio.sleep(0)
    assert count("single") == 1 and "OSError: disk" in caplog.text
    cancelled = once("single", asyncio.sleep(3600))
    cancelled.cancel()
    await asyncio.wait({cancelled})
    failed("single", ValueError("told by hand"))
    assert count("single") == 2
