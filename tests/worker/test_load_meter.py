"""The worker's load over a few seconds: of made-up turns, and of a loop that works and rests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clock import Clock
from support.pair import ROUTER, SESSION, Pair, deltas, prompt_of, submit

from pdserve.engine.step_result import StepResult
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.worker.load_meter import LoadMeter


@pytest.fixture
def pair(tiny_llama: Path, clock: Clock) -> Iterator[Pair]:
    pair = Pair(tiny_llama)
    yield pair
    pair.close()


def work(meter: LoadMeter, now: float, turns: int, step_s: float, pause_s: float = 0.0) -> float:
    for _ in range(turns):
        meter.turned(now, now + step_s, True, mostly_prompt=True)
        now += step_s + pause_s
        if pause_s:
            meter.turned(now, now, False)
    return now


def test_busy_is_a_share_of_time() -> None:
    meter = LoadMeter(100.0)
    assert meter.busy(100.0) == 0.0 == meter.busy(130.0)
    now = work(meter, 130.0, 3000, 0.01)
    assert meter.busy(now) == pytest.approx(1.0, abs=0.01)
    now = work(meter, now, 1500, 0.01, pause_s=0.03)
    assert meter.busy(now) == pytest.approx(0.25, abs=0.01)
    assert meter.busy(now + 30.0) < 0.01, "nobody turns while it sleeps"


def test_intervals_run_from_end_to_end_but_not_over_a_rest() -> None:
    meter = LoadMeter(0.0)
    assert meter.token_interval_s == 0.0
    now = 0.0
    for _ in range(200):  # 8 ms of step, 2 ms between two steps
        meter.turned(now, now + 0.008, True)
        now += 0.01
    assert meter.token_interval_s == pytest.approx(0.01, rel=0.01)
    meter.turned(now, now + 0.001, False)
    meter.turned(now + 60.0, now + 60.004, True)
    assert meter.token_interval_s == pytest.approx(0.004, rel=0.01), (
        "the rest is not of it, and what was is faded"
    )


def test_a_step_for_some_of_the_sequences_counts_for_those_alone() -> None:
    """As with stages: a sequence waits for the steps of the others."""
    meter = LoadMeter(0.0)
    now = 0.0
    for _ in range(200):
        meter.turned(now, now + 0.01, True, share=0.5)
        now += 0.01
    assert meter.token_interval_s == pytest.approx(0.02, rel=0.01)


def test_one_long_step_is_not_all() -> None:
    meter = LoadMeter(0.0)
    now = work(meter, 0.0, 1000, 0.01)
    work(meter, now, 1, 0.2)
    assert meter.token_interval_s < 0.012


def test_decoding_is_not_busy() -> None:
    """A decoder that was just made a prefill worker, with long streams: no prompt waits for it to
    end them."""
    meter = LoadMeter(0.0)
    now = 0.0
    for turn in range(3000):
        meter.turned(now, now + 0.01, True, mostly_prompt=turn % 10 == 0)
        now += 0.01
    assert meter.busy(now) == pytest.approx(0.1, abs=0.02)
    assert meter.token_interval_s == pytest.approx(0.01, rel=0.01)


def test_a_worker_tells_its_load_and_its_rest(
    pair: Pair, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not more of prompts than there was: one step of 20 rows, and a hundred of one, each of 10
    ms."""
    step = pair.d.engine.step

    def slowly(is_patient: bool) -> StepResult:
        clock.seconds += 0.01
        return step(is_patient)

    monkeypatch.setattr(pair.d.engine, "step", slowly)
    key = RequestKey(ROUTER, SESSION, "a")
    pair.d.command(
        submit(key, "full", prompt_of(20), SamplingParams(max_tokens=100, seed=1, ignore_eos=True))
    )
    pair.until(lambda: len(deltas(pair.d, key)) > 50)
    working = pair.d.loop.snapshot()
    assert working.token_interval_s == pytest.approx(0.01) and 0 < working.busy < 0.5
    pair.until(lambda: any(delta.finish_reason for delta in deltas(pair.d, key)))
    clock.seconds += 0.05
    pair.turn()
    resting = pair.d.loop.snapshot()
    assert resting.token_interval_s == 0.0 and resting.busy > 0
