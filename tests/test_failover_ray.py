"""make soak: the demo model over Ray, a raylet for each worker; engines and whole nodes killed under 32 streams.

Every answer equals an undisturbed one to the byte and no stream pauses for long. Ray's settings are those of
`pdserve up`. What happens at which moment of a request: test_failover.py.
"""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from served import DEMO
from streams import Ask, check, drafted, mid_stream, prompts

from pdserve.cluster.app import build_at
from pdserve.cluster.cli import settings
from pdserve.cluster.http_server import Address
from pdserve.configs.schema import ClusterConfig
from pdserve.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

APP, PORT = "failover", 8126
NUM_TOKENS = 256
LONGEST_GAP_S, VANISHED_S = 5.0, 8.0
READY_S, REQUEST_S = 180.0, 90.0
CONFIG = {
    "model": {"path": str(DEMO)},
    "engine": {"device": "cpu", "num_kv_blocks": 2048},
    "router": {"resources": {"ingress": 0.1}, "split": "always"},
    "prefill": {"replicas": 2, "resources": {"prefill": 1}},
    "decode": {"replicas": 2, "resources": {"decode": 1}},
}


class Nodes:
    """Raylets of this machine, each with room for one worker."""

    def __init__(self) -> None:
        head = {"num_cpus": 2, "resources": {"ingress": 1}, "object_store_memory": 80 << 20}
        self.cluster = Cluster(initialize_head=True, connect=True, head_node_args={**head, "include_dashboard": False})
        self._raylets: list[tuple[str, int]] = []
        for role in ("prefill", "prefill", "decode", "decode"):
            self.add(role)

    def add(self, role: str) -> None:
        node = self.cluster.add_node(num_cpus=1, resources={role: 1}, object_store_memory=80 << 20)
        [raylet] = node.all_processes["raylet"]
        self._raylets.append((role, raylet.process.pid))

    def take(self, role: str) -> int:
        """A raylet with a living engine; it is forgotten here."""
        found = next(r for r in self._raylets if r[0] == role and engine_of(r[1]) is not None)
        self._raylets.remove(found)
        return found[1]

    def engine(self, role: str) -> int:
        """The process of an engine."""
        return next(pid for r, raylet in self._raylets if r == role and (pid := engine_of(raylet)) is not None)


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def engine_of(raylet: int) -> int | None:
    for pid in children(raylet):
        if b"ray::EngineActor" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-") as folder:
        # Ray keeps there which cluster others on this machine shall join
        own = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder}
        for name, value in {**settings(haproxy=False), **own}.items():
            patch.setenv(name, value)
        nodes = Nodes()
        try:
            serve.start(proxy_location="Disabled")
            app = build_at(ClusterConfig.model_validate(CONFIG), Address("127.0.0.1", PORT))
            serve._run(app, name=APP, route_prefix="/", _blocking=False)
            wait_until_healthy()
            yield nodes
        finally:
            serve.shutdown()
            ray.shutdown()
            nodes.cluster.shutdown()


def wait_until_healthy() -> None:
    began = time.monotonic()
    while serve.status().applications[APP].status != "RUNNING":
        assert time.monotonic() - began < READY_S, serve.status()
        time.sleep(0.2)


@asynccontextmanager
async def connected() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=60, limits=limits) as client:
        yield client


@pytest.fixture(scope="module")
async def calm(nodes: Nodes) -> tuple[Callable[[], list[Ask]], list[bytes]]:
    """What makes the requests, and their undisturbed answers."""
    async with connected() as client:
        make = await drafted(client, prompts((160, 800)), Tokenizer.load(DEMO).decode)
        answers = await asyncio.gather(*(ask.run(client, max_tokens=NUM_TOKENS) for ask in make()))
    return make, answers


def kill_engine(nodes: Nodes, role: str) -> None:
    os.kill(nodes.engine(role), signal.SIGKILL)


def kill_node(nodes: Nodes, role: str) -> None:
    """Its processes end with their raylet."""
    raylet = nodes.take(role)
    os.kill(raylet, signal.SIGKILL)
    os.waitpid(raylet, 0)  # to its workers, a dead process that nobody has waited for lives


def vanish(nodes: Nodes, role: str) -> None:
    """No connection is closed, as if the node's network were cut: Ray's health checks find out, after 6 s."""
    raylet = nodes.take(role)
    for pid in (*children(raylet), raylet):
        os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize(("role", "num_tokens"), [("decode", 12), ("prefill", 1)])
@pytest.mark.parametrize("strike", [kill_engine, kill_node, vanish])
async def test_streams_survive(
    nodes: Nodes,
    calm: tuple[Callable[[], list[Ask]], list[bytes]],
    strike: Callable[[Nodes, str], None],
    role: str,
    num_tokens: int,
) -> None:
    """num_tokens: that some stream (1), or every stream, has when it happens: prompts are handed over, or all were."""
    make, expected = calm
    await asyncio.to_thread(wait_until_healthy)
    asks = make()
    async with asyncio.timeout(REQUEST_S), connected() as client:
        before = await failovers(client)
        tasks = [asyncio.create_task(ask.run(client, max_tokens=NUM_TOKENS)) for ask in asks]
        while not (mid_stream(asks, num_tokens) if num_tokens > 1 else any(ask.counts for ask in asks)):
            await asyncio.sleep(0.002)
        strike(nodes, role)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        count = await failovers(client) - before
    if strike is not kill_engine:
        nodes.add(role)
    gap = check(asks, answers, expected)
    print(f"{strike.__name__} of {role} at {num_tokens}: longest gap {gap:.2f} s, {count:g} failovers")
    assert gap < (VANISHED_S if strike is vanish else LONGEST_GAP_S)
    assert count > 0 or role == "prefill"


async def failovers(client: httpx.AsyncClient) -> float:
    text = (await client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("pdserve_router_failovers_total")]
    return sum(float(line.split()[-1]) for line in lines)
