"""The shipped demo model through everything but Ray: HTTP, router, separate worker processes, KV by
NIXL.

Serve's part (replicas, addressing, failures) is in tests/cluster; here is what must come out, token
for token.
"""

import asyncio
import os
import random
import signal
from collections.abc import Iterator

import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from support.hosts import Host, hosts
from support.processes import freeze
from support.served import DEMO, MODEL, Cluster, blocks_in_use, cluster
from support.trace_receivers import grpc_receiver

from demo.recall import recall_prompts
from pdserve.configs.router import RouterConfig
from pdserve.configs.traces import TracesConfig
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.router.request.timeline import PromptTimeline

NUM_PROMPTS = 200


@pytest.fixture(scope="module")
def pd() -> Iterator[list[Host]]:
    """Prompts of more than 256 tokens come in parts."""
    with hosts(
        DEMO, "P", "D", engine={"num_kv_blocks": 2048, "max_num_batched_tokens": 256}
    ) as started:
        yield started


@pytest.fixture(scope="module")
def alone() -> Iterator[list[Host]]:
    with hosts(DEMO, "A", engine={"num_kv_blocks": 2048}) as started:
        yield started


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    """Recall prompts, most of them short: the test runs on two cores."""
    rng = random.Random(5)
    long = [p.prompt for p in recall_prompts(seed=77, num_prompts=10)]
    short = [p[-rng.randrange(20, 600) :] for p in long for _ in range(NUM_PROMPTS // 10 - 1)]
    return long + short


GREEDY = {"temperature": 0, "max_tokens": 24}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "n": 2, "max_tokens": 16}


@pytest.mark.parametrize("count", [60, pytest.param(NUM_PROMPTS, marks=pytest.mark.slow)])
async def test_split_equals_aggregated_equals_offline(
    pd: list[Host], alone: list[Host], prompts: list[str], count: int
) -> None:
    """Greedy and seeded sampling with n=2: text and token ids."""
    prompts = prompts[:count]
    llm = LLM(str(DEMO), device="cpu")
    for settings in (GREEDY, SAMPLED):
        params = [SamplingParams(**settings, seed=seed) for seed in range(len(prompts))]
        offline = [
            [(c.text, c.token_ids, c.finish_reason) for c in output.outputs]
            for output in llm.generate(prompts, params, use_tqdm=False)
        ]
        async with cluster(*pd) as split:
            assert await _answers(split, prompts, settings) == offline
            assert await split.metric("pdserve_kv_transfers_total", outcome="done") > 0
            assert await split.metric("pdserve_kv_transfer_early_bytes_total") > 0
        async with cluster(*alone) as aggregated:
            assert await _answers(aggregated, prompts, settings) == offline
            assert await aggregated.metric("pdserve_kv_transfers_total") == 0


async def _answers(running: Cluster, prompts: list[str], settings: dict) -> list[list[tuple]]:
    gate = asyncio.Semaphore(16)

    async def one(seed: int, prompt: str) -> list[tuple]:
        async with gate:
            answer = await running.complete(
                prompt=prompt, seed=seed, return_token_ids=True, **settings
            )
        return [(c["text"], c["token_ids"], c["finish_reason"]) for c in answer["choices"]]

    return list(await asyncio.gather(*(one(seed, prompt) for seed, prompt in enumerate(prompts))))


async def test_metrics_prove_that_kv_moved(pd: list[Host], prompts: list[str]) -> None:
    async with cluster(*pd) as running:
        names = ("transfers", "transfer_bytes", "transfer_descriptors")
        before = [await running.metric(f"pdserve_kv_{name}_total") for name in names]
        await running.complete(prompt="A box of " + prompts[0], **GREEDY)
        for name, count in zip(names, before, strict=True):
            await running.until_metric(f"pdserve_kv_{name}_total", count + 1)
        assert await running.metric("pdserve_kv_arrivals_total", source="p2p") >= 1


async def test_timeline_of_a_hand_over(pd: list[Host], prompts: list[str]) -> None:
    """One prompt that is handed over in parts: bytes as the layout says, times that fit into each
    other."""
    async with cluster(*pd) as running:
        ready = await running.client.get("/ready")
        assert (ready.status_code, ready.json()["prefill"], ready.json()["decode"]) == (200, 1, 1)
        assert (await running.client.get("/live")).status_code == 200
        body = {"model": MODEL, "prompt": "The timeline of " + prompts[1], **GREEDY}
        answer = await running.client.post(
            "/v1/completions", json=body, headers={"x-pdserve-timeline": "1"}
        )
        [line] = msgspec.convert(answer.json()["timeline"], list[PromptTimeline])
        p, d = line.legs
        ends = ("prefill", "prefill", "handed over"), ("decode", "decode", "finished")
        assert ((p.role, p.phase, p.end), (d.role, d.phase, d.end)) == ends
        [moved] = d.kv
        hello = next(state.hello for state in running.fleet.workers if state.worker_id == p.worker)
        assert hello.kv_cache is not None and line.prompt_tokens > 256 and d.prepared_s is not None
        num_blocks = -(-line.prompt_tokens // hello.block_size)
        cached = moved.cached_tokens // hello.block_size
        assert (moved.source, moved.bytes) == (
            "p2p",
            (num_blocks - cached) * hello.block_size * hello.kv_cache.token_bytes,
        )
        assert 0 <= moved.early_bytes <= moved.bytes and moved.descriptors > 0 and moved.transport
        assert moved.lag_s is not None and 0 < moved.lag_s < line.total_s
        assert moved.gb_per_s is not None and moved.gb_per_s > 0
        assert (
            moved.wait_s <= moved.seconds <= (d.queue_s or 0) + 0.01
            and moved.reason == moved.detail == ""
        )
        assert p.complete and d.complete and line.unreported_s is None
        assert (
            line.first_token_s is not None and d.submitted_s is not None and d.ended_s is not None
        )
        assert (p.prefill_s or 0) < line.first_token_s <= d.submitted_s < d.ended_s <= line.total_s


@pytest.mark.parametrize("long", [False, True], ids=["", "in parts"])
async def test_trace_of_a_hand_over(
    pd: list[Host], prompts: list[str], long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    prompt = f"Traced {long}. " + (prompts[0] if long else "It is short.")
    with grpc_receiver() as receiver:
        traces = TracesConfig(endpoint=receiver.url)
        async with cluster(*pd, traces=traces) as running:
            await running.complete(prompt=prompt, **GREEDY)
            trace = await receiver.trace()
    assert sorted(" / ".join(received.path[1:]) for received in trace) == [
        "",
        "admission",
        "decode leg",
        "decode leg / decode",
        "decode leg / queue",
        "decode leg / queue / kv p2p",
        "prefill leg",
        "prefill leg / hand-off",
        "prefill leg / prefill",
        "prefill leg / queue",
    ]
    by_name = {" ".join(received.path[1:]): received for received in trace}
    p, d = by_name["prefill leg"], by_name["decode leg"]
    assert (p.has["pdserve.worker.role"], d.has["pdserve.worker.role"]) == ("prefill", "decode")
    assert by_name["decode leg queue kv p2p"].has["pdserve.kv.bytes"] > 0
    hand_off = by_name["prefill leg hand-off"].span
    submitted = by_name["decode leg queue"].span.start_time_unix_nano
    assert hand_off.start_time_unix_nano == submitted
    # As the workers told it: messages take the rest.
    for leg, name in ((p, "prefill"), (d, "decode")):
        span = by_name[f"{leg.span.name} {name}"].span
        took = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert 0 < took <= leg.has[f"pdserve.leg.{name}_s"] + 1e-5


async def test_openai_client_streams_a_chat(pd: list[Host]) -> None:
    async with cluster(*pd) as running:
        client = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        messages: list[ChatCompletionMessageParam] = [
            {"role": "user", "content": "What is 42 + 17?"}
        ]
        whole = await client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=32
        )
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=32, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == whole.choices[0].message.content
        assert "59" in "".join(pieces) and len(pieces) > 2
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model=MODEL, messages=messages, temperature=-1)
        await client.close()


async def test_half_of_a_hundred_disconnect_and_every_block_is_free(
    pd: list[Host], prompts: list[str]
) -> None:
    rng = random.Random(3)
    async with cluster(*pd) as running:

        async def one(index: int) -> bool:
            body = {
                "model": MODEL,
                "prompt": prompts[index],
                "max_tokens": 60,
                "stream": True,
                "ignore_eos": True,
            }
            patience = rng.uniform(0.01, 1.5) if index % 2 else 600.0
            try:
                async with asyncio.timeout(patience):
                    async with running.client.stream(
                        "POST", "/v1/completions", json=body
                    ) as answer:
                        return "data: [DONE]" in [line async for line in answer.aiter_lines()]
            except TimeoutError:
                return False

        before = await running.metric("pdserve_engine_generation_tokens_total")
        finished = await asyncio.gather(*(one(index) for index in range(100)))
        assert all(finished[::2]) and not all(finished[1::2])
        async with asyncio.timeout(60):
            while await blocks_in_use(running):
                await asyncio.sleep(0.1)
        spent = await running.metric("pdserve_engine_generation_tokens_total") - before
        assert spent < 100 * 60, "for those who left the engines went on"


async def test_killed_prefill_worker_between_two_requests(prompts: list[str]) -> None:
    with hosts(DEMO, "P", "D") as started:
        async with cluster(*started) as running:
            before = await running.complete(prompt=prompts[0], **GREEDY)
            started[0].kill()
            after = await running.complete(prompt=prompts[0], **GREEDY)
            assert after["choices"] == before["choices"]


async def test_two_prefill_and_two_decode_workers_recall(prompts: list[str]) -> None:
    with hosts(DEMO, "P0", "P1", "D0", "D1") as started:
        async with cluster(*started) as running:
            asked = recall_prompts(seed=1234, num_prompts=12)
            answers = await asyncio.gather(
                *(running.complete(prompt=p.prompt, **GREEDY) for p in asked)
            )
            right = [
                p.answer in a["choices"][0]["text"] for p, a in zip(asked, answers, strict=True)
            ]
            assert sum(right) >= 11
            assert len([state for state in running.fleet.workers if state.role == "decode"]) == 2
            await running.until_metric("pdserve_kv_transfers_total", 12, outcome="done")


async def test_the_urgent_overtake_at_both_workers() -> None:
    """Twelve patient ones and an urgent one, which comes last; P computes one prompt at a time, D
    two answers."""
    draw = random.Random(3)
    ids = [[draw.randrange(100, 1500) for _ in range(200)] for _ in range(13)]
    finished: list[int] = []
    engine = {"num_kv_blocks": 2048, "max_num_batched_tokens": 256, "max_num_seqs": 2}
    with hosts(DEMO, "P", "D", engine=engine) as workers:
        async with cluster(*workers) as running:

            async def ask(number: int, priority: int) -> None:
                more = {"max_tokens": 24, "ignore_eos": True, "priority": priority}
                await running.complete(prompt=ids[number], **more)
                finished.append(number)

            freeze(workers[0].pid)  # P; all are there before it begins
            asks = [asyncio.create_task(ask(number, 5)) for number in range(12)]
            await running.until_metric("pdserve_router_num_requests_running", 12)
            asks.append(asyncio.create_task(ask(12, -1)))
            await running.until_metric("pdserve_router_num_requests_running", 13)
            os.kill(workers[0].pid, signal.SIGCONT)
            await asyncio.gather(*asks)
    assert finished.index(12) <= 3, finished


async def test_a_prompt_waits_for_its_turn_longer_than_an_attempts_deadline() -> None:
    """D answers one request at a time: the next one's rows are there, and it has no tokens until
    the first ends."""
    config = RouterConfig(split="always", attempt_deadline_s=1.0, max_attempts=3)
    with hosts(DEMO, "P", "D", engine={"max_num_seqs": 1}) as workers:
        async with cluster(*workers, config=config) as running:
            first = asyncio.create_task(
                running.complete(prompt=[300] * 20, max_tokens=900, ignore_eos=True)
            )
            while await running.metric("pdserve_router_generation_tokens_total") < 2:
                await asyncio.sleep(0.01)
            body = {"model": MODEL, "prompt": [400] * 20, "max_tokens": 4, "ignore_eos": True}
            answer = await running.client.post(
                "/v1/completions", json=body, headers={"x-pdserve-timeline": "1"}
            )
            assert answer.status_code == 200, answer.text
            [timeline] = answer.json()["timeline"]
            assert timeline["legs"][-1]["queue_s"] > 1.5, "it did not wait: this shows nothing"
            assert [leg["phase"] for leg in timeline["legs"]] == ["prefill", "decode"]
            assert (await first)["usage"]["completion_tokens"] == 900
            assert await running.metric("pdserve_router_failovers_total") == 0
