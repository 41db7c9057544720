"""Tests benchmarks/router/split_rule.py: the rule over paced engines on paper, if prefill, decode,
both or neither is the bottleneck, and with several routers."""

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.router.paper_cluster import PaperCluster
from benchmarks.router.paper_worker import Request, rows_within, step_ms
from benchmarks.router.split_rule import figures, layout_of, poisson, simulate

Figures = dict[str, float]
# Differences between two runs of a few hundred requests that mean nothing.
NOISE = 0.015


def run(
    mode: str,
    requests: list[Request],
    workers: tuple[int, int] = (1, 1),
    promise: tuple[float, float] = (200.0, 7.0),
    **change: Any,
) -> Figures:
    return figures(simulate(layout_of(mode, *workers, **change), requests, *promise))


def drawn(rate: float, prompt: int, tokens: int, count: int = 400) -> Callable[[], list[Request]]:
    return lambda: poisson(rate, prompt, tokens, count, seed=3)


@pytest.mark.parametrize(
    ("load", "workers", "promise"),
    [
        pytest.param(drawn(18, 2048, 128), (1, 1), (200.0, 7.0), id="prefill is the bottleneck"),
        pytest.param(drawn(22, 256, 512, 300), (2, 1), (200.0, 5.5), id="decode is the bottleneck"),
        pytest.param(drawn(26, 2048, 128), (1, 1), (200.0, 7.0), id="both are saturated"),
        pytest.param(drawn(5, 1024, 64), (1, 1), (200.0, 7.0), id="neither is"),
        pytest.param(drawn(40, 2048, 128, 500), (2, 2), (200.0, 7.0), id="several of each"),
    ],
)
def test_auto_is_at_least_the_best_of_the_others(
    load: Callable[[], list[Request]], workers: tuple[int, int], promise: tuple[float, float]
) -> None:
    others = ("always split", "whole, not paced", "whole, paced", "auto of old: 5 %")
    good = {mode: run(mode, load(), workers, promise)["good"] for mode in (*others, "auto")}
    assert good["auto"] >= max(good[mode] for mode in others) - NOISE, good


def test_a_run_is_the_same_under_a_seed() -> None:
    load = drawn(18, 2048, 128, 200)
    assert run("auto", load()) == run("auto", load())


@pytest.mark.parametrize(("period_ms", "least"), [(100.0, 0.9), (1000.0, 0.75)])
def test_several_routers_do_not_overdraw_a_decode_worker(period_ms: float, least: float) -> None:
    """Four routers, none of which hears of the others' prompts before the worker tells. Streams
    keep their promise whatever comes; first tokens pay for the older view."""
    load = drawn(15, 2048, 128, 500)
    alone = run("auto", load())
    four = run("auto", load(), num_routers=4, load_period_ms=period_ms)
    assert four["tpot_p99"] <= 7.0 and alone["tpot_p99"] <= 7.0
    assert four["good"] >= least * alone["good"], (alone, four)


@pytest.mark.parametrize(("rate", "num_routers"), [(18, 1), (18, 4), (22, 1), (22, 4)])
def test_under_an_even_load_the_split_does_not_swing(rate: int, num_routers: int) -> None:
    """18 prompts a second fill P, and D must take some of 22. First tokens take as long at the end
    as in the middle, in each stretch of 50 requests."""
    even = [Request(number, 1000.0 * number / rate, 2048, 128) for number in range(500)]
    layout = layout_of("auto", num_routers=num_routers, load_period_ms=100.0)
    done = sorted(simulate(layout, even, 200.0, 7.0).done, key=lambda r: r.arrived)
    waits = [r.first - r.arrived for r in done][50:]
    mean = statistics.mean(waits)
    for start in range(0, len(waits), 50):
        assert statistics.mean(waits[start : start + 50]) == pytest.approx(mean, rel=0.2)


def test_after_a_burst_first_tokens_come_as_before() -> None:
    """Six seconds of twice the load, again and again. What was chosen then does not go on: after
    three seconds nearly all prompts are computed at once, and none waits half of what is promised.
    """
    moments = [0.0]
    while len(moments) < 600:
        is_burst = moments[-1] // 6000 % 2
        moments.append(moments[-1] + 1000 / (24 if is_burst else 12))
    requests = [Request(number, at, 2048, 128) for number, at in enumerate(moments)]
    done = simulate(layout_of("auto"), requests, 200.0, 7.0).done
    calm = [r.first - r.arrived for r in done if 3000 <= r.arrived % 12_000 < 6000]
    assert len(calm) > 90 and max(calm) < 100.0
    assert sum(wait <= 1.1 * min(calm) for wait in calm) >= 0.95 * len(calm)


def test_short_answers_keep_their_promise_beside_a_hand_off() -> None:
    load = drawn(10, 2048, 2, 200)
    assert run("auto", load(), promise=(400.0, 10.0))["good"] > 0.97
    assert run("always split", load(), promise=(400.0, 10.0))["good"] < 0.5


def test_every_prompt_gets_its_first_token() -> None:
    """Far more than the workers can do, of lengths that differ 60-fold: none starves."""
    requests = [
        Request(number, 20.0 * number, 12_000 if number % 6 == 0 else 200, 64)
        for number in range(300)
    ]
    cluster = simulate(layout_of("auto"), requests, 200.0, 7.0)
    assert len(cluster.done) == 300 and cluster.reasons["late"]


def test_rows_fit_the_time_they_are_made_for() -> None:
    for start in (0, 8000):
        rows = rows_within(9.5, 10, 20_000.0, start)
        assert step_ms(10, 20_000.0, rows, rows * (start + rows / 2)) <= 9.5
        rows += 2
        assert step_ms(10, 20_000.0, rows, rows * (start + rows / 2)) > 9.5
    assert rows_within(4.0, 10, 20_000.0, 0) == 0


def test_a_closed_loop_sends_as_many_as_it_has_clients() -> None:
    requests = [Request(number, 0.0, 512, 16) for number in range(60)]
    cluster: PaperCluster = simulate(layout_of("auto"), requests, 200.0, 7.0, clients=6)
    done = sorted(cluster.done, key=lambda r: r.arrived)
    assert len(done) == 60 and [r.arrived for r in done[:6]] == [0.0] * 6
    moments = [r.arrived for r in done]
    for moment in moments:
        assert sum(r.arrived <= moment < r.last for r in done) <= 6
