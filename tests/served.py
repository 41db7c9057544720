"""A router in this process over running engine hosts, served by uvicorn: everything of a cluster but Ray.

Used by the end-to-end tests and the soak; Serve's part is in tests/cluster.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import uvicorn
from hosts import Host, LocalLink
from prometheus_client.parser import text_string_to_metric_families

from pdserve.configs.schema import RouterConfig
from pdserve.router.app import build_app
from pdserve.router.fleet import Fleet
from pdserve.text.tokenizer import Tokenizer

DEMO = Path(__file__).parent.parent / "demo" / "pdserve-demo"
MODEL = "pdserve-demo"


class Cluster:
    """A router in this process over running hosts, served by uvicorn on a port of its own."""

    def __init__(self, url: str, fleet: Fleet) -> None:
        self.url = url
        self.fleet = fleet
        self.client = httpx.AsyncClient(base_url=url, timeout=60)

    async def complete(self, **body: object) -> dict:
        answer = await self.client.post("/v1/completions", json={"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

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
async def cluster(*workers: Host) -> AsyncIterator[Cluster]:
    fleet = Fleet()
    app = build_app(fleet, Tokenizer.load(DEMO), RouterConfig(), MODEL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    links = [LocalLink(worker) for worker in workers]
    try:
        for link in links:
            fleet.join(link)
        async with asyncio.timeout(30):
            while not server.started or not _settled(fleet, workers):
                await asyncio.sleep(0.02)
        running = Cluster(f"http://127.0.0.1:{port}", fleet)
        yield running
        await running.client.aclose()
    finally:
        server.should_exit = True
        await serving
        await fleet.close()
        for link in links:
            link.client.close(stop=False)


def _settled(fleet: Fleet, workers: tuple[Host, ...]) -> bool:
    """Every worker said Hello, and every decode worker is connected to every prefill worker."""
    states = fleet.workers
    prefill = [state for state in states if state.role == "prefill"]
    decode = [state for state in states if state.role == "decode"]
    return len(states) == len(workers) and all(d.is_connected_to(p) for d in decode for p in prefill)


async def blocks_in_use(running: Cluster) -> float:
    """Owned and quarantined KV blocks of all workers, as they last said."""
    owned = await running.metric("pdserve_kv_blocks", state="owned")
    return owned + await running.metric("pdserve_kv_blocks", state="quarantined")
