"""A chat over four workers and one KV pool (LMCache's server), all in processes of their own. A
turn finds the rows of earlier turns, on whichever workers they ran. If the server dies, only these
rows are lost.
"""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from support.hosts import Host, hosts
from support.ports import free_port
from support.served import DEMO, Cluster, cluster

from pdserve.configs.transfer import PoolConfig
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.kvtransfer.pool.lmcache_server import PoolServer

CHUNK = 64
TURNS = 3
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 70, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[PoolServer]:
    server = PoolServer(PoolConfig(mode="start", chunk_tokens=CHUNK, l1_gib=0.5))
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def workers(server: PoolServer) -> Iterator[list[Host]]:
    pool = {
        "mode": "connect",
        "address": server.address,
        "chunk_tokens": CHUNK,
        "request_deadline_ms": 2000,
    }
    with hosts(DEMO, "P0", "P1", "D0", "D1", transfer={"pool": pool}) as started:
        yield started


async def computed(running: Cluster) -> float:
    return await running.metric("pdserve_engine_prompt_tokens_total")


async def generated(running: Cluster) -> float:
    return await running.metric("pdserve_engine_generation_tokens_total")


async def told(running: Cluster, generated_before: float) -> None:
    """Waits until the workers have reported the counts of one answer and have stored all of it.

    They push their counts once per second. All is stored if two messages have the same count.
    """
    stored = -1.0
    async with asyncio.timeout(60):
        while await generated(running) < generated_before + GREEDY["max_tokens"]:
            await asyncio.sleep(0.1)
        while stored != (
            stored := await running.metric("pdserve_kv_pool_bytes_total", operation="store")
        ):
            await asyncio.sleep(1.2)


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(8, 1536) for _ in range(count)]


async def test_the_next_turn_of_a_chat_finds_the_ones_before(
    workers: list[Host], server: PoolServer
) -> None:
    """Every turn runs on other workers than the one before: these are told to leave out all
    others."""
    rng = random.Random(11)
    llm = LLM(str(DEMO), device="cpu")
    chat = words(rng, 300)
    known = 0
    for turn in range(TURNS):
        async with cluster(workers[turn % 2], workers[2 + turn % 2]) as running:
            before = await computed(running)
            generated_before = await generated(running)
            found = await running.metric("pdserve_kv_pool_bytes_total", operation="retrieve")
            answer = await running.complete(prompt=chat, seed=1, return_token_ids=True, **GREEDY)
            tokens = answer["choices"][0]["token_ids"]
            [output] = llm.generate([chat], [SamplingParams(**GREEDY, seed=1)], use_tqdm=False)
            assert tokens == output.outputs[0].token_ids
            full = (len(chat) + len(tokens) - 1) // CHUNK * CHUNK
            await told(running, generated_before)
            spent = await computed(running) - before
            if turn:
                assert spent <= len(chat) - known, (
                    f"turn {turn}: {spent} of {len(chat)} computed, {known} were known"
                )
                assert (
                    await running.metric("pdserve_kv_pool_bytes_total", operation="retrieve")
                    > found
                )
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= known
            known = full
            chat = chat + tokens + words(rng, 40)


async def test_a_server_that_dies_costs_nothing_else(
    workers: list[Host], server: PoolServer
) -> None:
    rng = random.Random(12)
    llm = LLM(str(DEMO), device="cpu")
    prompts = [words(rng, 200) for _ in range(6)]
    outputs = llm.generate(
        prompts, [SamplingParams(**GREEDY, seed=1)] * len(prompts), use_tqdm=False
    )
    async with cluster(*workers) as running:
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            if index == 2:
                os.kill(server.process.pid, signal.SIGSTOP)
            if index == 4:
                os.kill(server.process.pid, signal.SIGKILL)
            answer = await running.complete(prompt=prompt, seed=1, return_token_ids=True, **GREEDY)
            assert answer["choices"][0]["token_ids"] == output.outputs[0].token_ids


@pytest.mark.slow
async def test_workers_of_one_host_share_the_server_that_one_of_them_starts() -> None:
    """It dies with that one, and another starts the next."""
    address = f"127.0.0.1:{free_port()}"
    pool = {
        "mode": "start",
        "address": address,
        "chunk_tokens": CHUNK,
        "request_deadline_ms": 2000,
        "l1_gib": 0.25,
    }
    rng = random.Random(13)
    prompt = words(rng, 200)

    async def found(worker: Host) -> float:
        async with cluster(worker) as running:
            before = await generated(running)
            await running.complete(prompt=prompt, seed=1, **GREEDY)
            await told(running, before)
            return await running.metric("pdserve_kv_pool_bytes_total", operation="retrieve")

    with hosts(DEMO, "A0", "A1", "A2", transfer={"pool": pool}) as workers:
        first, *others = sorted(workers, key=lambda worker: -len(pool_children(worker)))
        assert [len(pool_children(worker)) for worker in (first, *others)] == [1, 0, 0]
        assert await found(first) == 0
        assert await found(others[0]) > 0
        first.kill()
        async with asyncio.timeout(40):
            while not any(map(pool_children, others)):
                await asyncio.sleep(0.2)
        before = found_by_other = 0.0
        async with asyncio.timeout(120):
            while found_by_other == 0:  # until both have found the new server
                prompt[:] = words(rng, 200)
                before = await found(others[0])
                found_by_other = await found(others[1])
        assert before == await found(others[0])


def pool_children(host: Host) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(host.process.pid).children()
        if "lmcache_server" in " ".join(child.cmdline())
    ]
