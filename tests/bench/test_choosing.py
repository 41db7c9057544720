"""Tests benchmarks/router/choosing.py: its workloads, and that the default policy finds cached
prefixes (over real engines)."""

import itertools
import random

import pytest

from benchmarks.router.choosing import WORKLOADS, measure


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_the_same_for_a_seed_and_fit_the_model(name: str) -> None:
    arrivals = WORKLOADS[name](random.Random(3), 200)
    assert (
        arrivals == WORKLOADS[name](random.Random(3), 200) != WORKLOADS[name](random.Random(4), 200)
    )
    assert len(arrivals) == 200 and all(a.at < b.at for a, b in itertools.pairwise(arrivals))
    assert all(0 < len(arrival.prompt) < 2000 for arrival in arrivals)


def test_conversations_repeat_what_was_said() -> None:
    arrivals = WORKLOADS["conversations"](random.Random(3), 200)
    last: dict[str, tuple[int, ...]] = {}
    for arrival in arrivals:
        before = last.get(arrival.session, ())
        assert arrival.prompt[: len(before)] == before and len(arrival.prompt) > len(before)
        last[arrival.session] = arrival.prompt


@pytest.mark.lengthy
async def test_the_default_computes_a_third_of_what_round_robin_does() -> None:
    """Eight system prompts of 32 blocks, four workers of 160."""
    arrivals = WORKLOADS["shared"](random.Random(1), 120)
    computed = {
        p: (await measure(p, arrivals, 4, 160))["computed"] for p in ("round-robin", "default")
    }
    least = 8 * 512 + 120 * 32
    assert least <= 3 * computed["default"] <= computed["round-robin"]
