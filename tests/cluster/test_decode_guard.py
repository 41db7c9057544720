"""A cluster in which nobody decodes any more gets a decoder, and only then: workers and the clock
are made by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
from router.workers import made

from pdserve.cluster.scaling.decode_guard import AGAIN_S, NONE_S, DecodeGuard
from pdserve.protocol.commands import SetRole
from pdserve.router.fleet.worker_state import WorkerState


class Stage:
    def __init__(self, *workers: WorkerState) -> None:
        self.posted: list[tuple[str, str]] = []
        fleet: Any = SimpleNamespace(workers=list(workers), post=self.post)
        self.fleet = fleet
        self.now = 0.0
        self.first = True
        self.guard = DecodeGuard(fleet, lambda: self.first, lambda: self.now)

    def post(self, worker: WorkerState, command: SetRole) -> None:
        """The worker has it at once."""
        self.posted.append((worker.worker_id, command.role))
        place = self.fleet.workers.index(worker)
        self.fleet.workers[place] = made(worker.worker_id, command.role)

    def seconds(self, count: float) -> list[tuple[str, str]]:
        """Lets this many seconds pass, and returns what was posted meanwhile."""
        for _ in range(int(count)):
            self.guard.look()
            self.now += 1.0
        posted = self.posted
        self.posted = []
        return posted


def test_without_a_decoder_the_least_loaded_worker_helps_until_another_comes() -> None:
    stage = Stage(made("Prefill#a", "prefill", queue_tokens=500), made("Decode#b", "prefill"))
    assert stage.seconds(NONE_S) == []
    assert stage.seconds(1) == [("Decode#b", "both")]
    assert stage.seconds(600) == []
    stage.fleet.workers.append(made("Decode#c", "decode"))
    assert stage.seconds(AGAIN_S) == []
    assert stage.seconds(1) == [("Decode#b", "prefill")]
    assert stage.seconds(600) == []


def test_a_decoder_that_is_back_in_time_changes_no_role() -> None:
    stage = Stage(made("Prefill#a", "prefill"))
    assert stage.seconds(NONE_S - 2) == []
    stage.fleet.workers.append(made("Decode#c", "decode"))
    assert stage.seconds(5) == []
    stage.fleet.workers.pop()
    assert stage.seconds(NONE_S) == [], "it is counted anew"


def test_a_draining_decoder_is_none_and_a_dead_helper_is_replaced() -> None:
    stage = Stage(made("Prefill#a", "prefill"), made("Decode#b", "decode"))
    stage.fleet.workers[1].left_at = 1.0
    assert stage.seconds(NONE_S + 1) == [("Prefill#a", "both")]
    stage.fleet.workers = [made("Prefill#d", "prefill")]
    assert stage.seconds(NONE_S + 1) == [("Prefill#d", "both")]


@pytest.mark.parametrize("role", ["both", "decode"])
def test_what_an_operator_chose_is_left_alone(role: str) -> None:
    stage = Stage(made("Prefill#a", role), made("Decode#b", "decode"))
    assert stage.seconds(100) == []
    stage = Stage(made("Prefill#a", "prefill"), made("Prefill#z", "prefill"))
    assert stage.seconds(NONE_S + 1) == [("Prefill#a", "both")]
    stage.fleet.workers[0] = made("Prefill#a", "decode")
    stage.fleet.workers.append(made("Decode#c", "decode"))
    assert stage.seconds(100) == []


def test_other_routers_and_empty_clusters_do_nothing() -> None:
    stage = Stage(made("Prefill#a", "prefill"))
    stage.first = False
    assert stage.seconds(100) == []
    stage.first = True
    assert stage.seconds(NONE_S) == []
    assert Stage().seconds(100) == []
