"""Shortcuts for thousands of workers do not change choices in small clusters.

The shortcuts: pairs are looked at only when one may be due, speeds are those of an even sample, and
a P needs only its first D.
"""

import random
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.clock import Clock

from pdserve.protocol.commands import Command, ConnectPeer
from pdserve.protocol.events import PeerStatus
from pdserve.router.choosing.choose import any_connected, connected
from pdserve.router.choosing.predict import ASSUMED_TOKENS_PER_S, Predictor
from pdserve.router.fleet.peers import FIRST_RETRY_S, LAST_RETRY_S, Introducer
from pdserve.router.fleet.worker_state import WorkerState


class Paper:
    """A worker as an introducer sees it."""

    def __init__(self, name: str, can_prefill: bool, can_decode: bool) -> None:
        self.worker_id = name
        self.can_prefill, self.can_decode = can_prefill, can_decode
        self.draining = False
        self.hands_over = True
        self.kv_cache: Any = SimpleNamespace(engine_id=name, incarnation=1)
        self.hello = SimpleNamespace(model_fingerprint="m")
        self.reach: set[str] = set()
        self.num_looks = 0

    def is_connected_to(self, prefill: "Paper") -> bool:
        self.num_looks += 1
        return prefill.worker_id in self.reach


class World:
    def __init__(self, num_prefills: int, num_decodes: int) -> None:
        self.clock = Clock()
        self.asked: list[tuple[str, str]] = []
        self.introducer = Introducer(self._send, self.clock)
        self.workers = [Paper(f"p{i}", True, False) for i in range(num_prefills)]
        self.workers += [Paper(f"d{i}", False, True) for i in range(num_decodes)]

    def _send(self, worker: WorkerState, command: Command) -> None:
        assert isinstance(command, ConnectPeer)
        self.asked.append((worker.worker_id, command.meta.engine_id))

    @property
    def states(self) -> list[WorkerState]:
        return cast(list[WorkerState], self.workers)

    def introduce(self) -> list[tuple[str, str]]:
        """Who is asked now."""
        self.asked = []
        self.introducer.introduce(self.states)
        return self.asked

    def answer(self, decode: int, prefill: int, is_connected: bool) -> None:
        name = f"p{prefill}"
        worker = next(w for w in self.workers if w.worker_id == f"d{decode}")
        if is_connected:
            worker.reach.add(name)
        status = PeerStatus(engine_id=name, incarnation=1, connected=is_connected)
        self.introducer.reported(cast(WorkerState, worker), status)

    def num_looks(self) -> int:
        return sum(worker.num_looks for worker in self.workers)


def test_pairs_are_looked_at_when_one_may_be_due() -> None:
    world = World(2, 2)
    assert len(world.introduce()) == 4
    world.answer(0, 0, True)
    world.answer(0, 1, True)
    world.answer(1, 0, True)
    world.answer(1, 1, False)
    looks = world.num_looks()
    assert world.introduce() == [] and world.num_looks() == looks
    world.clock.seconds += FIRST_RETRY_S
    assert world.introduce() == [("d1", "p1")]
    world.answer(1, 1, True)
    world.clock.seconds += 10 * LAST_RETRY_S
    world.introduce()  # the question that was open may look once more
    looks = world.num_looks()
    for _ in range(5):
        world.clock.seconds += LAST_RETRY_S
        assert world.introduce() == []
    assert world.num_looks() == looks


def test_an_answer_that_never_comes_is_asked_for_again() -> None:
    world = World(1, 1)
    assert world.introduce() == [("d0", "p0")]
    world.clock.seconds += LAST_RETRY_S - 1
    assert world.introduce() == []
    world.clock.seconds += 1
    assert world.introduce() == [("d0", "p0")]


def test_who_joins_meets_the_others_and_nobody_else_does() -> None:
    world = World(2, 2)
    world.introduce()
    world.asked = []
    late = Paper("p9", True, False)
    world.workers.append(late)
    world.introducer.joined(cast(WorkerState, late), world.states)
    assert world.asked == [("d0", "p9"), ("d1", "p9")]
    both = Paper("b", True, True)
    world.asked = []
    world.workers.append(both)
    world.introducer.joined(cast(WorkerState, both), world.states)
    assert sorted(world.asked) == [("b", "p0"), ("b", "p1"), ("b", "p9"), ("d0", "b"), ("d1", "b")]


def test_a_changed_role_is_looked_at_at_once() -> None:
    world = World(1, 2)
    world.introduce()
    world.workers[1].can_prefill = True
    assert world.introduce() == []
    world.introducer.changed()
    assert world.introduce() == [("d1", "d0")]


def _with_speeds(speeds: list[float]) -> list[WorkerState]:
    found = [
        SimpleNamespace(
            snapshot=SimpleNamespace(prefill_tokens_per_s=speed, is_prefill_speed_vague=False),
            pace=None,
            can_decode=True,
        )
        for speed in speeds
    ]
    return cast(list[WorkerState], found)


@pytest.mark.parametrize("count", [1, 2, 7, 64, 127])
def test_small_clusters_take_the_median_of_all(count: int) -> None:
    draw = random.Random(count)
    speeds = [draw.choice([0.0, draw.uniform(1e4, 5e4)]) for _ in range(count)]
    predictor = Predictor(_with_speeds(speeds), None, 100, 0.0)
    measured = [speed for speed in speeds if speed]
    assert predictor.is_measured == bool(measured)
    assert predictor._typical == (median(measured) if measured else ASSUMED_TOKENS_PER_S)


def test_large_clusters_take_a_sample_or_whoever_has_measured() -> None:
    draw = random.Random(1)
    speeds = [draw.uniform(3.9e4, 4.1e4) for _ in range(10_000)]
    assert Predictor(_with_speeds(speeds), None, 100, 0.0)._typical == pytest.approx(4e4, rel=0.02)
    lone = [0.0] * 1001
    lone[1] = 3e4  # between two that are looked at
    predictor = Predictor(_with_speeds(lone), None, 100, 0.0)
    assert predictor.is_measured and predictor._typical == 3e4


def test_a_prefill_worker_counts_as_connected_as_before() -> None:
    world = World(3, 4)
    world.answer(2, 0, True)
    world.answer(3, 1, True)
    world.answer(0, 1, True)
    *prefills, alone = world.states[:3]
    decodes = world.states[3:]
    for prefill in (*prefills, alone):
        assert any_connected(prefill, decodes) == bool(connected(prefill, decodes))
    assert not any_connected(alone, decodes)
