"""The load of workers' experts as a router gathers it: whom it asks, what it adds, and what it says
where there is nothing to add."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from router.fake_worker import FakeWorker
from router.harness import Harness, settle, until

from pdserve.protocol.commands import AskExpertLoad
from pdserve.router import expert_load
from pdserve.router.errors import ApiError
from pdserve.router.expert_load import ExpertLoadReport, gather_load

Make = Callable[..., Harness]


def asked(*workers: FakeWorker) -> list[int]:
    """Returns how often each worker was asked."""
    return [sum(isinstance(c, AskExpertLoad) for c in worker.commands) for worker in workers]


@pytest.fixture
async def harness(make: Make) -> Harness:
    harness = await make(1, 2).start()
    harness.prefills[0].expert_rows = {1: (5, 0, 0), 4: (1, 2, 1 << 40)}
    harness.decodes[0].expert_rows = {1: (1, 1, 0), 4: (0, 0, 0)}
    harness.decodes[1].expert_rows = {1: (0, 2, 0), 4: (0, 9, 1)}
    return harness


async def refused(harness: Harness, status: int, *words: str, role: str = "") -> None:
    with pytest.raises(ApiError) as caught:
        await gather_load(harness.fleet, role)
    message = caught.value.message
    assert caught.value.status == status and all(word in message for word in words), message


async def test_the_counts_of_the_asked_workers_are_added(harness: Harness) -> None:
    workers = (*harness.prefills, *harness.decodes)
    assert await gather_load(harness.fleet) == ExpertLoadReport(
        workers=["d0", "d1", "p0"], layers={1: [6, 3, 0], 4: [1, 11, (1 << 40) + 1]}
    )
    assert asked(*workers) == [1, 1, 1]
    assert await gather_load(harness.fleet, "decode") == ExpertLoadReport(
        workers=["d0", "d1"], layers={1: [1, 3, 0], 4: [0, 9, 1]}
    )
    assert asked(*workers) == [1, 2, 2]
    assert not any(worker.load_questions for worker in harness.fleet.workers)


async def test_questions_at_the_same_time_each_get_an_answer(harness: Harness) -> None:
    reports = await asyncio.gather(
        gather_load(harness.fleet),
        gather_load(harness.fleet, "prefill"),
        gather_load(harness.fleet),
    )
    assert [report.workers for report in reports] == [
        ["d0", "d1", "p0"],
        ["p0"],
        ["d0", "d1", "p0"],
    ]
    assert reports[0] == reports[2]


async def test_a_worker_that_leaves_is_not_asked(harness: Harness) -> None:
    [leaver] = [worker for worker in harness.fleet.workers if worker.worker_id == "d1"]
    harness.fleet.expect_leg(leaver)  # it stays here while it drains
    harness.fleet.leave("d1")
    assert (await gather_load(harness.fleet, "decode")).workers == ["d0"]
    assert asked(*harness.decodes) == [1, 0]
    harness.fleet.unexpect_leg(leaver)


async def test_a_role_that_no_worker_has(harness: Harness, make: Make) -> None:
    await refused(harness, 404, "no worker has the role both", "p0 (prefill)", role="both")
    await refused(harness, 400, "must be prefill, decode or both, not 'all'", role="all")
    await refused(make(0, 0), 503, "no worker is connected")


async def test_a_model_without_experts(make: Make) -> None:
    harness = await make(1, 1).start()
    await refused(harness, 409, "the model has no experts", "expert_load_file is not needed")


async def test_experts_that_received_nothing(harness: Harness) -> None:
    for worker in harness.decodes:
        worker.expert_rows = {1: (0, 0, 0), 4: (0, 0, 0)}
    await refused(harness, 409, "d0, d1", "let the cluster serve a typical load", role="decode")


@pytest.mark.parametrize("rows", [{}, {1: (5, 0, 0)}, {1: (5, 0), 4: (1, 2)}])
async def test_counts_that_do_not_fit_together(
    harness: Harness, rows: dict[int, tuple[int, ...]]
) -> None:
    harness.prefills[0].expert_rows = rows
    await refused(harness, 409, "d0, d1, p0 serve different models", "of one role")


async def test_counts_of_two_models_are_not_added(make: Make) -> None:
    harness = make(0, 1)
    harness.decodes[0].fingerprint = "another model"
    await harness.start()
    other = harness.add("d1", "decode")
    await until(lambda: len(harness.fleet.workers) == 2)
    for worker in (harness.decodes[0], other):
        worker.expert_rows = {0: (1, 2)}
    await refused(harness, 409, "d0, d1 serve different models")


async def test_a_worker_that_does_not_answer_is_named(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_load, "ANSWER_S", 0.05)
    harness.decodes[1].mute = True
    await refused(harness, 503, "d1 did not answer within 0.05 s", "version")
    harness.decodes[1].mute = False


async def test_a_late_answer_is_not_taken_for_that_to_a_later_question(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    d1 = harness.decodes[1]
    delays = [0.2, 0.0]
    d1.send_delay = lambda command: delays.pop(0) if isinstance(command, AskExpertLoad) else 0.0
    monkeypatch.setattr(expert_load, "ANSWER_S", 0.05)
    await refused(harness, 503, "d1 did not answer", role="decode")
    monkeypatch.undo()
    d1.expert_rows = {1: (0, 3, 0), 4: (0, 10, 1)}
    report = await gather_load(harness.fleet, "decode")
    assert report.layers == {1: [1, 4, 0], 4: [0, 10, 1]}
    [worker] = [worker for worker in harness.fleet.workers if worker.worker_id == "d1"]
    assert not worker.load_questions


async def test_an_answer_that_nobody_asked_for_is_dropped(harness: Harness) -> None:
    [worker] = [worker for worker in harness.fleet.workers if worker.worker_id == "d1"]
    for _ in range(2):
        command = AskExpertLoad(router_id=harness.fleet.router_id, session=worker.session)
        await harness.decodes[1].send(command)
    await settle()
    report = await gather_load(harness.fleet, "decode")
    assert report.layers == {1: [1, 3, 0], 4: [0, 9, 1]}
    assert worker in harness.fleet.workers


async def test_a_worker_that_is_lost_meanwhile(harness: Harness) -> None:
    harness.decodes[1].mute = True
    question: asyncio.Task[Any] = asyncio.create_task(gather_load(harness.fleet))
    await settle()
    [worker] = [worker for worker in harness.fleet.workers if worker.worker_id == "d1"]
    harness.fleet._lose(worker, "is gone")
    with pytest.raises(ApiError, match="d1 was lost before it answered; see `pdserve workers`"):
        async with asyncio.timeout(5):
            await question
