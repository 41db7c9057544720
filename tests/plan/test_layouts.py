"""Which layouts are simulated, their bounds, and the search for goodput over a made-up cluster."""

from collections.abc import Callable
from pathlib import Path

import pytest
from plan.jobs import profile

from benchmarks.support.places import SHAPES
from pdserve.bench.replay.trace import read_trace
from pdserve.bench.replay.window import Caps, Span
from pdserve.cluster.operate.cluster_file import load as load_cluster
from pdserve.models.config import ModelSpec, read_spec
from pdserve.plan.layouts.candidates import MOST_LAYOUTS, Candidate, candidates, gpu_numbers
from pdserve.plan.layouts.cluster_yaml import cluster_yaml
from pdserve.plan.layouts.layout import MOST_SIMULATED, Slo
from pdserve.plan.loads import LEAST_REQUESTS, Poisson, Recorded
from pdserve.plan.report import Plan, Planned, page, ranked
from pdserve.plan.search.bottleneck import bottleneck
from pdserve.plan.search.goodput import (
    CLOSE,
    ROUGH,
    Goodput,
    GoodputSearch,
    Point,
    Searched,
    distinct,
    near_best,
    searches_of,
)
from pdserve.plan.simulation.jobs import Job, Outcome, WorkerUse

LLAMA = ModelSpec.model_validate(profile().spec)
LOAD = Poisson(10, 2048, 128)
SLO = Slo(200, 7)


def outcome(kept: float, **more: object) -> Outcome:
    values: dict[str, object] = {
        "kept": kept,
        "missed_ttft": 1 - kept,
        "missed_tpot": 0.0,
        "num_counted": 100,
        "num_refused": 0,
        "ttft_ms": (1.0, 2.0, 3.0),
        "tpot_ms": (1.0, 2.0, 3.0),
        "output_tokens_per_s": 1.0,
        "seconds": 1.0,
        "uses": (
            WorkerUse("prefill-0", "prefill", 0.95, 0.95, 0.1, 0),
            WorkerUse("decode-0", "decode", 0.9, 0.05, 0.2, 0),
        ),
        "is_whole": True,
        "digest": "",
    }
    return Outcome(**values | more)  # type: ignore[arg-type]


def test_two_gpus_have_these_layouts() -> None:
    found = candidates(profile(), LLAMA, LOAD, SLO, [2])
    names = {str(each.layout) for each in found.chosen}
    assert {"1P + 1D", "2 whole", "1 whole (TP2)"} <= names
    assert all(each.layout.num_gpus == 2 for each in found.chosen)
    assert all(each.bound > 0 for each in found.chosen)


def test_many_gpus_have_few_layouts_of_each_kind_and_parts_of_them_are_simulated() -> None:
    numbers = gpu_numbers(2, 64)
    assert numbers == [2, 4, 8, 16, 32, 64]
    found = candidates(profile(), LLAMA, LOAD, SLO, numbers)
    parts = {str(each.layout.simulated) for each in found.chosen}
    assert len(parts) <= MOST_LAYOUTS and found.num_left_out > 100
    names = {str(each.layout) for each in found.chosen}
    assert {"4 whole", "2 whole (TP2)", "8 whole", "4 whole (TP2)"} <= names
    for number in numbers:
        kinds = {c.layout.is_split for c in found.chosen if c.layout.num_gpus == number}
        assert kinds == {True, False}
    for each in found.chosen:
        assert each.layout.num_workers / each.layout.divisor <= MOST_SIMULATED
        assert all(part.count % each.layout.divisor == 0 for part in each.layout.parts)


def test_what_does_not_fit_or_cannot_be_kept_is_said() -> None:
    large = read_spec(str(SHAPES / "llama-3.1-70b"), "dummy")
    with pytest.raises(ValueError, match=r"--model fits no degrees on up to 1 GPUs .*do not fit"):
        candidates(profile(), large, LOAD, SLO, [1])
    with pytest.raises(ValueError, match=r"--slo ttft=1,tpot=7: no layout .* allow more"):
        candidates(profile(), LLAMA, LOAD, Slo(1, 7), [2])


def test_experts_are_shared_by_homes() -> None:
    mixture = read_spec(str(SHAPES / "qwen3-30b-a3b"), "dummy")
    found = candidates(profile(), mixture, LOAD, Slo(1000, 30), [4])
    assert any("EP" in str(each.layout) for each in found.chosen)


@pytest.mark.parametrize("text", ["10", "0,1,1", "a,1,1", "10,0,5", "10,1,1,1", "inf,1,1"])
def test_a_wrong_poisson_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="RATE,IN,OUT"):
        Poisson.parse(text)


def test_a_higher_rate_sends_the_same_requests_sooner() -> None:
    slow, fast = LOAD.at(10, 60), LOAD.at(20, 30)
    assert len(slow) == len(fast) == 600
    for one, other in zip(slow, fast, strict=True):
        assert other.at_s == pytest.approx(one.at_s / 2)
        assert other.prefixes == one.prefixes


def test_a_trace_keeps_its_shared_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        f'{{"timestamp": {1000 * i}, "input_length": {600 + i % 100}, "output_length": 9, '
        f'"hash_ids": [1, {2 + i}]}}'
        for i in range(400)
    ]
    path.write_text("\n".join(lines))
    load = Recorded(read_trace(path), Span(), Caps(None, 8))
    assert load.rate == pytest.approx(400 / 399) and load.mean_out == 8
    asked = load.at(10, 20)
    assert len(asked) == LEAST_REQUESTS
    assert asked[0].prefixes == (("block 1", 512), ("block 2", 88))
    assert asked[5].prefixes == (("block 1", 512), ("block 7", 93))
    assert asked[-1].at_s == pytest.approx(30, rel=0.02)


def test_a_search_finds_where_the_promises_end() -> None:
    [layout] = [
        each.layout
        for each in candidates(profile(), LLAMA, LOAD, SLO, [2]).chosen
        if str(each.layout) == "1P + 1D"
    ]
    jobs: list[Job] = []

    def run(job: Job) -> Outcome:
        jobs.append(job)
        rate = len(job.requests) / job.requests[-1].at_s
        return outcome(1.0 if rate < 13 else 0.9 - (rate - 13) / 10)

    search = GoodputSearch(layout, 20, LOAD, SLO, run, 100)
    search.close_in(ROUGH)
    assert len(jobs) <= 4 and search.goodput.rate == pytest.approx(13, rel=0.3)
    search.close_in(CLOSE)
    found = search.goodput
    assert found.rate == pytest.approx(13, rel=0.06)
    assert found.best is not None and found.beyond is not None
    assert found.best.rate <= found.rate <= found.beyond.rate
    assert len(jobs) <= 8 and jobs[0].max_model_len == 2048 + 128 + 1
    nothing = GoodputSearch(layout, 20, LOAD, SLO, lambda job: outcome(0.0), 10)
    nothing.close_in(CLOSE)
    assert nothing.goodput.rate == 0.0 and nothing.goodput.best is None


@pytest.mark.parametrize(
    ("missed_of", "most", "close"),
    [
        (lambda rate: 0.004 * (rate / 12) ** 4, 6, 26.8),  # ever more of them
        (lambda rate: 0.02 * (rate / 12) ** 2, 6, 26.8),
        (lambda rate: 0.0 if rate < 21 else 0.7, 7, 21.0),  # all at once
        (lambda rate: 0.099 if rate < 40 else 0.7, 10, 40.0),  # some at any rate
    ],
)
def test_misses_say_which_rate_to_try(
    missed_of: Callable[[float], float], most: int, close: float
) -> None:
    """Most of a search's time goes into high rates, so few may be tried in vain."""
    [layout] = [
        each.layout
        for each in candidates(profile(), LLAMA, LOAD, SLO, [2]).chosen
        if str(each.layout) == "1P + 1D"
    ]

    def run(job: Job) -> Outcome:
        missed = missed_of(len(job.requests) / job.requests[-1].at_s)
        return outcome(1 - missed, is_whole=missed < 0.12)

    search = GoodputSearch(layout, 20, LOAD, SLO, run, 100)
    search.close_in(ROUGH)
    assert len(search.goodput.points) <= most - 1
    search.close_in(CLOSE)
    found = search.goodput
    assert found.rate == pytest.approx(close, rel=0.08) and len(found.points) <= most
    rates = [point.rate for point in found.points]
    assert len(set(rates)) == len(rates) and max(rates) < 2 * found.rate


def test_a_rough_search_settles_whether_the_loads_own_rate_is_served() -> None:
    [layout] = [
        each.layout
        for each in candidates(profile(), LLAMA, LOAD, SLO, [2]).chosen
        if str(each.layout) == "2 whole"
    ]
    rates: list[float] = []

    def run(job: Job) -> Outcome:
        rates.append(len(job.requests) / job.requests[-1].at_s)
        return outcome(1.0 if rates[-1] < 18 else 0.5, is_whole=False)

    searched = Searched(layout, GoodputSearch(layout, 20, LOAD, SLO, run, 100))
    searched.search.close_in(ROUGH)
    assert searched.goodput.rate == pytest.approx(15, rel=0.05)
    tried = len(rates)
    for rate in (14, 20):
        searched.settle(rate)
    assert len(rates) == tried, "that is known"
    searched.settle(17)
    assert len(rates) == tried + 1 and searched.goodput.rate == pytest.approx(17)


def test_a_bound_that_is_far_too_low_costs_few_simulations() -> None:
    """Bounds know of no cached prefixes."""
    [layout] = [
        each.layout
        for each in candidates(profile(), LLAMA, LOAD, SLO, [2]).chosen
        if str(each.layout) == "2 whole"
    ]

    def run(job: Job) -> Outcome:
        rate = len(job.requests) / job.requests[-1].at_s
        return outcome(1.0 if rate < 63 else 0.5)

    search = GoodputSearch(layout, 20, LOAD, SLO, run, 100)
    search.close_in(ROUGH)
    search.close_in(CLOSE)
    assert search.goodput.rate == pytest.approx(63, rel=0.06)
    assert len(search.goodput.points) <= 10


def test_only_layouts_that_may_be_the_best_are_looked_at_closely() -> None:
    chosen = candidates(profile(), LLAMA, LOAD, SLO, [2, 4]).chosen

    def serving(candidate: Candidate, most: float) -> Searched:
        def run(job: Job) -> Outcome:
            rate = len(job.requests) / job.requests[-1].at_s
            return outcome(1.0 if rate < most else 0.8)

        search = GoodputSearch(candidate.layout, 20, LOAD, SLO, run, 100)
        search.close_in(ROUGH)
        return Searched(candidate.layout, search)

    few = [each for each in chosen if each.layout.num_gpus == 2][:2]
    many = [each for each in chosen if each.layout.num_gpus == 4][:2]
    searches = [serving(few[0], 10), serving(few[1], 5), serving(many[0], 17), serving(many[1], 9)]
    assert near_best(searches) == [searches[0].search, searches[2].search]


def test_layouts_of_the_same_proportions_share_one_search() -> None:
    chosen = candidates(profile(), LLAMA, LOAD, SLO, [8, 16, 64]).chosen
    jobs: list[Job] = []

    def run(job: Job) -> Outcome:
        jobs.append(job)
        rate = len(job.requests) / job.requests[-1].at_s
        return outcome(1.0 if rate < 20 else 0.5)

    searched = searches_of(chosen, LOAD, SLO, run, 100)
    by_name = {str(each.layout): each for each in searched}
    eight, sixteen = by_name["4P + 2D (TP2)"], by_name["8P + 4D (TP2)"]
    assert sixteen.search is eight.search and len(distinct(searched)) < len(searched)
    for search in distinct(searched):
        search.close_in(CLOSE)
    assert sixteen.goodput.rate == 2 * eight.goodput.rate
    assert eight.goodput.beyond is not None and sixteen.goodput.beyond is not None
    assert sixteen.goodput.beyond.rate == 2 * eight.goodput.beyond.rate
    assert {sum(pool.count for pool in job.pools) for job in jobs} <= set(range(1, 9))


def test_the_best_serves_the_load_with_the_fewest_gpus(tmp_path: Path) -> None:
    chosen = candidates(profile(), LLAMA, LOAD, SLO, [2, 4]).chosen
    rates = {2: 9.0, 4: 12.0}
    planned = [
        Planned(c.layout, Goodput(rates[c.layout.num_gpus] + i / 100, None, None))
        for i, c in enumerate(chosen)
    ]
    best, *others = ranked(planned, 10.0)
    assert best.layout.num_gpus == 4 and others[-1].layout.num_gpus == 2
    assert ranked(planned, 9.0)[0].layout.num_gpus == 2


def test_the_bottleneck_is_named() -> None:
    [layout] = [
        each.layout
        for each in candidates(profile(), LLAMA, LOAD, SLO, [2]).chosen
        if str(each.layout) == "1P + 1D"
    ]

    def named(result: Outcome) -> str:
        return bottleneck(layout, Goodput(1.0, None, Point(1.0, result)))

    assert named(outcome(0.5)).startswith("prefill: P computes prompts 95%")
    idle = (
        WorkerUse("prefill-0", "prefill", 0.2, 0.2, 0.1, 0),
        WorkerUse("decode-0", "decode", 0.9, 0.05, 0.2, 0),
    )
    assert named(outcome(0.5, uses=idle, missed_tpot=0.6)).startswith("decode: steps")
    full = (*idle[:1], WorkerUse("decode-0", "decode", 0.9, 0.3, 0.99, 3))
    assert named(outcome(0.5, uses=full)).startswith("memory")
    stalled = (*idle[:1], WorkerUse("decode-0", "decode", 0.9, 0.3, 0.2, 0))
    assert named(outcome(0.5, uses=stalled, missed_tpot=0.6)).startswith("next tokens: prompts")


def test_the_yaml_is_a_cluster(tmp_path: Path) -> None:
    for number in (2, 4):
        for each in candidates(profile(), LLAMA, LOAD, SLO, [number]).chosen:
            path = tmp_path / "cluster.yaml"
            text = cluster_yaml(each.layout, "demo/pdserve-demo", SLO, 2177, "a comment")
            path.write_text(text)
            config = load_cluster(path).config
            assert config.slo.ttft_ms == 200 and config.engine.max_model_len == 2177
            gpus = sum(
                getattr(config, key).replicas * config.worker(key).engine.num_ranks
                for key in config.worker_keys
            )
            assert gpus == number


def test_the_yaml_of_a_cpus_profile_asks_for_no_gpu(tmp_path: Path) -> None:
    best = candidates(profile(), LLAMA, LOAD, SLO, [2]).chosen[0].layout
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster_yaml(best, "demo/pdserve-demo", SLO, 2177, "a comment", is_cpu=True))
    config = load_cluster(path).config
    for key in config.worker_keys:
        assert config.deployment(key).num_gpus == 0
        assert config.worker(key).engine.device == "cpu"


def test_the_page_needs_nothing_else() -> None:
    chosen = candidates(profile(), LLAMA, LOAD, SLO, [2]).chosen
    search = GoodputSearch(chosen[0].layout, 10, LOAD, SLO, lambda job: outcome(0.95), 10)
    search.close_in(CLOSE)
    found = search.goodput
    plan = Plan([Planned(chosen[0].layout, found)], LOAD, SLO, "m", "H200", ["a <note>"])
    text = page(plan)
    assert "<svg" in text and "a &lt;note&gt;" in text and "http" not in text.lower()
