"""Workers of several ranks, each a process, through everything but Ray: HTTP, router, KV by NIXL
between unlike degrees of tensor parallelism and unlike stages. The tokens are those of one engine
of one rank.
"""

import asyncio
import itertools
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.hosts import Host, hosts
from support.quantised import write_kv_scales
from support.served import DEMO, Cluster, cluster
from support.tiny_models import make_speaking
from support.waiting import until_async

from demo.recall import MAX_ANSWER_TOKENS, recall_prompts
from pdserve.configs.transfer import PoolConfig
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.kvtransfer.pool.lmcache_server import PoolServer

ONE, TP2, TP4 = (1, 1), (2, 1), (4, 1)  # ranks a stage, stages
PP2, PP4, BOTH = (1, 2), (1, 4), (2, 2)  # PP4: stages of one and of two layers
DEGREES = [(TP2, ONE), (ONE, TP2), (TP2, TP4), (TP4, TP2), (TP2, TP2)]
DEGREES += [(PP2, TP2), (BOTH, ONE), (ONE, PP2), (PP4, PP2), (PP2, BOTH)]
DEGREES += [(PP2, TP4)]
SAMPLE = {(TP2, ONE), (ONE, TP2), (PP2, TP2), (ONE, PP2)}
DP2, ALL4, DP2_PP2 = (1, 1, 2), (2, 1, 2), (1, 2, 2)  # with experts on all ranks of a stage
MIXTURES = [
    ("qwen3-moe", ONE, DP2),
    ("qwen3-moe", DP2, TP2),
    ("qwen3-moe", TP2, DP2_PP2),
    ("qwen3-moe", ALL4, PP2),
    ("deepseek-v3", DP2, DP2),
    ("deepseek-v3", DP2_PP2, ALL4),
]
MIXTURES_SAMPLE = {("qwen3-moe", DP2, TP2), ("deepseek-v3", DP2, DP2)}
FAMILIES = [  # what is stored or computed differs in kind
    ("gpt-oss", TP2, PP2),  # sinks, a window in every second layer, experts in slices
    ("gemma3", PP2, TP2),  # norms around both halves, a window in two layers of three
    ("gemma2", BOTH, ONE),  # soft caps
    ("olmo2", TP4, TP2),  # norms of q and k over all heads; TP4 stores each KV head twice
    ("qwen2", PP2, BOTH),  # biases of q, k and v
    ("phi4-mini", TP2, ONE),  # fused matrices, long ropes
    ("glm4", ONE, PP2),  # half of a head's columns are rotated
    ("mixtral", TP2, TP4),  # a mixture in slices
    ("qwen2-moe", BOTH, TP2),  # a shared expert, one dense layer
    ("deepseek-v2", PP2, TP2),  # latents, of stages too
]
FOUND_S = 3.0  # of a death, which a hang-up tells at once, on busy cores
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 16},
    {"temperature": 0.9, "top_p": 0.95, "n": 2, "max_tokens": 12},
]


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    rng = random.Random(6)
    long = [p.prompt for p in recall_prompts(seed=78, num_prompts=3)]
    return long + [p[-rng.randrange(20, 500) :] for p in long for _ in range(5)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(DEMO), device="cpu")


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of DeepSeek's kind that speaks the demo's tokens."""
    return make_speaking("deepseek-v3", tmp_path_factory.mktemp("latents"))


async def assert_answers_of(llm: LLM, running: Cluster, prompts: list[str]) -> None:
    """The cluster answers as one engine does."""
    for settings in SETTINGS:
        params = [SamplingParams(**settings, seed=seed) for seed in range(len(prompts))]
        offline = [
            [(c.text, c.token_ids, c.finish_reason) for c in output.outputs]
            for output in llm.generate(prompts, params, use_tqdm=False)
        ]
        asked = (
            running.complete(prompt=prompt, seed=seed, return_token_ids=True, **settings)
            for seed, prompt in enumerate(prompts)
        )
        answers = await asyncio.gather(*asked)
        assert [
            [(c["text"], c["token_ids"], c["finish_reason"]) for c in answer["choices"]]
            for answer in answers
        ] == offline


async def assert_split_equals_one_rank(
    folder: Path,
    p: tuple[int, ...],
    d: tuple[int, ...],
    prompts: list[str],
    own: Mapping[str, dict] | None = None,
    **engine: Any,
) -> None:
    """A prefill worker of degrees p and a decode worker of degrees d answer as one engine does, and
    every rank of D has pulled. own: settings of P or of D alone."""
    llm = LLM(str(folder), device="cpu")
    with hosts(folder, "P", "D", engine=engine, degrees={"P": p, "D": d}, own=own) as started:
        async with cluster(*started) as running:
            await assert_answers_of(llm, running, prompts)
            assert await running.metric("pdserve_kv_transfers_total", outcome="done") > 0
            for rank in range(1, len(started[1].followers) + 1):
                await running.until_metric("pdserve_kv_transfer_bytes_total", 1, rank=str(rank))


@pytest.fixture
def pd(request: pytest.FixtureRequest) -> Iterator[list[Host]]:
    p, d, *settings = request.param
    engine = {"num_kv_blocks": 1024, "max_num_batched_tokens": 256, **dict(settings)}
    with hosts(DEMO, "P", "D", engine=engine, degrees={"P": p, "D": d}) as started:
        yield started


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "pd",
    [pytest.param(d, marks=[] if d in SAMPLE else [pytest.mark.slow]) for d in DEGREES],
    indirect=True,
    ids=[f"{p[0]}x{p[1]}to{d[0]}x{d[1]}" for p, d in DEGREES],
)
async def test_split_over_unlike_degrees_equals_one_rank(
    pd: list[Host], llm: LLM, prompts: list[str]
) -> None:
    """Greedy, and seeded with two choices each; long prompts are announced and come in parts."""
    async with cluster(*pd) as running:
        await assert_answers_of(llm, running, prompts)
        assert await running.metric("pdserve_kv_transfers_total", outcome="done") > 0
        for rank in range(1, len(pd[1].followers) + 1):
            await running.until_metric("pdserve_kv_transfer_bytes_total", 1, rank=str(rank))


@pytest.mark.slow
async def test_one_prefill_worker_of_four_ranks_feeds_two_decode_workers_of_two(
    llm: LLM, prompts: list[str]
) -> None:
    """Each rank of P has half of the heads of one rank of D, at either worker."""
    degrees = {"P": TP4, "D0": TP2, "D1": TP2}
    engine = {"num_kv_blocks": 1024, "max_num_batched_tokens": 256}
    with hosts(DEMO, *degrees, engine=engine, degrees=degrees) as started:
        async with cluster(*started) as running:
            await assert_answers_of(llm, running, prompts)
            for worker in started[1:]:
                for rank in ("0", "1"):
                    await running.until_metric(
                        "pdserve_kv_transfer_bytes_total", 1, worker=worker.worker_id, rank=rank
                    )


unlike_degrees = pytest.mark.parametrize(
    "degrees",
    [
        (ONE, TP2),
        pytest.param((TP2, ONE), marks=pytest.mark.slow),
        pytest.param((TP2, PP2), marks=pytest.mark.slow),
    ],
    ids=str,
)


@unlike_degrees
async def test_latents_are_read_from_any_rank(
    degrees: tuple[tuple[int, int], tuple[int, int]], latents: Path, prompts: list[str]
) -> None:
    """Every rank of a stage stores them whole."""
    await assert_split_equals_one_rank(latents, *degrees, prompts)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with scales of its KV cache that differ by head and layer, and so much that
    those of another head make wrong answers."""
    folder = Path(shutil.copytree(DEMO, tmp_path_factory.mktemp("scaled") / "demo"))
    write_kv_scales(folder, low=1 / 16, high=8)
    return folder


@unlike_degrees
async def test_rows_in_fp8_between_unlike_degrees(
    degrees: tuple[tuple[int, int], tuple[int, int]], scaled: Path
) -> None:
    """Each rank has its own heads' scales. Sums over ranks differ in their last bits, and so may
    what e4m3 makes of them: other tokens may follow, but the answers are right."""
    p, d = degrees
    asked = recall_prompts(seed=80, num_prompts=16)
    engine = {"kv_cache_dtype": "fp8", "num_kv_blocks": 1024, "max_num_batched_tokens": 256}
    with hosts(scaled, "P", "D", engine=engine, degrees={"P": p, "D": d}) as started:
        async with cluster(*started) as running:
            settings = {"temperature": 0, "max_tokens": MAX_ANSWER_TOKENS}
            answers = await asyncio.gather(
                *(running.complete(prompt=each.prompt, **settings) for each in asked)
            )
            found = [answer["choices"][0]["text"] for answer in answers]
            assert found == [each.answer for each in asked]
            assert await running.metric("pdserve_kv_transfers_total", outcome="done") > 0
            for rank in range(1, d[0] * d[1]):
                await running.until_metric("pdserve_kv_transfer_bytes_total", 1, rank=str(rank))


@pytest.mark.parametrize(
    ("family", "p", "d"),
    [
        pytest.param(*case, marks=[] if case in MIXTURES_SAMPLE else [pytest.mark.slow])
        for case in MIXTURES
    ],
)
async def test_experts_and_homes_of_unlike_degrees_equal_one_rank(
    family: str,
    p: tuple[int, ...],
    d: tuple[int, ...],
    tmp_path: Path,
    prompts: list[str],
) -> None:
    """Requests live in all homes of both sides; a prompt of one home of P goes to any of D's."""
    folder = make_speaking(family, tmp_path / family)
    await assert_split_equals_one_rank(folder, p, d, prompts, expert_parallel=True)


@pytest.mark.slow
async def test_a_worker_with_homes_that_leaves_ends_the_requests_of_all_of_them(
    tmp_path: Path, prompts: list[str]
) -> None:
    """None is moved, and new ones go to the other worker."""
    folder = make_speaking("qwen3-moe", tmp_path / "model")
    early, late = prompts[:4], prompts[4:14]
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    outputs = LLM(str(folder), device="cpu").generate(early + late, params, use_tqdm=False)
    settings = {"temperature": 0, "max_tokens": 200, "ignore_eos": True, "return_token_ids": True}
    engine = {"expert_parallel": True}
    degrees = {"A0": DP2, "A1": DP2}
    with hosts(folder, *degrees, engine=engine, degrees=degrees) as (leaving, other):
        async with cluster(leaving) as running:
            [state] = running.fleet.workers
            asking = [asyncio.create_task(running.complete(prompt=p, **settings)) for p in early]
            await until_async(
                lambda: (
                    state.snapshot is not None
                    and [home.num_running > 0 for home in state.snapshot.homes] == [True, True]
                )
            )
            running.join(other)
            await running.settled(leaving, other)
            running.fleet.leave(leaving.worker_id)
            assert len(state.legs) == len(early), "they have not ended before"
            asking += [asyncio.create_task(running.complete(prompt=p, **settings)) for p in late]
            answers = await asyncio.gather(*asking)
            await until_async(lambda: leaving.worker_id not in running.fleet.worker_ids)
            assert await running.metric("pdserve_router_failovers_total") == 0
        async with cluster(leaving, other) as observer:
            for worker, count in ((leaving, len(early)), (other, len(late))):
                name, label = "pdserve_request_queue_time_seconds_count", worker.worker_id
                await observer.until_metric(name, count, worker=label)
                assert await observer.metric(name, worker=label) == count
    assert [answer["choices"][0]["token_ids"] for answer in answers] == [
        output.outputs[0].token_ids for output in outputs
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "d", "whole"), [(TP2, TP2, "D"), (TP2, DP2, "D"), (ALL4, TP2, "P")], ids=str
)
async def test_experts_in_slices_at_one_side_and_whole_at_the_other(
    p: tuple[int, ...], d: tuple[int, ...], whole: str, tmp_path: Path, prompts: list[str]
) -> None:
    """One side alone is expert parallel: rows of a KV cache do not depend on it."""
    folder = make_speaking("qwen3-moe", tmp_path / "model")
    own = {whole: {"expert_parallel": True}}
    await assert_split_equals_one_rank(folder, p, d, prompts, own)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "p", "d"), FAMILIES, ids=[family for family, *_ in FAMILIES])
async def test_families_over_unlike_degrees_equal_one_rank(
    family: str, p: tuple[int, int], d: tuple[int, int], tmp_path: Path, prompts: list[str]
) -> None:
    await assert_split_equals_one_rank(make_speaking(family, tmp_path / family), p, d, prompts)


@pytest.mark.parametrize("pd", [(ONE, TP2), (ONE, PP2)], indirect=True, ids=["tp", "pp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_takes_its_engine_along(pd: list[Host], rank: int) -> None:
    _, d = pd
    processes = [d.process, *d.followers]
    began = time.monotonic()
    processes[rank].kill()
    for process in processes:
        process.join(FOUND_S)
        assert process.exitcode is not None, f"{process.name} lives on"
    assert time.monotonic() - began < FOUND_S


@pytest.mark.parametrize(
    "pd",
    [(ONE, ranks, ("step_deadline_s", 1.0)) for ranks in (TP2, PP2)],
    indirect=True,
    ids=["tp", "pp"],
)
async def test_a_rank_that_stands_still_ends_its_engine(pd: list[Host]) -> None:
    """The process that waits for it ends; whoever owns both ends the frozen one (over Ray:
    test_ranks_ray.py)."""
    prompt = recall_prompts(seed=79, num_prompts=1)[0].prompt
    _, d = pd
    [follower] = d.followers
    assert follower.pid is not None
    try:
        async with cluster(*pd) as running:
            answer = asyncio.create_task(
                running.complete(prompt=prompt, max_tokens=500, ignore_eos=True)
            )
            await running.until_metric("pdserve_kv_transfers_total", 1, outcome="done")
            os.kill(follower.pid, signal.SIGSTOP)
            began = time.monotonic()
            assert not answer.done(), "nothing was left to do"
            await asyncio.to_thread(d.process.join, 10.0)
            assert d.process.exitcode == 1 and 0.9 < time.monotonic() - began < 3.0
            answer.cancel()
    finally:
        follower.kill()


POOL_BYTES = "pdserve_kv_pool_bytes_total"


async def until_stored(running: Cluster, prompts: list[str], labels: list[dict[str, str]]) -> None:
    """Asks until each of these ranks has stored rows. Ranks connect to the pool in the background,
    and what ends before that is not stored."""
    async with asyncio.timeout(60):
        for prompt in itertools.cycle(prompts):
            await running.complete(prompt=prompt, temperature=0, max_tokens=2, seed=1)
            await asyncio.sleep(1.2)  # counts are told once a second
            stored = [
                await running.metric(POOL_BYTES, operation="store", **each) for each in labels
            ]
            if all(stored):
                return


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("keys and values", TP2),
        ("keys and values", PP4),
        ("keys and values in fp8", TP2),
        ("latents", TP2),
        ("latents", DP2),
    ],
)
async def test_ranks_keep_and_find_rows_in_a_pool(
    kind: str, ranks: tuple[int, ...], latents: Path, scaled: Path, prompts: list[str]
) -> None:
    """A worker of several ranks takes rows from the pool that another one has computed, as far as
    all of its ranks find them. Every rank reports what it has moved."""
    chunk = 64
    server = PoolServer(PoolConfig(mode="start", chunk_tokens=chunk, l1_gib=0.25))
    pool = {
        "mode": "connect",
        "address": server.address,
        "chunk_tokens": chunk,
        "request_deadline_ms": 5000,
    }
    prompt = prompts[0]
    model = {"keys and values": DEMO, "latents": latents}.get(kind, scaled)
    kv_dtype = "fp8" if model is scaled else "auto"
    llm = LLM(str(model), device="cpu", kv_cache_dtype=kv_dtype)
    [wanted] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16, seed=1))
    try:
        server.wait_ready()
        with hosts(
            model,
            "A0",
            "A1",
            engine={"expert_parallel": kind == "latents", "kv_cache_dtype": kv_dtype},
            degrees={"A0": ranks, "A1": ranks},
            transfer={"pool": pool},
        ) as workers:
            # of several homes one has the request, so only the sum of their ranks is known
            labels = [{"rank": str(rank)} for rank in range(math.prod(ranks))]
            counted = labels if len(ranks) == 2 else [{}]
            for worker, operation in zip(workers, ("store", "retrieve"), strict=True):
                async with cluster(worker) as running:
                    await until_stored(running, prompts[1:], counted)
                    before = [
                        await running.metric(POOL_BYTES, operation=operation, **each)
                        for each in counted
                    ]
                    answer = await running.complete(
                        prompt=prompt, temperature=0, max_tokens=16, seed=1
                    )
                    assert answer["choices"][0]["text"] == wanted.outputs[0].text
                    for each, moved in zip(counted, before, strict=True):
                        await running.until_metric(
                            POOL_BYTES, moved + 1, operation=operation, **each
                        )
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (len(wanted.prompt_token_ids) - 1) // chunk * chunk
    finally:
        server.close()
