"""When a request is split, and when the decode worker computes its prompt."""

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from router.harness import Harness
from router.workers import join, made, send_prompt
from support.clock import Clock

from pdserve.protocol.block_digests import NOBODY
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.choosing.choose import Assignment, Chooser, Demand
from pdserve.router.choosing.predict import Predictor
from pdserve.router.choosing.split_rule import HANDOFF_MS, STALL_WEIGHT, split_ms, whole_ms
from pdserve.router.fleet.prefix_index import PromptBlocks
from pdserve.router.fleet.stall_budget import BURST_MS, SHARE, StallBudget
from pdserve.router.fleet.worker_state import WorkerState

Make = Callable[..., Harness]
NOW = Clock().seconds
pytestmark = pytest.mark.usefixtures("clock")
PROMPT = tuple(range(3, 1003))  # 100 ms at 10,000 tokens/s


def pair(p: dict[str, Any], d: dict[str, Any]) -> tuple[WorkerState, WorkerState]:
    """A prefill and a decode worker that reported so much, over a link that moves PROMPT in 6.4
    ms."""
    prefill = made("p", "prefill", **p)
    decode = made("d", "decode", **d)
    join(prefill, decode, bytes_per_s=1e7)
    return prefill, decode


def plan(
    workers: tuple[WorkerState, ...], prompt: tuple[int, ...] = PROMPT, **change: Any
) -> Assignment:
    options = {
        "split_min_tokens": change.pop("split_min_tokens", 1),
        "split": change.pop("split", "auto"),
    }
    asked: dict[str, Any] = {
        "num_prompt_tokens": len(prompt),
        "num_tokens": 1010,
        "prompt": PromptBlocks(prompt, NOBODY),
    }
    return Chooser(**options).choose(workers, Demand(**(asked | change)))


@pytest.mark.parametrize(
    ("p", "d", "reason"),
    [
        ({}, {}, "cheaper"),  # nobody is stalled, and the hand-off is saved
        # 15 ms of its one neighbour against 16.4 of the hand-off
        ({}, {"num_running": 1}, "cheaper"),
        ({}, {"num_running": 2}, "pays"),
        ({"queue_tokens": 600}, {"num_running": 4}, "cheaper"),  # 60 + 16.4 ms against 60
        ({"queue_tokens": 300}, {"num_running": 4}, "pays"),  # 30 + 16.4 ms against 60
        # D's own queue counts both ways
        ({"queue_tokens": 600}, {"num_running": 4, "queue_tokens": 300}, "cheaper"),
        ({"holds": PROMPT}, {"num_running": 1}, "pays"),
        # D has it, too: nothing to compute
        ({"holds": PROMPT}, {"num_running": 1, "holds": PROMPT}, "cheaper"),
        ({"prefill_tokens_per_s": 40_000.0}, {}, "pays"),
        ({}, {"free_blocks": 0}, "cheaper"),  # it waits for blocks either way
    ],
)
def test_the_cheaper_way_is_taken(p: dict[str, Any], d: dict[str, Any], reason: str) -> None:
    chosen = plan(pair(p, d))
    assert chosen.reason == reason and (chosen.prefill is not None) == (reason == "pays")


def test_costs_are_made_of_what_was_predicted() -> None:
    p, d = pair({"queue_tokens": 0, "holds": PROMPT[:480]}, {"num_running": 3})
    predictor = Predictor([p, d], PromptBlocks(PROMPT, NOBODY), len(PROMPT), NOW)
    load = predictor.decode_load_ms(d)
    assert split_ms(p, d, predictor) == pytest.approx(52 + 6.4 + HANDOFF_MS + load)
    assert whole_ms(d, predictor) == pytest.approx(100 + load + STALL_WEIGHT * 3 * 100)


def test_what_is_asked_for_goes_before_what_pays() -> None:
    idle = pair({}, {})
    busy = pair({}, {"num_running": 8})
    assert (
        plan(idle, split="always").reason == "always"
        and plan(idle, split="always").prefill is idle[0]
    )
    assert plan(busy, split="never").reason == "never"
    assert plan(busy, split_min_tokens=1001).reason == "short"
    assert plan(busy, resumed=True).reason == "resumed"
    busy[1].peers.clear()
    assert plan(busy, split="always").reason == "no-prefill"
    assert plan(busy[1:]).reason == "no-prefill"


def test_whole_prompts_do_not_take_more_of_d_than_its_budget() -> None:
    workers = pair({"queue_tokens": 20_000}, {"num_running": 4})
    prompt = PromptBlocks(PROMPT, NOBODY)
    assert plan(workers).reason == "cheaper"
    send_prompt(workers, workers[1], prompt, "full")
    chosen = plan(workers)
    assert chosen.reason == "budget" and chosen.prefill is workers[0]
    idle = pair({"queue_tokens": 20_000}, {})
    send_prompt(idle, idle[1], prompt, "full")
    assert plan(idle).reason == "cheaper", "nobody is there to be stalled"


def test_the_budget_fills_with_time() -> None:
    budget = StallBudget()
    assert budget.allows(5000.0, 10.0), "one of any length"
    budget.spend(BURST_MS / 2, 10.0)
    assert budget.allows(BURST_MS / 2, 10.0) and not budget.allows(BURST_MS / 2 + 1, 10.0)
    budget.spend(BURST_MS / 2, 10.0)
    until_empty = BURST_MS / 1000 / SHARE
    assert not budget.allows(5000.0, 10.0 + 0.9 * until_empty) and budget.allows(
        5000.0, 10.01 + until_empty
    )


async def test_decisions_are_counted_and_both_ways_give_the_same_answer(
    make: Make, clock: Clock
) -> None:
    harness = await make(1, 1, split="auto", now=clock).start()
    prompt = tuple(range(3, 103))
    sampling = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    harness.check(await harness.collect(prompt, sampling), prompt, sampling)
    assert harness.decodes[0].submits("full") and not harness.prefills[0].submits()
    decode = next(worker for worker in harness.fleet.workers if worker.worker_id == "d0")
    decode.num_others = 20  # sequences of other routers
    other = prompt[::-1]
    harness.check(await harness.collect(other, sampling), other, sampling)
    assert harness.prefills[0].submits() and harness.decodes[0].submits("decode")
    async with harness.http() as client:
        page = (await client.get("/metrics")).text
    counts = {
        (sample.labels["plan"], sample.labels["reason"]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "pdserve_router_split_decisions_total"
    }
    assert counts == {("whole", "cheaper"): 1, ("split", "pays"): 1}
