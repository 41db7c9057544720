"""Simulated clusters: macro steps are single steps, the same job gives the same outcome, time is
virtual, and what one request takes is known by hand."""

import statistics
import subprocess
import sys
import time

import msgspec
import pytest
from plan.jobs import KV_TOKENS, Lengths, job, profile, requests, split, whole

from pdserve.plan.profile.step_times import StepLoad, StepTimes
from pdserve.plan.search.simulators import Simulators
from pdserve.plan.simulation.jobs import Job, Outcome, Pool, Request

pytestmark = pytest.mark.processes

LOADS = [(seed, 2 + 3 * (seed % 5), 1 + seed % 2, 1 + seed % 3) for seed in range(20)]


def _pools(seed: int, num_first: int, num_second: int) -> tuple[Pool, ...]:
    kv_tokens = 20_000 if seed % 4 == 3 else 200_000  # every fourth is short of blocks
    if seed % 3 == 0:
        return whole(num_first, kv_tokens)
    return split(num_first, num_second, kv_tokens)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed, rate, num_first, num_second", LOADS)
def test_macro_steps_are_single_steps(
    simulators: Simulators, seed: int, rate: float, num_first: int, num_second: int
) -> None:
    asked = requests(seed, rate, 16, Lengths(high_out=60))
    pools = _pools(seed, num_first, num_second)
    promises = {"ttft_ms": 400.0, "tpot_ms": 8.0} if seed % 2 else {}
    macro = simulators.run(job(pools, asked, **promises))
    single = simulators.run(job(pools, asked, is_macro=False, **promises))
    assert len(macro.asked) == len(single.asked) == len(asked)
    for name in ("ttft_ms", "tpot_ms"):
        ours, theirs = (
            [getattr(each, name) or 0.0 for each in run.asked] for run in (macro, single)
        )
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_the_same_job_gives_the_same_outcome(simulators: Simulators) -> None:
    asked = requests(5, 20, 40)
    first = simulators.run(job(split(2, 2), asked, ttft_ms=200.0, tpot_ms=8.0))
    other = simulators.run(job(split(2, 2), requests(6, 20, 40)))
    again = simulators.run(job(split(2, 2), asked, ttft_ms=200.0, tpot_ms=8.0))
    with Simulators(1) as fresh:
        elsewhere = fresh.run(job(split(2, 2), asked, ttft_ms=200.0, tpot_ms=8.0))
    assert first == again == elsewhere
    assert first.digest != other.digest


def test_time_is_virtual(simulators: Simulators) -> None:
    far = Request(3000.0, (("own far", 500),), 4)
    began = time.monotonic()
    outcome = simulators.run(job(whole(1), (Request(0.0, (("own near", 500),), 4), far)))
    assert outcome.seconds > 3000
    assert time.monotonic() - began < 60
    assert outcome.asked[0].ttft_ms == pytest.approx(outcome.asked[1].ttft_ms, abs=2.0)


def test_no_clock_is_real() -> None:
    """In the process that simulates, no module of ours holds a clock that was not patched."""
    code = (
        "from pdserve.plan.simulation.virtual_time import patch_clocks, real_clocks_in_use\n"
        "patch_clocks()\n"
        "import pdserve.plan.simulation.scene\n"
        "print(list(real_clocks_in_use()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_clock_that_was_kept_is_found() -> None:
    code = (
        "import time, sys, types\n"
        "module = types.ModuleType('pdserve.kept')\n"
        "def asks(now=time.monotonic): ...\n"
        "module.asks, module.clock = asks, time.time\n"
        "sys.modules['pdserve.kept'] = module\n"
        "from pdserve.plan.simulation.virtual_time import patch_clocks, real_clocks_in_use\n"
        "patch_clocks()\n"
        "print(sorted(real_clocks_in_use()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "['pdserve.kept.asks: a default', 'pdserve.kept.clock']"


def test_a_lone_request_takes_what_the_profile_says(simulators: Simulators) -> None:
    found = profile()
    times = StepTimes(found)
    outcome = simulators.run(job(whole(1), (Request(0.0, (("own", 2048),), 3),)))
    prompt = times.seconds(StepLoad(0, 0, ((0, 2048),)))
    wanted = 1e3 * (found.http_s + found.command_s + found.message_s + found.host_s + prompt)
    assert outcome.asked[0].ttft_ms == pytest.approx(wanted, abs=0.05)
    step = 1e3 * times.seconds(StepLoad(1, 2049))
    assert outcome.asked[0].tpot_ms == pytest.approx(step, abs=0.05)


def test_steps_with_prompts_vary_by_chance(simulators: Simulators) -> None:
    """By 5 %, and no step of decodes does. Prompts come alone, at the same times in both jobs."""
    asked = tuple(Request(float(at), ((f"own {at}", 2048),), 3) for at in range(40))

    def run(spread: float) -> Outcome:
        varied = msgspec.structs.replace(profile(), spread=spread)
        return simulators.run(job((Pool("both", 1, varied, KV_TOKENS, {}),), asked))

    exact, chance = run(0.0), run(0.05)
    assert chance == run(0.05), "the same in each run"
    ours, theirs = ([each.ttft_ms or 0.0 for each in run.asked] for run in (chance, exact))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    assert 0.03 < statistics.stdev(ratios) < 0.07
    assert statistics.mean(ratios) == pytest.approx(1.0, abs=0.025)
    ours, theirs = ([each.tpot_ms or 0.0 for each in run.asked] for run in (chance, exact))
    assert ours == pytest.approx(theirs, abs=0.05)


def test_a_prefix_is_computed_once(simulators: Simulators) -> None:
    shared = (("block 1", 2048), ("block 2", 1024))
    asked = tuple(Request(float(at), (*shared, (f"own {at}", 100)), 4) for at in range(3))
    cold, warm, last = simulators.run(job(whole(1), asked)).asked
    assert cold.ttft_ms is not None and warm.ttft_ms is not None
    assert warm.ttft_ms < cold.ttft_ms / 3
    assert last.ttft_ms == pytest.approx(warm.ttft_ms, abs=0.5)


def test_a_hopeless_load_is_stopped_early(simulators: Simulators) -> None:
    asked = requests(1, 500, 400, Lengths(2000, 2001, 10))
    hopeless: Job = job(whole(1), asked, ttft_ms=100.0, tpot_ms=8.0, stop_beyond=0.12)
    outcome = simulators.run(hopeless)
    assert not outcome.is_whole and outcome.kept <= 0.88
    assert outcome.missed_ttft > outcome.missed_tpot


def test_equal_workers_share_the_prompts(simulators: Simulators) -> None:
    asked = requests(1, 10, 400, Lengths(2048, 2048, 200))
    outcome = simulators.run(job(whole(2), asked, ttft_ms=200.0, tpot_ms=7.0))
    shares = [use.prompts for use in outcome.uses]
    assert max(shares) < 1.2 * min(shares)
    assert outcome.kept > 0.95


def test_homes_and_stages_are_simulated(simulators: Simulators) -> None:
    asked = requests(2, 10, 12)
    for engine in ({"pipeline_parallel": 2}, {"data_parallel": 2, "expert_parallel": True}):
        pools = (Pool("both", 1, profile(), 100_000, engine),)
        outcome = simulators.run(job(pools, asked))
        assert all(one.ttft_ms is not None for one in outcome.asked)
