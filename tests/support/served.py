"""A router in this process over running engine hosts, served as under `pdserve up`: everything of a
cluster but Ray.

Used by the end-to-end tests and the soak; Serve's part is in tests/cluster.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from support.hosts import Host, LocalLink
from support.shell import ShellLink
from support.waiting import until_async

from pdserve.cluster.deployments.http_server import Address, HttpServer
from pdserve.configs.router import RouterConfig
from pdserve.configs.traces import TracesConfig
from pdserve.models.task import read_embedding
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.fleet.worker_state import WorkerState
from pdserve.router.http.app import build_app
from pdserve.router.request.service import Service
from pdserve.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[2] / "demo" / "pdserve-demo"
MODEL = "pdserve-demo"


class Cluster:
    """A router in this process over running hosts, which serves HTTP on a port of its own."""

    def __init__(self, url: str, fleet: Fleet) -> None:
        self.url = url
        self.fleet = fleet
        self.client = httpx.AsyncClient(base_url=url, timeout=300)
        self._links: list[LocalLink | ShellLink] = []

    def join(self, worker: Host) -> None:
        link = (
            LocalLink(worker) if worker.shell is None else ShellLink(worker.worker_id, worker.shell)
        )
        self._links.append(link)
        self.fleet.join(link)

    async def settled(self, *workers: Host) -> None:
        """Every worker said Hello, and every decode worker is connected to every prefill worker."""
        ids = {worker.worker_id for worker in workers}
        await until_async(
            lambda: _settled([s for s in self.fleet.workers if s.worker_id in ids], len(ids))
        )

    async def close(self) -> None:
        """Workers abort what is left."""
        await self.client.aclose()
        await self.fleet.close()
        for link in self._links:
            link.close()

    async def complete(self, **body: object) -> dict:
        answer = await self.client.post("/v1/completions", json={"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def until_metric(self, name: str, least: float, **labels: str) -> None:
        """Workers push what they counted once a second, and when they come to rest."""
        async with asyncio.timeout(60):
            while await self.metric(name, **labels) < least:
                await asyncio.sleep(0.05)

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels, over all workers."""
        text = (await self.client.get("/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@asynccontextmanager
async def cluster(
    *workers: Host,
    config: RouterConfig | None = None,
    resume_wait_s: float = 60.0,
    drain_s: float = 60.0,
    traces: TracesConfig | None = None,
    folder: Path = DEMO,
) -> AsyncIterator[Cluster]:
    """Serves a cluster of these workers. `folder` is that of their model, whose name stays the
    demo's."""
    tokenizer = Tokenizer.load(folder)
    config = config or RouterConfig(split="always")
    fleet = Fleet(
        config.worker_silence_s, drain_s=drain_s, attempt_deadline_s=config.attempt_deadline_s
    )
    service = Service(
        fleet,
        tokenizer,
        config,
        MODEL,
        resume_wait_s=resume_wait_s,
        traces=traces,
        embedding=read_embedding(folder, "auto"),
    )
    app = build_app(fleet, tokenizer, config, MODEL, service)
    server = HttpServer(app, Address("127.0.0.1", 0), config.client_timeout_s)
    server.start()
    running = Cluster(f"http://127.0.0.1:{server.port}", fleet)
    try:
        for worker in workers:
            running.join(worker)
        await running.settled(*workers)
        yield running
    finally:
        await server.close()
        await running.close()
        if service.tracer is not None:
            await asyncio.to_thread(service.tracer.close)


def _settled(states: list[WorkerState], num_workers: int) -> bool:
    prefill = [state for state in states if state.role == "prefill"]
    decode = [state for state in states if state.role == "decode"]
    return len(states) == num_workers and all(d.is_connected_to(p) for d in decode for p in prefill)


async def blocks_in_use(running: Cluster) -> float:
    """Owned and quarantined KV blocks of all workers, as they last said."""
    owned = await running.metric("pdserve_kv_blocks", state="owned")
    return owned + await running.metric("pdserve_kv_blocks", state="quarantined")
