"""Promises of an SLO: requests that would be late are refused before a worker hears of them, and
goodput is counted."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from router.harness import MODEL, Harness, until
from router.workers import made
from support.clock import Clock

from pdserve.configs.router import SloConfig
from pdserve.protocol.events import PaceState
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.admission import CAUTION, LEAST_WAIT, Admission
from pdserve.router.choosing.predict import Forecast, Predictor
from pdserve.router.errors import ApiError, RequestFailed
from pdserve.router.fleet.worker_state import LEAST_FACTOR, WorkerState
from pdserve.router.request.slo import Goodput

Make = Callable[..., Harness]
PROMPT = list(range(10, 30))
GOOD = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
SLO = {"ttft_ms": 200}


@pytest.fixture
def make(make: Make, clock: Clock) -> Make:
    """All times of the router and its workers are made by hand: no step takes longer than it
    says."""

    def build(*args: Any, **config: Any) -> Harness:
        harness = make(*args, now=clock, **config)
        for worker in harness.world.workers.values():
            worker.sleep = clock.sleep
        return harness

    return build


def busy(harness: Harness, queue_tokens: int) -> None:
    """Prefill workers, each with so much to do, say that they compute 1,000 tokens a second."""
    for worker in [*harness.prefills, *harness.decodes]:
        worker.prefill_tokens_per_s = 1000.0
    for worker in harness.prefills or harness.decodes:
        worker.queue_tokens = queue_tokens


async def counted(harness: Harness) -> dict[str, float]:
    lines = (await harness.http().get("/metrics")).text.splitlines()
    prefix = "pdserve_router_slo_requests_total{missed="
    return {
        line.split('"')[1]: float(line.split()[-1]) for line in lines if line.startswith(prefix)
    }


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_what_would_be_late_is_refused_before_anything_is_computed(
    make: Make, num_prefill: int
) -> None:
    harness = make(num_prefill, 1, slo=SLO)
    busy(harness, 5000)
    await harness.start()
    http = harness.http()
    for path, body in (
        ("/v1/completions", GOOD),
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", GOOD),
    ):
        answer = await http.post(path, json=body | {"stream": path.endswith("s")})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (
            429,
            "rate_limit_error",
            "predicted_late",
        )
        assert 4 <= int(answer.headers["retry-after"]) <= 6, "the queue is done with by then"
        assert "slo.ttft_ms" in error["message"] and "200 ms" in error["message"]
    assert not any(worker.submits() for worker in [*harness.prefills, *harness.decodes])
    assert (
        'rejections_total{reason="predicted_late",status="429"} 3.0'
        in (await http.get("/metrics")).text
    )
    assert (harness.service.admission.num_prompts, harness.service.admission.queued_tokens) == (
        0,
        0,
    )
    assert await counted(harness) == {"refused": 3.0}


@pytest.mark.parametrize(
    ("slo", "queue_tokens", "is_refused"),
    [
        ({"ttft_ms": 200}, 100, False),
        ({"ttft_ms": 200}, 260, True),
        ({"ttft_ms": 200, "refuse_beyond": 4}, 600, False),
        ({"ttft_ms": 200, "refuse_beyond": None}, 50_000, False),
        ({"tpot_ms": 1}, 50_000, False),
        ({}, 50_000, False),
    ],
)
async def test_the_limit(
    make: Make, slo: dict[str, Any], queue_tokens: int, is_refused: bool
) -> None:
    harness = make(1, 1, slo=slo)
    busy(harness, queue_tokens)
    await harness.start()
    assert (await harness.http().post("/v1/completions", json=GOOD)).status_code == (
        429 if is_refused else 200
    )


async def test_nothing_is_refused_while_no_speed_is_known(make: Make) -> None:
    harness = make(1, 1, slo=SLO)
    harness.prefills[0].queue_tokens = 1_000_000
    await harness.start()
    assert (await harness.http().post("/v1/completions", json=GOOD)).status_code == 200


async def test_a_prompt_that_is_too_long_by_itself_is_served_when_nobody_waits(make: Make) -> None:
    harness = make(1, 1, slo={"ttft_ms": 10})
    busy(harness, 0)
    await harness.start()
    assert (await harness.http().post("/v1/completions", json=GOOD)).status_code == 200
    assert await counted(harness) == {"none": 1.0}, "the fake worker is faster than it says"


async def test_a_burst_sees_itself(make: Make) -> None:
    """All are checked before the first is sent: 20 ms each, two workers, a limit of 200 ms."""
    harness = make(2, 1, slo=SLO)
    busy(harness, 0)
    await harness.start()
    runs = [await harness.service.admit([PROMPT], SamplingParams(max_tokens=2)) for _ in range(10)]
    with pytest.raises(ApiError) as caught:
        for _ in range(20):
            runs.append(await harness.service.admit([PROMPT], SamplingParams(max_tokens=2)))
    assert caught.value.code == "predicted_late" and 16 <= len(runs) <= 21
    await asyncio.gather(*(run.collect() for run in runs))
    assert harness.service.admission.unsent_tokens == 0


async def test_the_urgent_see_only_what_they_do_not_overtake(make: Make) -> None:
    harness = make(1, 1, slo=SLO)
    [prefill] = harness.prefills
    http = harness.http()
    prefill.gate = asyncio.Event()
    busy(harness, 0)
    await harness.start()

    def ask(number: int, priority: int) -> asyncio.Task[Any]:
        body = GOOD | {"prompt": list(range(10 * number, 10 * number + 48)), "priority": priority}
        return asyncio.create_task(http.post("/v1/completions", json=body))

    patient = [ask(number, 5) for number in range(28)]
    # Who is not sent is refused at once: nobody else is done while the worker begins nothing.
    await until(lambda: len(prefill.submits()) + sum(task.done() for task in patient) >= 28)
    assert (await ask(28, 5)).status_code == 429
    num_sent = len(prefill.submits())
    urgent = ask(29, 4)
    await until(lambda: urgent.done() or len(prefill.submits()) > num_sent)
    assert not urgent.done()
    prefill.gate.set()
    assert (await urgent).status_code == 200
    assert {(await task).status_code for task in patient} == {200, 429}


def test_what_is_ahead_of_a_priority() -> None:
    admission = Admission(9, 1000)
    assert admission.share_ahead(0) == 1.0
    seats = admission.enter(3)
    for seat, tokens, priority in zip(seats, (100, 200, 100), (0, 5, -1), strict=True):
        seat.fill(tokens, priority)
    assert [admission.share_ahead(priority) for priority in (-2, -1, 0, 4, 5)] == [
        0.0,
        0.25,
        0.5,
        0.5,
        1.0,
    ]
    seats[0].sent("w")
    assert (admission.unsent_tokens, admission.queued_tokens) == (300, 400)
    seats[1].computed()
    assert admission.share_ahead(0) == 1.0
    for seat in seats:
        seat.leave()
    assert (admission.unsent_tokens, admission.queued_tokens, admission.share_ahead(-9)) == (
        0,
        0,
        1.0,
    )


@pytest.mark.parametrize(
    ("wait_ms", "own_ms", "elapsed_ms", "retry_after"),
    [
        (90, 10, 0, None),
        (91, 10, 0, 1),
        (80, 10, 11, 1),
        (100 * LEAST_WAIT, 5000, 0, None),
        (100 * LEAST_WAIT + 1, 5000, 0, 1),
        (5090, 10, 0, 5),
        (1e7, 10, 0, 60),
    ],
)
def test_lateness(
    wait_ms: float, own_ms: float, elapsed_ms: float, retry_after: int | None
) -> None:
    admission = Admission(1, 1, SloConfig(ttft_ms=50, refuse_beyond=2))
    if retry_after is None:
        admission.check_lateness(Forecast(wait_ms, own_ms, "w"), elapsed_ms)
        return
    with pytest.raises(ApiError) as caught:
        admission.check_lateness(Forecast(wait_ms, own_ms, "w"), elapsed_ms)
    assert (caught.value.status, caught.value.retry_after) == (429, retry_after)


def test_forecasts_that_are_wrong_are_corrected() -> None:
    """First tokens take 1 to 4 times what is predicted: seven in ten take less than 3.1 times."""
    admission = Admission(1, 1, SloConfig(ttft_ms=100))
    draw = random.Random(1)
    for _ in range(3000):
        admission.learn(Forecast(60, 20, "w"), 80 * draw.uniform(1, 4))
    assert 2.7 < admission.caution < 3.5
    before = admission.caution
    admission.learn(Forecast(1, 1, "w"), 5000)
    assert admission.caution == before, "nobody is refused for so little"
    with pytest.raises(ApiError):
        admission.check_lateness(Forecast(40, 0, "w"), 0)
    for _ in range(3000):
        admission.learn(Forecast(100, 50, "w"), 16)
    assert admission.caution == CAUTION[0]
    for _ in range(200):
        admission.learn(Forecast(60, 20, "w"), 1e9)
    assert admission.caution == CAUTION[1]


def test_short_forecasts_teach_nothing_about_long_ones() -> None:
    """Every first token takes 15 ms more than predicted: nearly half more where 40 are predicted,
    and a tenth more where it matters."""
    admission = Admission(1, 1, SloConfig(ttft_ms=200))
    for _ in range(1000):
        for predicted in (40, 40, 40, 40, 160):
            admission.learn(Forecast(predicted - 40, 40, "w"), predicted + 15)
    assert 1.05 < admission.caution < 1.15
    admission.check_lateness(Forecast(130, 40, "w"), 0)


DECODING = PaceState(tpot_ms=10.0, base_step_ms=4.0, row_ms=0.1, prompt_tokens_per_s=6000.0)


def first_token(worker: WorkerState, num_tokens: int) -> Forecast:
    return Predictor([worker], None, num_tokens, time.monotonic()).first_token(worker)


def test_forecasts_of_a_worker_that_is_earlier_get_shorter() -> None:
    """It takes 85 % of what is predicted, where that is a third of the limit or more."""
    worker = made("d", "both", prefill_tokens_per_s=10_000.0, pace=DECODING)
    admission = Admission(1, 1, SloConfig(ttft_ms=2000))
    short, long = first_token(worker, 2000), first_token(worker, 6000)
    assert short.total_ms < 600 < 1000 < long.total_ms < 1200
    for _ in range(300):
        admission.learn(short, 1.0)  # too little to say anything
    assert long.factor == 1
    for _ in range(300):
        admission.learn(long, 0.85 * long.total_ms)
    assert short.factor == long.factor == pytest.approx(0.85, rel=0.05)
    assert admission.caution < 1.05
    admission.check_lateness(Forecast(2250, 1, "d", earliness=worker.earliness), 0)
    with pytest.raises(ApiError):
        admission.check_lateness(Forecast(2250, 1, "another"), 0)
    for _ in range(300):
        admission.learn(long, 1.0)
    assert long.factor == LEAST_FACTOR
    for _ in range(300):
        admission.learn(long, 2 * long.total_ms)
    assert long.factor == pytest.approx(1), "the caution is for late ones"
    for _ in range(300):
        Admission(1, 1).learn(long, 1.0)
    assert long.factor == pytest.approx(1), "nothing is promised"
    worker.pace = replace(DECODING, base_step_ms=0.0)
    assert first_token(worker, 6000).earliness is None, "it decodes nothing"


def test_what_is_learnt_late_does_not_make_a_factor_swing() -> None:
    """First tokens come long after their forecasts, so forty are under way at a time."""
    worker = made("d", "both", pace=DECODING)
    admission = Admission(1, 1, SloConfig(ttft_ms=1000))
    draw = random.Random(1)
    under_way = [first_token(worker, 6000) for _ in range(40)]
    seen = []
    for _ in range(1000):
        under_way.append(first_token(worker, 6000))
        oldest = under_way.pop(0)
        admission.learn(oldest, draw.uniform(0.8, 1.0) * oldest.total_ms)
        seen.append(oldest.factor)
    assert min(seen[100:]) > 0.78 and max(seen[100:]) <= 1.0
    assert sum(seen[100:]) / 900 == pytest.approx(0.9, abs=0.02)


def test_a_worker_learns_only_from_prompts_that_it_computes() -> None:
    worker = made("d", "both", pace=DECODING)
    admission = Admission(9, 10**6, SloConfig(ttft_ms=1000))
    now = [0.0]
    admission.clock = lambda: now[0]
    for place, learns in (("another", False), ("d", True)):
        for seat in admission.enter(3):
            seat.fill(6000, 0, first_token(worker, 6000))
            seat.sent(place)
            now[0] += 0.01
            seat.computed()
            seat.leave()
        assert (worker.earliness.factor < 1) is learns


async def test_what_first_tokens_take_is_learnt(make: Make) -> None:
    harness = make(1, 1, slo=SLO)
    busy(harness, 100)
    harness.prefills[0].step_s = 0.4
    await harness.start()
    assert (await harness.http().post("/v1/completions", json=GOOD)).status_code == 200
    assert 1 < harness.service.admission.caution < 1.1
    assert "pdserve_router_slo_caution 1.0" in (await harness.http().get("/metrics")).text


async def test_goodput_is_counted_as_users_measure_it(make: Make) -> None:
    harness = await make(1, 1, slo={"ttft_ms": 150, "tpot_ms": 40}).start()
    p = harness.prefills[0]
    d = harness.decodes[0]
    http = harness.http()
    expected = {}
    for missed, wait_s, step_s in (
        ("none", 0, 0),
        ("ttft", 0.2, 0),
        ("tpot", 0, 0.06),
        ("both", 0.2, 0.06),
    ):
        p.step_s = wait_s
        d.step_s = step_s
        assert (await http.post("/v1/completions", json=GOOD)).status_code == 200
        expected[missed] = 1.0
        assert await counted(harness) == expected
    page = (await http.get("/metrics")).text
    assert 'pdserve_router_slo_tokens_total{missed="both"} 4.0' in page
    assert 'pdserve_router_slo_target_seconds{target="ttft"} 0.15' in page


async def test_time_before_admission_counts(make: Make, clock: Clock) -> None:
    """Tokenising a long text takes such time."""
    harness = await make(0, 1, slo=SLO).start()
    await harness.service.collect([PROMPT], SamplingParams(max_tokens=2), received=clock() - 0.3)
    assert await counted(harness) == {"ttft": 1.0}


async def test_without_targets_nothing_is_counted(make: Make) -> None:
    harness = await make(0, 1).start()
    assert (await harness.http().post("/v1/completions", json=GOOD)).status_code == 200
    assert await counted(harness) == {}


async def test_failed_prompts_are_no_goodput(make: Make) -> None:
    harness = await make(0, 1, slo=SLO).start()
    harness.decodes[0].fail_submit = lambda submit: "invalid"
    with pytest.raises(RequestFailed):
        await harness.collect(PROMPT, SamplingParams(max_tokens=2))
    assert await counted(harness) == {"failed": 1.0}


@pytest.mark.parametrize(
    ("outcome", "elapsed_s", "ttft_s", "tpot_s", "missed"),
    [
        ("cancelled", 0.1, None, None, None),
        ("cancelled", 0.3, None, None, "ttft"),
        ("cancelled", 9.0, 0.1, 0.01, None),
        ("cancelled", 9.0, 0.1, 0.06, "tpot"),
        ("ok", 9.0, 0.1, None, "none"),
        ("unavailable", 0.1, None, None, "failed"),
    ],
)
def test_whoever_left_counts_when_it_was_late_by_then(
    outcome: str, elapsed_s: float, ttft_s: float | None, tpot_s: float | None, missed: str | None
) -> None:
    registry = CollectorRegistry()
    Goodput(SloConfig(ttft_ms=200, tpot_ms=50), registry).ended(
        outcome, elapsed_s, ttft_s, tpot_s, 7
    )
    for verdict in ("none", "ttft", "tpot", "both", "failed"):
        tokens = registry.get_sample_value("pdserve_router_slo_tokens_total", {"missed": verdict})
        assert tokens == (7 if verdict == missed else None)
