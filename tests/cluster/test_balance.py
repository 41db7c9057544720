"""Slow change: which worker changes its role, when, and that roles do not swing. Workers and the
clock are made by hand."""

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from router.workers import made

from pdserve.cluster.scaling import balancer
from pdserve.cluster.scaling.autoscaler import load_of
from pdserve.cluster.scaling.balance import AGAIN_S, SUSTAINED_S, Balance, Member
from pdserve.cluster.scaling.balancer import Balancer
from pdserve.configs.schema import ClusterConfig
from pdserve.protocol.commands import SetRole
from pdserve.protocol.events import PaceState
from pdserve.router.choosing.predict import Predictor
from pdserve.router.choosing.split_gain import LEAST_PROMPTS, WINDOW_S, SplitGain
from pdserve.router.fleet.worker_state import WorkerState

Demands = Callable[[int], tuple[float, float]]


class Side:
    """A cluster of so many workers, whose roles follow at once. Time is in seconds."""

    def __init__(self, num_prefill: int, num_decode: int) -> None:
        self.roles = {f"p{i}": "prefill" for i in range(num_prefill)}
        self.roles |= {f"d{i}": "decode" for i in range(num_decode)}
        self.changed: dict[str, float] = {}
        self.changes: list[tuple[int, str, str]] = []
        self.balance = Balance()
        self.fixed: set[str] = set()

    def members(self, now: float) -> list[Member]:
        return [
            Member(name, role, name not in self.fixed, now - since if since is not None else None)
            for name, role in self.roles.items()
            for since in (self.changed.get(name),)
        ]

    def run(self, seconds: int, demands: Demands) -> list[tuple[int, str, str]]:
        for now in range(seconds):
            change = self.balance.decide(self.members(now), *demands(now), now)
            if change is not None:
                self.roles[change.worker] = change.role
                self.changed[change.worker] = now
                self.changes.append((now, change.worker, change.role))
        return self.changes

    def count(self, role: str) -> int:
        return sum(value == role for value in self.roles.values())


def steady(prefill: float, decode: float) -> Demands:
    return lambda now: (prefill, decode)


def test_a_lasting_lack_of_either_kind_moves_one_worker_after_a_minute() -> None:
    assert Side(1, 3).run(int(SUSTAINED_S) + 1, steady(1.5, 1.0)) == [
        (int(SUSTAINED_S), "d0", "prefill")
    ]
    assert Side(3, 1).run(int(SUSTAINED_S) + 1, steady(1.0, 1.5)) == [
        (int(SUSTAINED_S), "p0", "decode")
    ]


@pytest.mark.parametrize(
    ("workers", "demand"),
    [
        ((1, 3), (0.9, 0.5)),  # neither lacks
        ((1, 3), (9.0, 3.5)),  # both do
        ((1, 3), (9.0, 1.4)),  # two decode workers would be too few
        ((1, 1), (9.0, 0.0)),  # never below one decoder
        ((1, 1), (0.0, 9.0)),
    ],
)
def test_nothing_moves(workers: tuple[int, int], demand: tuple[float, float]) -> None:
    assert Side(*workers).run(1000, steady(*demand)) == []


def test_a_lull_counts_anew() -> None:
    assert Side(1, 3).run(2000, lambda now: (0.0 if now % 59 == 0 else 9.0, 0.0)) == []


def test_after_a_change_nothing_moves_for_five_minutes() -> None:
    changes = Side(1, 5).run(1000, steady(9.0, 0.1))
    moments = [now for now, _, _ in changes]
    assert len(moments) == 4 and moments[0] == SUSTAINED_S
    assert all(later - now >= AGAIN_S for now, later in pairwise(moments))


def test_what_an_operator_chose_is_left_alone() -> None:
    side = Side(1, 3)
    side.fixed = {"d0", "d2"}
    assert side.run(1000, steady(9.0, 0.1))[0][1] == "d1" and side.roles["d0"] == "decode"
    side = Side(1, 3)
    side.fixed = {"d0", "d1", "d2"}
    assert side.run(1000, steady(9.0, 0.1)) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("half_s", [10, 45, 90, 200, 400, 1500])
@pytest.mark.parametrize("workers", [(1, 3), (2, 2), (3, 3), (2, 6)])
def test_square_waves_do_not_make_roles_swing(half_s: int, workers: tuple[int, int]) -> None:
    """The bottleneck is prefill and decode in turn: four hours of it."""
    total = sum(workers)
    high, low = 0.65 * total, 0.1 * total
    hours = 4 * 3600
    side = Side(*workers)
    changes = side.run(hours, lambda now: (high, low) if now // half_s % 2 == 0 else (low, high))
    assert len(changes) <= hours / AGAIN_S
    if half_s < SUSTAINED_S:
        assert not changes
    assert side.count("decode") >= 1 and side.count("prefill") >= 1


@pytest.mark.parametrize("shares", [(0.3, 0.5), (0.6, 0.3), (0.2, 0.75), (0.45, 0.45), (0.95, 0.9)])
def test_a_steady_load_reaches_a_mix_of_roles_and_stays(shares: tuple[float, float]) -> None:
    for workers in ((1, 7), (4, 4), (7, 1)):
        side = Side(*workers)
        changes = side.run(2 * 3600, steady(8 * shares[0], 8 * shares[1]))
        roles = {role for _, _, role in changes}
        assert len(changes) <= 6 and len(roles) <= 1, "never to and fro"


# --- the hook in the first router ---

PACE = PaceState(tpot_ms=10.0, base_step_ms=4.0, row_ms=0.05, prompt_tokens_per_s=9000.0)
REST = PaceState(tpot_ms=10.0, base_step_ms=0.0, row_ms=0.05, prompt_tokens_per_s=9900.0)


class Stage:
    def __init__(self, *workers: WorkerState, **config: Any) -> None:
        self.posted: list[tuple[str, str, str]] = []
        fleet: Any = SimpleNamespace(workers=list(workers), post=self.post)
        self.fleet = fleet
        self.now = 0.0
        self.first = self.settled = True
        self.gain = SplitGain()
        self.balancer = Balancer(
            fleet,
            self.gain,
            ClusterConfig(**{"slo": {"ttft_ms": 500, "tpot_ms": 10}, **config}),
            lambda: self.first,
            lambda: self.settled,
            lambda: self.now,
        )

    def post(self, worker: WorkerState, command: SetRole) -> None:
        self.posted.append((worker.worker_id, command.role, command.by))

    def seconds(self, count: float) -> list[tuple[str, str, str]]:
        for _ in range(int(count)):
            self.balancer.look()
            self.now += 1.0
            for worker in self.fleet.workers:  # queues stay as they were reported
                worker.queue.reported(worker.snapshot.queue_tokens, self.now)
        posted, self.posted = self.posted, []
        return posted


def crowd(**told: Any) -> Sequence[WorkerState]:
    """One P with a second of prompts, and three D that are nearly idle."""
    return [
        made("p", "prefill", queue_tokens=10_000, busy=1.0, pace=REST),
        *(made(f"d{i}", "decode", pace=PACE, num_running=i, **told) for i in range(3)),
    ]


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.workers.time", SimpleNamespace(monotonic=lambda: 0.0))


def test_the_first_router_changes_the_least_loaded_worker() -> None:
    stage = Stage(*crowd())
    stage.first = False
    assert stage.seconds(3 * SUSTAINED_S) == []
    stage.first = True
    assert stage.seconds(SUSTAINED_S) == []
    assert stage.seconds(1) == [("d0", "prefill", "balance")]


def test_it_waits_while_counts_change_workers_leave_or_engines_differ() -> None:
    stage = Stage(*crowd())
    stage.settled = False
    assert stage.seconds(200) == []
    stage = Stage(*crowd())
    stage.fleet.workers[3].left_at = 0.0
    assert stage.seconds(200) == []
    other = {"prefill": {"engine": {"max_num_batched_tokens": 4096}}}
    assert Stage(*crowd(), **other).seconds(200) == []
    assert Stage(*crowd(), mode="aggregated").seconds(200) == []


def test_it_knows_from_the_workers_what_was_changed_and_by_whom() -> None:
    assert Stage(*crowd(role_by="operator")).seconds(200) == []
    assert Stage(*crowd(role_by="guard")).seconds(200) != []
    young = Stage(*crowd(role_by="balance", role_age_s=AGAIN_S - 1))
    assert young.seconds(200) == [], "a new first router hears it in the Snapshots"
    assert Stage(*crowd(role_by="balance", role_age_s=AGAIN_S)).seconds(200) != []


def test_a_paced_workers_decodes_are_seen_by_their_steps_alone() -> None:
    """Its interval is the target while prompts wait, however few it decodes."""
    worker = made("d", "decode", pace=PACE, token_interval_s=0.0095, num_running=4)
    predictor = Predictor([worker], None, 0, 0.0)
    assert load_of(worker, predictor).token_interval_ms == 4.0
    plain = made("d", "decode", token_interval_s=0.0095, num_running=4)
    assert load_of(plain, predictor).token_interval_ms == pytest.approx(9.5)


def test_prompts_at_a_decode_worker_are_demand_for_prefill() -> None:
    workers = [
        made("p", "prefill", busy=0.9, pace=PACE),
        *(made(f"d{i}", "decode", pace=PACE, queue_tokens=4000, busy=0.5) for i in range(3)),
    ]
    assert Stage(*workers).seconds(200) == [("d0", "prefill", "balance")] * 3, (
        "these workers do not follow"
    )


def test_it_is_said_once_that_splitting_does_not_pay(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(made("p", "prefill", pace=PACE), made("d", "decode", pace=PACE))
    caplog.set_level(logging.INFO, logger=balancer.logger.name)

    def prompts(gain_ms: float) -> list[str]:
        caplog.clear()
        for _ in range(int(2 * WINDOW_S)):
            stage.gain.note(gain_ms, stage.now)
            stage.seconds(1)
        return [record.getMessage() for record in caplog.records]

    assert prompts(20.0) == [], "that is what it is there for"
    [line] = prompts(1.0)
    assert line.startswith("splitting does not pay here") and LEAST_PROMPTS < WINDOW_S
    assert prompts(1.0) == []
    [line] = prompts(20.0)
    assert line.startswith("splitting pays")
