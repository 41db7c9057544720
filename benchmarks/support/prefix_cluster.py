"""Four workers with a real model on two hosts (network namespaces), two routers that know nothing
of each other, and what all of them counted.

    host 1: worker 0, 1 \\                   / router 0 \\
                         > NIXL over TCP, x                > the load, by turns, over HTTP
    host 2: worker 2, 3 /                   \\ router 1 /

Workers are processes of their own. The routers run in this process and share nothing else: each has
its own streams of events and its own view of the caches. cluster/prefixes.py uses this module.
"""

import asyncio
import contextlib
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.support.places import DEMO
from benchmarks.support.two_hosts import ADDRESSES, Net, inside
from benchmarks.support.worker_process import SharedLink, WorkerProcess
from pdserve.cluster.deployments.http_server import Address, HttpServer
from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.configs.router import RouterConfig
from pdserve.configs.schema import Role, WorkerConfig
from pdserve.configs.transfer import PoolConfig, TransferConfig
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.http.app import build_app
from pdserve.router.request.service import Service
from pdserve.text.tokenizer import Tokenizer

NUM_WORKERS, NUM_ROUTERS = 4, 2
POOL_PORTS = 5755, 5756  # each host has a loopback of its own, but they share /dev/shm
SETTLED_S = 120.0
PUSH_S = 1.0  # workers push their counts once per second


@dataclass(frozen=True)
class Setting:
    """Settings of the workers of one run."""

    num_kv_blocks: int  # of each worker
    fetch: bool = True  # True: workers fetch prefixes from each other
    pool_gib: float | None = None  # memory of each host's KV pool; None: there is none
    chunk_tokens: int = 64  # chunk size of the KV pool
    # True: the first worker of each host computes prompts, the second decodes, and routers split as
    # `auto` does. False: each worker answers whole requests.
    split: bool = False

    def worker(self, number: int) -> WorkerConfig:
        """Returns the configuration of worker `number`, 0 to 3."""
        host, place = divmod(number, 2)
        role: Role = "prefill" if self.split and place == 0 else "decode"
        pool = PoolConfig()
        if self.pool_gib is not None:
            pool = PoolConfig(
                mode="start",
                address=f"127.0.0.1:{POOL_PORTS[host]}",
                chunk_tokens=self.chunk_tokens,
                l1_gib=self.pool_gib,
                start_deadline_s=SETTLED_S,
                request_deadline_ms=1000,
                max_store_fraction=0.5,  # KV caches are small, and a long prompt must fit
            )
        return WorkerConfig(
            role=role,
            host=ADDRESSES[host],
            model=ModelConfig(path=str(DEMO)),
            engine=EngineConfig(device="cpu", num_kv_blocks=self.num_kv_blocks),
            transfer=TransferConfig(fetch_prefixes=self.fetch, pool=pool),
        )


@dataclass
class Cluster:
    """The routers of a running cluster."""

    urls: list[str]
    fleets: list[Fleet] = field(default_factory=list)

    async def counts(self) -> dict[str, float]:
        """Returns all metrics of the workers, summed over them. The values of labels follow the
        name, as in `name/retrieve/done`. Waits until workers have pushed their last counts."""
        await asyncio.sleep(1.5 * PUSH_S)
        async with httpx.AsyncClient(timeout=60) as client:
            page = (await client.get(f"{self.urls[0]}/metrics")).text
        sums: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = [v for k, v in sample.labels.items() if k in ("operation", "outcome")]
                sums["/".join([sample.name, *labels])] += sample.value
        return dict(sums)


@contextlib.contextmanager
def workers(setting: Setting, net: Net) -> Iterator[list[WorkerProcess]]:
    """Starts four workers, two in each namespace. They end with the context. Raises ValueError if
    one does not start."""
    started: list[WorkerProcess] = []
    with tempfile.TemporaryDirectory(prefix="pdserve-prefixes-") as folder:
        try:
            for number in range(NUM_WORKERS):
                prefix = inside((net.p, net.d)[number // 2])
                name = f"w{number}-{time.time_ns()}"
                config = setting.worker(number)
                started.append(WorkerProcess(config, name, prefix, Path(folder)))
            for worker in started:
                worker.wait_ready()
            yield started
        finally:
            for worker in started:
                worker.close()


@contextlib.asynccontextmanager
async def cluster(setting: Setting, running: Sequence[WorkerProcess]) -> AsyncIterator[Cluster]:
    """Starts two routers that know all workers. The workers end with them."""
    tokenizer = Tokenizer.load(DEMO)
    config = RouterConfig(split="auto" if setting.split else "never")
    links = [SharedLink(worker) for worker in running]
    found = Cluster([])
    async with contextlib.AsyncExitStack() as stack:
        for link in links:
            stack.callback(link.close)
        for _ in range(NUM_ROUTERS):
            fleet = Fleet(config.worker_silence_s, attempt_deadline_s=config.attempt_deadline_s)
            stack.push_async_callback(fleet.close)
            service = Service(fleet, tokenizer, config, DEMO.name)
            app = build_app(fleet, tokenizer, config, DEMO.name, service)
            server = HttpServer(app, Address("127.0.0.1", 0), config.client_timeout_s)
            server.start()
            stack.push_async_callback(server.close)
            for link in links:
                fleet.join(link)
            found.urls.append(f"http://127.0.0.1:{server.port}")
            found.fleets.append(fleet)
        await _settled(found.fleets)
        yield found


async def _settled(fleets: Sequence[Fleet]) -> None:
    """Waits until each router knows all workers, and each D is connected to each P. Raises
    ValueError if that takes too long."""
    try:
        async with asyncio.timeout(SETTLED_S):
            while not all(map(_is_settled, fleets)):
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise ValueError(f"the workers did not connect within {SETTLED_S:g} s") from None


def _is_settled(fleet: Fleet) -> bool:
    states = list(fleet.workers)
    prefills = [state for state in states if state.role == "prefill"]
    decodes = [state for state in states if state.role == "decode"]
    return len(states) == NUM_WORKERS and all(
        decode.is_connected_to(prefill) for decode in decodes for prefill in prefills
    )
