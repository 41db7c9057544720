"""make soak: many requests over tiny pools, with aborts, kills and freezes; every finished answer is the right one.

Seeded by PDSERVE_SOAK_SEED (printed), length by PDSERVE_SOAK_REQUESTS.
"""

import asyncio
import os
import random
import signal
import time
from typing import Any

import pytest
from hosts import Host, LocalLink, hosts, start_host
from served import DEMO, Cluster, blocks_in_use, cluster
from tqdm import tqdm

from pdserve.engine.llm import LLM, SamplingParams

SEED = int(os.environ.get("PDSERVE_SOAK_SEED", "1"))
NUM_REQUESTS = int(os.environ.get("PDSERVE_SOAK_REQUESTS", "2000"))
POOL = {"num_kv_blocks": 96, "max_num_seqs": 16, "max_num_batched_tokens": 256}
CONCURRENCY = 12

Request = tuple[list[int], dict[str, Any]]


def requests_of(rng: random.Random) -> list[Request]:
    """Prompts over a few shared prefixes, greedy and sampled, short and long."""
    prefixes = [[rng.randrange(8, 1536) for _ in range(160)] for _ in range(6)]
    made: list[Request] = []
    for index in range(NUM_REQUESTS):
        prompt = rng.choice(prefixes)[: rng.randrange(1, 160)] + [
            rng.randrange(8, 1536) for _ in range(rng.randrange(1, 200))
        ]
        sampled = {"temperature": 0.9, "top_p": 0.95, "n": rng.choice([1, 1, 2, 3])}
        settings = sampled if index % 2 else {"temperature": 0}
        made.append((prompt, {**settings, "max_tokens": rng.randrange(1, 40), "seed": index}))
    return made


@pytest.mark.slow
async def test_soak() -> None:
    print(f"PDSERVE_SOAK_SEED={SEED}")
    rng = random.Random(SEED)
    requests = requests_of(rng)
    llm = LLM(str(DEMO), device="cpu")
    outputs = llm.generate([p for p, _ in requests], [SamplingParams(**settings) for _, settings in requests])
    expected = [[choice.token_ids for choice in output.outputs] for output in outputs]
    transfer = {"pull_deadline_s": 1.0, "lease_s": 3.0}
    with hosts(DEMO, "P0", "P1", "D0", "D1", engine=POOL, transfer=transfer) as workers:
        async with cluster(*workers) as running:
            finished = await _run(running, workers, requests, expected, rng)
            print(f"{finished} of {NUM_REQUESTS} finished, the others were given up by their clients")
            assert finished > NUM_REQUESTS // 2
            ended = time.monotonic()
            while await blocks_in_use(running):
                assert time.monotonic() - ended < 15, "blocks are still owned"
                await asyncio.sleep(0.2)


async def _run(
    running: Cluster, workers: list[Host], requests: list[Request], expected: list[list[list[int]]], rng: random.Random
) -> int:
    gate = asyncio.Semaphore(CONCURRENCY)
    progress = tqdm(total=len(requests), desc="soak", unit="request")

    async def one(index: int, patience: float | None) -> bool:
        prompt, settings = requests[index]
        async with gate:
            try:
                async with asyncio.timeout(patience):
                    answer = await running.complete(prompt=prompt, return_token_ids=True, **settings)
            except TimeoutError:
                return False
            finally:
                progress.update()
        assert [choice["token_ids"] for choice in answer["choices"]] == expected[index], f"request {index}"
        return True

    chaos = asyncio.create_task(_chaos(running, workers, random.Random(rng.random())))
    try:
        patience = [rng.uniform(0.01, 0.6) if rng.random() < 0.2 else None for _ in requests]
        return sum(await asyncio.gather(*(one(index, patience[index]) for index in range(len(requests)))))
    finally:
        chaos.cancel()
        await asyncio.gather(chaos, return_exceptions=True)
        progress.close()


async def _chaos(running: Cluster, workers: list[Host], rng: random.Random) -> None:
    """Every few seconds: freeze a worker for a while, or kill it and start another in its place. Leaves all well."""
    while True:
        await asyncio.sleep(rng.uniform(3, 6))
        index = rng.randrange(len(workers))
        victim = workers[index]
        if rng.random() < 0.5:
            os.kill(victim.process.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(rng.uniform(0.5, 3))
            finally:
                os.kill(victim.process.pid, signal.SIGCONT)
            continue
        await asyncio.to_thread(victim.kill)
        workers[index] = await asyncio.to_thread(start_host, victim.config, victim.worker_id.split("-")[0])
        running.fleet.join(LocalLink(workers[index]))
