"""A prefix anywhere is a prefix everywhere: several hosts over HTTP and NIXL, each with a cache of
its own. Their requests share prefixes, and hosts die while others fetch from them.

Tokens must be one engine's, whoever computed, fetched or lost the rows.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.hosts import Host, hosts
from support.processes import children, freeze
from support.served import DEMO, Cluster, cluster

from benchmarks.support.places import BENCHMARKS
from benchmarks.support.prefix_loads import ideal_computed, traced, working_set
from benchmarks.support.two_hosts import ADDRESSES, Net, available, inside, two_hosts
from benchmarks.support.worker_process import WorkerProcess
from pdserve.bench.replay.trace import read_trace
from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.configs.router import RouterConfig
from pdserve.configs.schema import WorkerConfig
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.router.choosing.holders import ASSUMED_BYTES_PER_S

SPREAD = RouterConfig(split="never", policy="round-robin", max_attempts=8)
MAX_TOKENS = 6
ENGINE = {"num_kv_blocks": 1024}

Start = Callable[[WorkerConfig, str], Any]  # starts a Host or a FarHost


def prompts_of(num_prefixes: int, count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts that begin with one of a few prefixes of so many tokens, and go on by themselves."""
    rng = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(100, 1500) for _ in range(number)]

    prefixes = [tokens(length) for _ in range(num_prefixes)]
    return [prefixes[index % num_prefixes] + tokens(rng.randrange(1, 30)) for index in range(count)]


def alone(prompts: list[list[int]], **engine: Any) -> list[list[int]]:
    llm = LLM(str(DEMO), device="cpu", num_kv_blocks=2048, **engine)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]


async def answer(running: Cluster, prompt: list[int]) -> list[int]:
    got = await running.complete(
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )
    return got["choices"][0]["token_ids"]


async def answers(running: Cluster, prompts: list[list[int]], at_once: int) -> list[list[int]]:
    gate = asyncio.Semaphore(at_once)

    async def one(prompt: list[int]) -> list[int]:
        async with gate:
            return await answer(running, prompt)

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


class FarHost(WorkerProcess):
    """A Host in one of two network namespaces, by its configuration's address: NIXL reaches it over
    TCP alone."""

    shell = None

    def __init__(self, net: Net, folder: Path, config: WorkerConfig, worker_id: str) -> None:
        namespace = (net.p, net.d)[ADDRESSES.index(config.host)]
        super().__init__(config, worker_id, inside(namespace), folder)
        self.config = config
        self.wait = self.wait_ready

    @property
    def pid(self) -> int:
        """The engine's process, whose parent is `unshare`."""
        [found] = children(self._process.pid)
        return found

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait(60)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        super().close()


async def lender(running: Cluster) -> str | None:
    """The worker that somebody should be reading a prefix from just now."""
    for _ in range(200):
        now = time.monotonic()
        for worker in running.fleet.workers:
            if worker.lending.left(now, ASSUMED_BYTES_PER_S):
                return worker.worker_id
        await asyncio.sleep(0.002)
    return None


@dataclass
class Killer:
    """Kills one host after another while a load runs, and starts another one in its place."""

    running: Cluster
    started: list[Any]
    seed: int
    at_most: int
    start: Start = Host
    num_killed: int = 0
    num_lending: int = 0  # hosts that were killed while another one was to read from them

    async def run(self, stop: asyncio.Event) -> None:
        """Freezes a host that lends for a moment, so that fetches from it hang in the middle, then
        kills it."""
        rng = random.Random(self.seed)
        while not stop.is_set() and self.num_killed < self.at_most:
            await asyncio.sleep(rng.uniform(0.3, 1.0))
            lends = await lender(self.running)
            known = {host.worker_id: host for host in self.started}
            victim = known.get(lends or "", rng.choice(self.started))
            freeze(victim.pid)
            self.started.remove(victim)
            await asyncio.sleep(rng.choice([0.0, 0.02, 0.2]))
            await asyncio.to_thread(victim.kill)
            victim.close()
            self.num_killed += 1
            self.num_lending += lends is not None
            self.running.fleet.leave(victim.worker_id)
            name = f"{victim.worker_id.split('-')[0]}-{self.num_killed}-{self.seed}"
            fresh = self.start(victim.config, name)
            await asyncio.to_thread(fresh.wait)
            self.running.join(fresh)
            self.started.append(fresh)


async def storm(
    running: Cluster,
    started: list[Any],
    prompts: list[list[int]],
    at_once: int,
    seed: int,
    at_most: int = 1000,
    at_least: int = 0,
    start: Start = Host,
) -> Killer:
    """Ask while holders die, and compare. at_least: how many of them must die while they lend; the
    prompts are asked again until then."""
    want = alone(prompts)
    stop = asyncio.Event()
    killer = Killer(running, started, seed, at_most, start)
    killing = asyncio.create_task(killer.run(stop))
    num_asked = num_wrong = 0
    try:
        while not num_asked or (killer.num_lending < at_least and num_asked < 5 * len(prompts)):
            got = await answers(running, prompts, at_once)
            num_wrong += sum(mine != right for mine, right in zip(got, want, strict=True))
            num_asked += len(got)
    finally:
        stop.set()
        await killing
    print(
        f"{num_asked} answers, {num_wrong} wrong; {killer.num_killed} hosts killed, "
        f"{killer.num_lending} of them while they lent"
    )
    assert not num_wrong, f"{num_wrong} of {num_asked} answers are wrong"
    return killer


async def test_prefixes_go_round_and_holders_that_die_make_nothing_wrong() -> None:
    """Requests go round the hosts: without fetches each of them would compute each prefix. Then
    hosts die while others fetch from them."""
    prompts = prompts_of(4, 24, 512, 1)
    want = alone(prompts)
    with hosts(DEMO, "D0", "D1", "D2", engine=ENGINE) as first:
        started = list(first)
        async with cluster(*started, config=SPREAD, resume_wait_s=120.0) as running:
            # changes of caches are told ten times a second; the first prefixes open the links
            for part in (prompts[:4], prompts[4:8], prompts[8:12], prompts[12:]):
                assert (
                    await answers(running, part, 1) == want[prompts.index(part[0]) :][: len(part)]
                )
                await asyncio.sleep(0.3)
            await running.until_metric("pdserve_prefix_fetch_tokens_total", 3 * 512)
            await asyncio.sleep(1.1)  # workers push what they counted once a second
            computed = await running.metric("pdserve_engine_prompt_tokens_total")
            assert await running.metric("pdserve_prefix_fetch_bytes_total") > 0
            assert computed < 2 * 4 * 512 + 24 * 48, "three caches would take 3 x 4 prefixes"
            more = prompts_of(6, 110, 512, 11)
            killer = await storm(running, started, more, 6, 11, at_most=2)
            assert killer.num_killed >= 1
        for host in started:
            host.close()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
async def test_workers_of_whole_requests_fetch_from_each_other(kv_cache_dtype: str) -> None:
    """The second of each pair of requests goes to the worker that does not have the prefix."""
    prompts = prompts_of(4, 16, 512, 3)
    prompts.sort(key=lambda prompt: prompt[:512])
    engine = ENGINE | {"kv_cache_dtype": kv_cache_dtype}
    want = alone(prompts, kv_cache_dtype=kv_cache_dtype)
    with hosts(DEMO, "W0", "W1", engine=engine) as started:
        async with cluster(*started, config=SPREAD) as running:
            for prompt, right in zip(prompts, want, strict=True):
                assert await answer(running, prompt) == right
                await asyncio.sleep(0.3)  # caches are told ten times a second
            # of four prefixes the first opens the link, and one may come too late
            await running.until_metric("pdserve_prefix_fetch_tokens_total", 2 * 512)
            assert await running.metric("pdserve_kv_handoffs_total") == 0


WHOLE = ("done", "miss", "left", "no-blocks", "gave-way")  # outcomes of fetches that nobody broke


class Broken:
    """Counts fetches by outcome, those of workers that died later included."""

    def __init__(self, running: Cluster) -> None:
        self._running = running
        self._seen: dict[tuple[tuple[str, str], ...], float] = {}

    async def watch(self) -> None:
        while True:
            page = (await self._running.client.get("/metrics")).text
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    if sample.name == "pdserve_prefix_fetches_total":
                        self._seen[tuple(sorted(sample.labels.items()))] = sample.value
            await asyncio.sleep(0.3)

    def totals(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for labels, value in self._seen.items():
            found[dict(labels)["outcome"]] += int(value)
        return found


async def ask_a_thousand(started: list[Any], start: Start = Host) -> None:
    """Asks 1,000 prompts of these hosts, of which 15 or more die while they lend a prefix."""
    async with cluster(*started, config=SPREAD, resume_wait_s=120.0) as running:
        prompts = prompts_of(40, 1000, 512, 12)
        broken = Broken(running)
        watching = asyncio.create_task(broken.watch())
        killer = await storm(running, started, prompts, 8, 12, at_least=15, start=start)
        await asyncio.sleep(1.1)  # workers push what they counted once a second
        watching.cancel()
        print(f"fetches by outcome: {broken.totals()}")
        assert killer.num_lending >= 15
        totals = broken.totals()
        assert totals["done"] > 0
        assert sum(totals.values()) - sum(totals[each] for each in WHOLE) >= 5


@pytest.mark.slow
async def test_a_thousand_requests_while_holders_die() -> None:
    with hosts(DEMO, "D0", "D1", "D2", "D3", engine=ENGINE) as first:
        started = list(first)
        await ask_a_thousand(started)
        for host in started:
            host.close()


@pytest.mark.slow
async def test_a_thousand_requests_while_holders_die_on_two_hosts(tmp_path: Path) -> None:
    """Four workers in two network namespaces, so prefixes are fetched over TCP."""
    reason = available()
    if reason:
        pytest.skip(reason)
    with two_hosts(None) as net:
        start = partial(FarHost, net, tmp_path)
        engine = EngineConfig(device="cpu", **ENGINE)
        model = ModelConfig(path=str(DEMO))
        started: list[Any] = []
        try:
            for number in range(4):
                config = WorkerConfig(
                    role="decode", host=ADDRESSES[number // 2], model=model, engine=engine
                )
                started.append(start(config, f"D{number}-{time.time_ns()}"))
            for host in started:
                host.wait()
            await ask_a_thousand(started, start)
        finally:
            for host in started:
                host.close()


TRACE = BENCHMARKS / "traces" / "mooncake_synthetic_trace.jsonl.xz"
NUM_HOSTS = 4


@pytest.mark.slow
async def test_four_caches_compute_little_more_than_one_as_large() -> None:
    """The hosts are alike, so each gets its part of the requests. One that seems slow leaves its
    cache to nobody, and some of them got 1 in 100 for a whole run."""
    asks = traced(read_trace(TRACE).requests, one_in=8, seed=0)
    num_blocks = working_set(asks) // NUM_HOSTS
    prompts = [ask.prompt for ask in asks]
    want = alone(prompts)
    names = [f"D{number}" for number in range(NUM_HOSTS)]
    config = RouterConfig(split="never")
    counted = "pdserve_request_prefill_time_seconds_count"
    with hosts(DEMO, *names, engine={"num_kv_blocks": num_blocks}) as started:
        async with cluster(*started, config=config) as running:
            assert await answers(running, prompts, NUM_HOSTS) == want
            await asyncio.sleep(1.5)  # workers push what they counted once a second
            computed = await running.metric("pdserve_engine_prompt_tokens_total")
            shares = [
                await running.metric(counted, worker=host.worker_id) / len(asks) for host in started
            ]
    ratio = computed / ideal_computed(asks, NUM_HOSTS * (num_blocks - 1))  # nobody uses block 0
    print(f"{ratio:.3f} x the prompt tokens of one cache; shares of the requests: {shares}")
    assert ratio <= 1.15
    assert min(shares) >= 1 / 10
