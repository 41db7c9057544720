"""Part of `make soak`: many requests over tiny KV caches, several routers and a KV pool. There are
aborts, kills and freezes of all processes, bursts beyond what routers accept, and wrong requests.

Every token that reaches a client is the right one. Every request ends in time, with its answer or a
clear error. In the end no block is owned, quarantined or lost. After a third of the time one P, one
D and one router are only frozen, and must not gather memory, descriptors, threads or tasks.

- PDSERVE_SOAK_SEED is the seed, which is printed. It fixes the order of the chaos, but not its
  timing against the requests.
- The test lasts PDSERVE_SOAK_MINUTES, and until PDSERVE_SOAK_REQUESTS were asked. These are asked
  again if there is time.
- PDSERVE_SOAK_TLS=tcp selects reads that need the other side's process, so that freezes leave many
  of them unsettled. With CMA, UCX's choice here, they end by themselves.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.bad_input import BAD, Bad
from support.hosts import hosts
from support.leaks import Holdings, MemoryWatch, holdings
from support.ports import free_port
from support.routers import RouterProcess
from support.served import DEMO, MODEL
from support.victims import LONGEST_FREEZE_S, Chaos, PoolVictim, RouterVictim, Victim, WorkerVictim
from tqdm import tqdm

from pdserve.configs.router import RouterConfig
from pdserve.configs.transfer import PoolConfig
from pdserve.engine.llm import LLM, SamplingParams

SEED = int(os.environ.get("PDSERVE_SOAK_SEED", "1"))
NUM_REQUESTS = int(os.environ.get("PDSERVE_SOAK_REQUESTS", "10000"))
MINUTES = float(os.environ.get("PDSERVE_SOAK_MINUTES", "30"))
NUM_WORKERS = 4
NUM_ROUTERS = 2
CONCURRENCY = 12
RETRIES = 4
POOL = {"num_kv_blocks": 96, "max_num_seqs": 16, "max_num_batched_tokens": 128}
PULL_DEADLINE_S = 1.0
TRANSFER = {
    "pull_deadline_s": PULL_DEADLINE_S,
    "lease_s": 3.0,
    "ucx_tls": os.environ.get("PDSERVE_SOAK_TLS"),
}
ROUTER = RouterConfig(
    split="always",
    worker_silence_s=3.0,
    attempt_deadline_s=10.0,
    max_attempts=3,
    max_concurrent_prompts=40,
)
BURST = 120
BURST_PAUSE_S = (10.0, 30.0)
BAD_PAUSE_S = (0.1, 1.0)
SAMPLE_S = 5.0
RESUME_WAIT_S = 10.0

# An attempt ends when one of its two legs shows no sign for so long, and its transfer has a
# deadline of its own.
ATTEMPT_S = 2 * ROUTER.attempt_deadline_s + PULL_DEADLINE_S
UNDISTURBED_S = 15.0  # what a request takes here at most when all are well
LIMIT_S = (
    UNDISTURBED_S + ROUTER.max_attempts * (ATTEMPT_S + RESUME_WAIT_S) + LONGEST_FREEZE_S + RETRIES
)
DRAINED_S = 15.0  # leases, quarantine and routers' silence are all shorter

Request = tuple[list[int], dict[str, Any]]
Tokens = list[list[int]]


def requests_of(rng: random.Random) -> list[Request]:
    """Prompts over a few shared prefixes, greedy and sampled, short and long; every fourth was
    asked before."""
    prefixes = [[rng.randrange(8, 1536) for _ in range(160)] for _ in range(6)]
    made: list[Request] = []
    for index in range(NUM_REQUESTS):
        if made and index % 4 == 3:
            made.append(rng.choice(made[-200:]))
            continue
        prompt = rng.choice(prefixes)[: rng.randrange(1, 160)] + [
            rng.randrange(8, 1536) for _ in range(rng.randrange(1, 200))
        ]
        sampled = {"temperature": 0.9, "top_p": 0.95, "n": rng.choice([1, 1, 2, 3])}
        settings = sampled if index % 2 else {"temperature": 0}
        made.append((prompt, {**settings, "max_tokens": rng.randrange(1, 40), "seed": index}))
    return made


def answers_of(requests: list[Request]) -> dict[int, Tokens]:
    """Returns the answers of one engine alone, by seed: token ids of every choice."""
    distinct = {settings["seed"]: (prompt, settings) for prompt, settings in requests}
    params = [SamplingParams(**settings) for _, settings in distinct.values()]
    outputs = LLM(str(DEMO), device="cpu").generate(
        [prompt for prompt, _ in distinct.values()], params
    )
    return {
        seed: [c.token_ids for c in output.outputs]
        for seed, output in zip(distinct, outputs, strict=True)
    }


class Refused(Exception):
    """An error in OpenAI's form. kind: status and code. retry_after: seconds, when asking again may
    help."""

    def __init__(
        self, status: int, error: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        assert error["message"] and error["message"] != "the server failed; its log says why", error
        self.kind = f"{status}, {error['code'] or error['type']}"
        self.retry_after = float((headers or {}).get("retry-after", 0.0))
        super().__init__(f"{self.kind}: {error['message']}")


class RouterDied(Exception):
    pass


class Clients:
    """Asks the routers in turn; keeps how every request ended."""

    def __init__(self, routers: list[RouterProcess], expected: dict[int, Tokens]) -> None:
        self._routers = routers
        self._expected = expected
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=LIMIT_S, limits=limits)
        self.ends: dict[str, list[float]] = defaultdict(list)
        self.messages: Counter[str] = Counter()

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, index: int, request: Request, streams: bool, patience: float | None) -> str:
        """How it ended; AssertionError when a token is wrong or the end is late. patience: seconds
        until its client leaves."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(patience):
                end = await self._answer(index, request, streams)
        except TimeoutError:
            end = "left by its client"
        except Refused as refusal:
            end = refusal.kind
            self.messages[str(refusal)] += 1
        except httpx.TimeoutException:
            end = "no end"
        except RouterDied:
            end = "cut by its router's death"
        seconds = time.monotonic() - began
        self.ends[end].append(seconds)
        assert seconds < LIMIT_S, f"request {index} took {seconds:.1f} s: {end}"
        return end

    async def _answer(self, index: int, request: Request, streams: bool) -> str:
        """Asks the next router when one takes no connection, and again when told to."""
        for attempt in itertools.count():
            router = self._routers[(index + attempt) % len(self._routers)]
            kills = router.num_kills
            try:
                await (self._stream if streams else self._whole)(router, request)
                return "finished, streamed" if streams else "finished"
            except httpx.ConnectError:
                if attempt == RETRIES:
                    return "no router"
                await asyncio.sleep(0.1)
            except Refused as refusal:
                if attempt == RETRIES or not refusal.retry_after:
                    raise
                self.messages[f"asked again: {refusal}"] += 1
                await asyncio.sleep(refusal.retry_after)
            except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
                assert router.num_kills > kills, f"a living router cut request {index}: {error!r}"
                raise RouterDied from error
        raise AssertionError("no attempt is the last")

    def _body(self, request: Request) -> dict[str, Any]:
        return {"model": MODEL, "prompt": request[0], "return_token_ids": True, **request[1]}

    async def _whole(self, router: RouterProcess, request: Request) -> None:
        answer = await self._http.post(f"{router.url}/v1/completions", json=self._body(request))
        if answer.status_code != 200:
            raise Refused(answer.status_code, answer.json()["error"], answer.headers)
        assert [choice["token_ids"] for choice in answer.json()["choices"]] == self._expected[
            request[1]["seed"]
        ]

    async def _stream(self, router: RouterProcess, request: Request) -> None:
        """Checks each token as it comes: those of answers that are cut or refused later were right,
        too."""
        expected = self._expected[request[1]["seed"]]
        counts = [0] * len(expected)
        async for event in self._events(router, self._body(request) | {"stream": True}):
            for choice in event["choices"]:
                index = choice["index"]
                tokens = choice["token_ids"]
                assert tokens == expected[index][counts[index] : counts[index] + len(tokens)], (
                    f"seed {request[1]}"
                )
                counts[index] += len(tokens)
        assert counts == [len(tokens) for tokens in expected]

    async def _events(
        self, router: RouterProcess, body: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        ended = False
        async with self._http.stream("POST", f"{router.url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise Refused(
                    answer.status_code, json.loads(await answer.aread())["error"], answer.headers
                )
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line:
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise Refused(200, event["error"])
                    yield event
        assert ended, "a stream ended without [DONE]"

    async def ask_wrongly(self, bad: Bad) -> None:
        """A wrong request gets its status and a message that names what is wrong; or hears that
        nobody has time."""
        began = time.monotonic()
        router = self._routers[int(began) % len(self._routers)]
        kills = router.num_kills
        headers = {"content-type": "application/json"}
        try:
            answer = await self._http.request(
                bad.method, router.url + bad.path, content=bad.body, headers=headers
            )
        except httpx.ConnectError:
            return
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            assert router.num_kills > kills, f"a living router cut {bad}: {error!r}"
            return
        message = answer.json()["error"]["message"]
        is_told = answer.status_code == bad.status and bad.names.lower() in message.lower()
        is_put_off = answer.status_code in (429, 503) and float(answer.headers["retry-after"]) > 0
        assert is_told or is_put_off, f"{bad}: {answer.status_code}, {message}"
        self.ends["wrong, and told so" if is_told else "wrong, and put off"].append(
            time.monotonic() - began
        )

    async def half_a_request(self, rng: random.Random) -> None:
        """A client that leaves in the middle of what it says."""
        router = rng.choice(self._routers)
        body = json.dumps({"model": MODEL, "prompt": [9] * 50, "stream": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        whole = head + body
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", router.port)
            writer.write(whole[: rng.randrange(len(whole) + 1)])
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    async def tasks(self, router: RouterProcess) -> int:
        return int((await self._http.get(f"{router.url}/tasks")).text)

    async def metrics(self, router: RouterProcess) -> list[Any] | None:
        """Samples of a router's page; None when it does not answer."""
        try:
            page = (await self._http.get(f"{router.url}/metrics", timeout=2.0)).text
        except httpx.TransportError:
            return None
        return [
            sample for family in text_string_to_metric_families(page) for sample in family.samples
        ]

    def table(self) -> str:
        """Markdown: how requests ended, and how long they took."""
        lines = ["| end | requests | median, s | longest, s |", "|---|---|---|---|"]
        for end, seconds in sorted(self.ends.items(), key=lambda item: -len(item[1])):
            lines.append(
                f"| {end} | {len(seconds):,} | {statistics.median(seconds):.2f} | "
                f"{max(seconds):.1f} |"
            )
        return "\n".join(lines)


def blocks_of(samples: list[Any]) -> dict[str, dict[str, int]]:
    """Blocks by state of every worker."""
    blocks: dict[str, dict[str, int]] = defaultdict(dict)
    for sample in samples:
        if sample.name == "pdserve_kv_blocks":
            blocks[sample.labels["worker"]][sample.labels["state"]] = int(sample.value)
    return blocks


async def audit(clients: Clients, routers: list[RouterProcess], victims: list[Victim]) -> None:
    """Each second: the books of all workers add up, and nobody died by himself."""
    while True:
        await asyncio.sleep(1.0)
        for victim in victims:
            victim.check()
        for router in routers:
            for worker, states in blocks_of(await clients.metrics(router) or []).items():
                assert sum(states.values()) == POOL["num_kv_blocks"] - 1, (
                    f"the books of {worker}: {states}"
                )


async def until_drained(clients: Clients, routers: list[RouterProcess]) -> float:
    """Seconds until every router sees all workers with every block free, and has no request
    left."""
    began = time.monotonic()
    while True:
        pages = [await clients.metrics(router) or [] for router in routers]
        states = [blocks_of(samples) for samples in pages]
        running = [
            s.value
            for samples in pages
            for s in samples
            if s.name == "pdserve_router_num_requests_running"
        ]
        free = [worker["free"] for workers in states for worker in workers.values()]
        if free == [POOL["num_kv_blocks"] - 1] * NUM_WORKERS * len(routers) and running == [
            0.0
        ] * len(routers):
            return time.monotonic() - began
        assert time.monotonic() - began < DRAINED_S, (
            f"not at rest: running {running}, blocks {states}"
        )
        await asyncio.sleep(0.2)


@pytest.mark.soak
@pytest.mark.slow
async def test_soak() -> None:
    print(f"PDSERVE_SOAK_SEED={SEED}")
    rng = random.Random(SEED)
    requests = requests_of(rng)
    expected = answers_of(requests)
    with (
        tempfile.TemporaryDirectory(prefix="pdserve-soak-") as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        shared = PoolVictim(
            PoolConfig(
                mode="start", address=f"127.0.0.1:{free_port()}", chunk_tokens=64, l1_gib=0.25
            )
        )
        stack.callback(shared.close)
        pool = {"mode": "connect", "address": shared.address, "chunk_tokens": 64, "breaker_s": 1.0}
        workers = stack.enter_context(
            hosts(
                DEMO,
                "P0",
                "P1",
                "D0",
                "D1",
                engine=POOL,
                transfer={**TRANSFER, "pool": pool},
                shells=folder,
            )
        )
        assert len(workers) == NUM_WORKERS
        routers = [RouterProcess(DEMO, ROUTER, RESUME_WAIT_S, folder) for _ in range(NUM_ROUTERS)]
        for router in routers:
            stack.callback(router.close)
            router.wait()
        victims: list[Victim] = [
            shared,
            *(WorkerVictim(workers, index) for index in range(NUM_WORKERS)),
            *(RouterVictim(router) for router in routers),
        ]
        clients = Clients(routers, expected)
        try:
            await until_drained(clients, routers)
            before = await held(clients, routers, victims)
            await run(clients, requests, routers, victims, rng)
            await until_whole(clients, requests, routers)
            for name, now in (await held(clients, routers, victims)).items():
                more = now.exceeds(before[name])
                assert not more, f"{name} holds {more} than before: {before[name]}, {now}"
        finally:
            print(f"\n{clients.table()}\n")
            for message, count in clients.messages.most_common(12):
                print(f"{count:6} {message}")
            await clients.close()


def living(victims: list[Victim]) -> dict[str, Victim]:
    """One worker of each kind and one router, by kind: those that are spared later."""
    return {victim.kind: victim for victim in reversed(victims) if victim.kind != "pool"}


async def held(
    clients: Clients, routers: list[RouterProcess], victims: list[Victim]
) -> dict[str, Holdings]:
    """Returns what the living processes hold at rest."""
    found = {}
    for name, victim in living(victims).items():
        assert victim.process.pid is not None
        found[name] = holdings(
            victim.process.pid, await clients.tasks(routers[0]) if name == "router" else None
        )
    return found


async def run(
    clients: Clients,
    requests: list[Request],
    routers: list[RouterProcess],
    victims: list[Victim],
    rng: random.Random,
) -> None:
    """All requests amid the chaos; then everything comes to rest."""
    chaos = Chaos(victims, random.Random(rng.random()))
    began = time.monotonic()
    ends = began + 60 * MINUTES
    watch = MemoryWatch()
    with tqdm(total=len(requests), desc="soak", unit="request") as progress:
        asking = asyncio.create_task(
            all_of_them(clients, requests, random.Random(rng.random()), ends, progress)
        )
        striking = asyncio.create_task(chaos.run())
        asking.add_done_callback(lambda _: chaos.stop())
        endless = {
            asyncio.create_task(audit(clients, routers, victims)),
            asyncio.create_task(bursts(clients, requests, random.Random(rng.random()))),
            asyncio.create_task(nonsense(clients, random.Random(rng.random()))),
            asyncio.create_task(spare_and_watch(victims, began + 20 * MINUTES, watch)),
        }
        try:
            waiting = {asking, striking}
            while waiting:
                done, _ = await asyncio.wait(
                    {*waiting, *endless}, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
                waiting -= done
        finally:
            for task in (asking, striking, *endless):
                task.cancel()
            await asyncio.gather(asking, striking, *endless, return_exceptions=True)
    seconds = time.monotonic() - began
    asked = sum(len(times) for times in clients.ends.values())
    print(f"{asked} requests in {seconds:.0f} s: {asked / seconds:.1f} requests/s")
    print(f"strikes: {dict(sorted(chaos.struck.items()))}\n{watch.table()}")
    finished = sum(len(times) for end, times in clients.ends.items() if end.startswith("finished"))
    assert finished > asked // 2
    assert any("429" in message for message in clients.messages), (
        "no burst was too much: this was no overload"
    )
    watch.check()
    print(f"at rest after {await until_drained(clients, routers):.1f} s")
    # workers at rest check their blocks for themselves, and die when one is lost
    await asyncio.sleep(2.0)
    for victim in victims:
        victim.check()


async def all_of_them(
    clients: Clients,
    requests: list[Request],
    rng: random.Random,
    ends: float,
    progress: "tqdm[Any]",
) -> None:
    """Each once, and again while there is time."""
    indices = itertools.count()

    async def client() -> None:
        while (number := next(indices)) < len(requests) or time.monotonic() < ends:
            index = number % len(requests)
            streams = rng.random() < 0.5
            patience = rng.uniform(0.01, 0.6) if rng.random() < 0.2 else None
            await clients.ask(index, requests[index], streams, patience)
            progress.update()

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(client())


async def bursts(clients: Clients, requests: list[Request], rng: random.Random) -> None:
    """Now and then more at once than the routers take: they say so, with the time after which to
    ask again."""
    while True:
        await asyncio.sleep(rng.uniform(*BURST_PAUSE_S))
        chosen = [rng.randrange(len(requests)) for _ in range(BURST)]
        async with asyncio.TaskGroup() as group:
            for index in chosen:
                group.create_task(clients.ask(index, requests[index], rng.random() < 0.5, None))


async def nonsense(clients: Clients, rng: random.Random) -> None:
    while True:
        await asyncio.sleep(rng.uniform(*BAD_PAUSE_S))
        await (
            clients.half_a_request(rng)
            if rng.random() < 0.2
            else clients.ask_wrongly(rng.choice(BAD))
        )


async def spare_and_watch(victims: list[Victim], begins: float, watch: MemoryWatch) -> None:
    """From `begins` on some live: their memory is watched. Those that are being killed then are
    spared their next."""
    await asyncio.sleep(begins - time.monotonic())
    for victim in living(victims).values():
        victim.spared = True
    await asyncio.sleep(LONGEST_FREEZE_S + SAMPLE_S)
    while True:
        pids = {name: victim.process.pid for name, victim in living(victims).items()}
        watch.sample({name: pid for name, pid in pids.items() if pid is not None})
        await asyncio.sleep(SAMPLE_S)


async def until_whole(
    clients: Clients, requests: list[Request], routers: list[RouterProcess]
) -> None:
    """Nobody needs a restart: all answers come, and their KV moves between workers again."""

    async def pulls() -> float:
        samples = [sample for router in routers for sample in await clients.metrics(router) or []]
        return sum(
            s.value
            for s in samples
            if s.name == "pdserve_kv_transfers_total" and s.labels["outcome"] == "done"
        )

    before = await pulls()
    for index, request in enumerate(requests[:16]):
        end = await clients.ask(index, request, bool(index % 2), None)
        assert end.startswith("finished"), end
    await until_drained(clients, routers)
    assert await pulls() > before
