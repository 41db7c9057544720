"""Which worker each policy picks, and what predictions are made of."""

from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from pydantic import ValidationError
from router.fake_worker import expected_tokens
from router.harness import Harness, until
from router.workers import join, made, send_prompt
from support.clock import Clock

from pdserve.configs.router import RouterConfig
from pdserve.protocol.block_digests import NOBODY, BlockHasher, Tenant
from pdserve.protocol.events import HomeState, PoolChange
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.choosing.choose import OVERLOADED_MS, Chooser, Demand
from pdserve.router.choosing.policies import POLICIES
from pdserve.router.choosing.predict import (
    ASSUMED_TOKENS_PER_S,
    DECODE_TOKENS,
    POOL_BYTES_PER_S,
    Predictor,
)
from pdserve.router.fleet.prefix_index import PooledChunks, PromptBlocks
from pdserve.router.fleet.prompt_queue import MAX_UNREAD, PromptQueue
from pdserve.router.fleet.worker_state import WorkerState

Make = Callable[..., Harness]
NOW = Clock().seconds
pytestmark = pytest.mark.usefixtures("clock")
PROMPT = tuple(range(3, 203))


def whole(
    policy: str, workers: list[WorkerState], count: int = 12, session: str = ""
) -> Counter[str]:
    """How often each worker gets a prompt that is not split."""
    chooser = Chooser(1 << 20, policy)
    demand = Demand(len(PROMPT), 220, prompt=PromptBlocks(PROMPT, NOBODY), session=session)
    return Counter(chooser.choose(workers, demand).decode.worker_id for _ in range(count))


def test_the_configuration_names_the_policies_there_are() -> None:
    names = get_args(RouterConfig.model_fields["policy"].annotation)
    assert set(names) == set(POLICIES) and RouterConfig().policy == "default"
    with pytest.raises(
        ValidationError, match=r"policy\n.*'default', 'prefix', 'least-loaded' or 'round-robin'"
    ):
        RouterConfig(policy="best")
    with pytest.raises(
        ValueError, match=r"router\.policy must be one of round-robin, .*, not 'best'"
    ):
        Chooser(1, "best")


def test_each_policy_looks_at_its_own() -> None:
    workers = [
        made("cached", holds=PROMPT[:160], queue_tokens=900, num_running=8),
        made("idle"),
        made("busy", queue_tokens=5000),
    ]
    workers[1].outstanding_tokens = 10
    workers[2].outstanding_tokens = 5
    assert whole("round-robin", workers) == {"cached": 4, "idle": 4, "busy": 4}
    assert whole("least-loaded", workers) == {"idle": 12}
    assert whole("prefix", workers) == {"cached": 12}
    assert whole("default", workers) == {"idle": 12}
    workers[0] = made("cached", holds=PROMPT[:160], queue_tokens=100)
    assert whole("default", workers) == {"cached": 12}, (
        "10 ms of queue against 16 ms of computing, twice"
    )


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({}, {"queue_tokens": 100}),
        ({}, {"num_running": 1}),
        ({}, {"free_blocks": 3}),
        ({"prefill_tokens_per_s": 40_000.0}, {}),
        ({"holds": PROMPT[:32]}, {}),
        ({"queue_tokens": 100, "prefill_tokens_per_s": 40_000.0}, {"queue_tokens": 50}),
        ({"holds": PROMPT, "free_blocks": 1}, {}),
    ],
)
def test_the_default_weighs_every_part(better: dict[str, Any], worse: dict[str, Any]) -> None:
    assert whole("default", [made("worse", **worse), made("better", **better)]) == {"better": 12}


def test_predictions_are_milliseconds_of_what_workers_report() -> None:
    a = made("a", "prefill", holds=PROMPT[:64], queue_tokens=500, prefill_tokens_per_s=5000.0)
    b = made(
        "b", "decode", holds=PROMPT[:160], prefill_tokens_per_s=0.0, num_running=3, free_blocks=1
    )
    join(a, b, bytes_per_s=2e6)
    predictor = Predictor([a, b], PromptBlocks(PROMPT, NOBODY), 200, NOW)
    assert predictor.queue_ms(a) == pytest.approx(100)
    assert predictor.compute_ms(a) == pytest.approx((200 - 64) / 5)
    assert predictor.speed(b) == 5000, "as others that were measured"
    assert predictor.decode_load_ms(b) == pytest.approx(3 * DECODE_TOKENS / 5)
    assert predictor.transfer_ms(b, a) == pytest.approx(40 * 1024 / 16 / 2e6 * 1000)
    assert predictor.memory_ms(b) == pytest.approx(1000 * 2 / 3) and predictor.memory_ms(a) == 0
    assert Predictor([], None, 7, 0.0).speed(b) == ASSUMED_TOKENS_PER_S


def test_a_few_slow_prompts_keep_others_away_only_until_their_speed_is_vague() -> None:
    """The first steps of a process are slow at times. Without prompts it could not show better."""
    slow = made("slow", "prefill", prefill_tokens_per_s=900.0)
    busy = made("busy", "both", prefill_tokens_per_s=5000.0)
    fresh = made("fresh", "prefill", prefill_tokens_per_s=0.0)
    fast = made("fast", "decode", prefill_tokens_per_s=20_000.0)
    make_vague(fast)

    def speeds() -> list[float]:
        workers = [slow, busy, fresh, fast]
        predictor = Predictor(workers, PromptBlocks(PROMPT, NOBODY), 200, NOW)
        assert predictor.is_measured
        return [predictor.full_speed(worker) for worker in workers]

    assert speeds() == [900, 5000, 900, 20_000]
    make_vague(slow)
    assert speeds() == [5000, 5000, 5000, 20_000], "a fast one gets prompts, and shows if it is not"
    make_vague(busy)
    assert speeds() == [900, 5000, 900, 20_000], "vague speeds are better than none"


def make_vague(worker: WorkerState) -> None:
    assert worker.snapshot is not None
    worker.snapshot = msgspec.structs.replace(worker.snapshot, is_prefill_speed_vague=True)


def test_a_worker_of_several_homes_has_one_queue_and_the_room_of_its_largest() -> None:
    """Both homes take prompts from the queue; a prompt is computed in one, at the speed of one, and
    must fit in one."""
    prompt = list(range(160))
    homes = (HomeState(3, 4), HomeState(1, 7))
    alone = made("a", queue_tokens=1000, num_running=4, free_blocks=11)
    worker = made("b", queue_tokens=1000, num_running=4, free_blocks=11, homes=homes)
    predictor = Predictor([alone, worker], PromptBlocks(prompt, NOBODY), len(prompt), NOW)
    assert predictor.compute_ms(worker) == predictor.compute_ms(alone)
    assert predictor.queue_ms(worker) == pytest.approx(predictor.queue_ms(alone) / 2)
    assert predictor.decode_load_ms(worker) == pytest.approx(predictor.decode_load_ms(alone) / 2)
    assert predictor.memory_ms(alone) == 0, "10 blocks, and 11 are free"
    assert predictor.memory_ms(worker) == pytest.approx(1000 * 3 / 10)


def test_a_split_prefers_the_d_that_has_least_to_pull_and_the_faster_link() -> None:
    p = made("p", "prefill")
    near = made("near", "decode")
    far = made("far", "decode")
    holder = made("holder", "decode", holds=PROMPT[:160])
    join(p, near, bytes_per_s=1e6)
    join(p, far, holder, bytes_per_s=1e5)

    def decode_of(workers: list[WorkerState]) -> set[str]:
        chooser = Chooser(1, split="always")
        demand = Demand(len(PROMPT), 220, prompt=PromptBlocks(PROMPT, NOBODY))
        return {chooser.choose(workers, demand).decode.worker_id for _ in range(4)}

    assert decode_of([p, far, near]) == {"near"}
    assert decode_of([p, far, holder]) == {"holder"}


def test_the_queue_fills_by_what_is_sent_and_drains_at_the_workers_speed() -> None:
    queue = PromptQueue()
    queue.reported(1000, 10.0)
    assert queue.left(10.25, 2000.0) == 500 and queue.left(11.0, 2000.0) == 0
    queue.sent(("a", 0), 300, 10.25, 2000.0)
    assert queue.left(10.3, 2000.0) == pytest.approx(700)


def test_each_prompt_of_a_queue_counts_once_when_a_report_comes() -> None:
    queue = PromptQueue()
    queue.sent(("a", 0), 300, 10.25, 2000.0)
    queue.sent(("b", 1), 50, 10.26, 2000.0)
    queue.reported(100, 10.3)
    assert queue.left(10.3, 2000.0) == 450, "the report was made before they were read there"
    queue.read(("a", 0))
    assert queue.left(10.3, 2000.0) == 450, "the last report did not count it"
    queue.reported(400, 10.35, unread_s=0.09)
    assert queue.left(10.35, 2000.0) == 450, "told, and counted there"
    queue.reported(100, 15.3)
    assert queue.left(15.3, 2000.0) == 100, "read long ago, though nothing was told"


def test_a_prompt_that_ends_unread_leaves_the_queue() -> None:
    queue = PromptQueue()
    queue.reported(100, 10.0)
    queue.sent(("a", 0), 300, 10.0, 2000.0)
    queue.ended(("a", 0))
    assert queue.left(10.0, 2000.0) == 100
    queue.sent(("a", 1), 300, 10.0, 2000.0)
    queue.read(("a", 1))
    queue.ended(("a", 1))
    assert queue.left(10.0, 2000.0) == 400, "the next report tells what is left of it"


def test_a_queue_of_which_nobody_reports_remembers_a_limited_number_of_prompts() -> None:
    queue = PromptQueue()
    for number in range(3 * MAX_UNREAD):
        queue.sent((str(number), 0), 1, 10.0 + number, 1.0)
    queue.reported(0, 1e6, 1e6)
    assert queue.left(1e6, 1.0) == MAX_UNREAD


def test_a_burst_spreads_and_a_burst_of_one_prefix_stays_until_the_queue_costs_more() -> None:
    def burst(same: bool) -> Counter[str]:
        workers = [made(f"w{i}") for i in range(4)]
        chooser = Chooser(1 << 20)
        chosen = Counter[str]()
        for number in range(40):
            tokens = (
                (*range(3, 1003), number)
                if same
                else tuple(range(3 + number * 1001, 3 + (number + 1) * 1001))
            )
            prompt = PromptBlocks(tokens, NOBODY)
            worker = chooser.choose(workers, Demand(len(tokens), 20, prompt=prompt)).decode
            send_prompt(workers, worker, prompt, "full")
            chosen[worker.worker_id] += 1
        return chosen

    assert set(burst(same=False).values()) == {10}
    spread = burst(same=True)
    assert max(spread.values()) > 20 and sum(spread.values()) == 40


def test_a_session_keeps_its_worker_while_others_come_and_go() -> None:
    workers = [made(f"w{i}") for i in range(8)]

    def owner(session: str, among: list[WorkerState]) -> str:
        [(worker_id, count)] = whole("default", among, 3, session).items()
        assert count == 3
        return worker_id

    owners = {f"s{i}": owner(f"s{i}", workers) for i in range(40)}
    assert len(set(owners.values())) >= 6
    gone = [worker for worker in workers if worker.worker_id != "w3"]
    moved = {session for session, worker_id in owners.items() if owner(session, gone) != worker_id}
    assert moved == {session for session, worker_id in owners.items() if worker_id == "w3"}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_session_never_goes_to_an_overloaded_worker(policy: str) -> None:
    workers = [made("w0"), made("w1")]
    [home] = whole(policy, workers, 2, "mine")
    other = ({"w0", "w1"} - {home}).pop()
    overload = int(2 * OVERLOADED_MS * 10)
    workers = [made(home, queue_tokens=overload), made(other)]
    assert whole(policy, workers, 2, "mine") == {other: 2}


async def test_the_session_header_and_the_salt_reach_the_choice(make: Make, clock: Clock) -> None:
    harness = await make(0, 4, now=clock).start()
    async with harness.http() as client:
        for number in range(12):
            body = {"model": "demo", "prompt": [5 + number, 6, 7], "max_tokens": 1}
            answer = await client.post(
                "/v1/completions", json=body, headers={"x-session-id": "one"}
            )
            assert answer.status_code == 200
            await until(lambda: not any(worker.legs for worker in harness.fleet.workers))
    assert sorted(len(worker.submits()) for worker in harness.decodes) == [0, 0, 0, 12]
    prompt = tuple(range(3, 103))
    for salt in ("a", "b"):
        await harness.service.collect(
            [prompt], SamplingParams(max_tokens=2, seed=1), cache_salt=salt
        )
    held = [
        PromptBlocks(prompt, Tenant("a")).num_cached_tokens(w.cached, "model", 16, NOW)
        for w in _all(harness)
    ]
    assert sorted(held) == [0, 0, 0, 96]


async def test_requests_follow_the_prefix_that_was_sent_before(make: Make, clock: Clock) -> None:
    harness = await make(0, 3, policy="default", now=clock).start()
    sampling = SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
    for number in range(9):
        prompt = (*([10 + number % 3] * 200), number)
        results = await harness.collect(prompt, sampling)
        assert results[0].token_ids == expected_tokens(prompt, sampling, 0)[0]
    for worker in harness.decodes:
        assert (
            len({submit.prompt_token_ids[0] for submit in worker.submits()})
            == len(worker.submits()) / 3
        )


def _all(harness: Harness) -> list[WorkerState]:
    return harness.fleet.workers


def pooled(*workers: WorkerState, tokens: tuple[int, ...], chunk: int = 32) -> None:
    """Their KV pool, which they share, holds the whole chunks of the tokens."""
    digests: list[bytes] = []
    BlockHasher("model", 16).extend(digests, tokens, NOBODY)
    shared = PooledChunks()
    shared.changed(
        PoolChange(
            found=b"".join(d[:8] for d in digests[chunk // 16 - 1 :: chunk // 16]), missed=b""
        )
    )
    for worker in workers:
        worker.hello = msgspec.structs.replace(worker.hello, kv_pool="pool", pool_chunk=chunk)
        worker.pooled = shared


def test_what_the_pool_holds_is_fetched_not_computed() -> None:
    holder = made("holder", holds=PROMPT[:160])
    near = made("near")
    far = made("far")
    pooled(holder, near, tokens=PROMPT)
    predictor = Predictor([holder, near, far], PromptBlocks(PROMPT, NOBODY), len(PROMPT), NOW)
    assert [predictor.fetched_tokens(worker) for worker in (holder, near, far)] == [32, 192, 0]
    assert [predictor.computed_tokens(worker) for worker in (holder, near, far)] == [8, 8, 200]
    size = 1024 / 16  # bytes of a token's rows there
    assert predictor.compute_ms(near) == pytest.approx(0.8 + 1000 * 192 * size / POOL_BYTES_PER_S)
    assert predictor.compute_ms(far) == pytest.approx(20.0)
    assert whole("default", [near, far]) == {"near": 12}
    send_prompt([near, far], near, PromptBlocks(PROMPT, NOBODY), "full")
    assert near.queue.left(NOW, 10_000.0) <= 8


def test_less_than_a_chunk_is_not_asked_for() -> None:
    worker = made("worker", holds=PROMPT[:176])
    pooled(worker, tokens=PROMPT)
    predictor = Predictor([worker], PromptBlocks(PROMPT, NOBODY), len(PROMPT), NOW)
    assert predictor.fetched_tokens(worker) == 0 and predictor.computed_tokens(worker) == 24


async def test_workers_of_one_pool_share_what_each_says(make: Make, clock: Clock) -> None:
    harness = make(now=clock)
    for fake in (*harness.prefills, *harness.decodes):
        fake.kv_pool = "here"
    await harness.start()
    digests: list[bytes] = []
    BlockHasher("model", 16).extend(digests, PROMPT, NOBODY)
    harness.prefills[0].push(None, [PoolChange(found=digests[1][:8], missed=b"")])
    prompt = PromptBlocks(PROMPT, NOBODY)

    def known() -> list[int]:
        return [
            prompt.num_pooled_tokens(w.pooled, "model", 16, 32)
            for w in harness.fleet.workers
            if w.pooled
        ]

    await until(lambda: known() == [32, 32])
    harness.decodes[0].push(None, [PoolChange(found=b"", missed=digests[1][:8])])
    await until(lambda: known() == [0, 0])
