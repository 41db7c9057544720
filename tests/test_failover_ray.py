"""Part of `make soak`: the demo model over Ray, with one raylet per worker. Engines and whole nodes
are killed under 32 streams.

Every answer equals an undisturbed one to the byte and no stream pauses for long. Ray's settings are
those of `pdserve up`. test_failover.py tests the moments of a request.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator

import httpx
import pytest
from support.raylets import Nodes, connected, kill_raylet, serving, wait_until_healthy
from support.served import DEMO
from support.streams import Ask, check, drafted, mid_stream, prompts

from pdserve.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

APP = "failover"
PORT = 8126
NUM_TOKENS = 256
LONGEST_GAP_S = 5.0
VANISHED_S = 8.0
REQUEST_S = 90.0
CONFIG = {
    "model": {"path": str(DEMO)},
    "engine": {"device": "cpu", "num_kv_blocks": 2048},
    "router": {"resources": {"ingress": 0.1}, "split": "always"},
    "prefill": {"replicas": 2, "resources": {"prefill": 1}},
    "decode": {"replicas": 2, "resources": {"decode": 1}},
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with serving(
        APP, PORT, CONFIG, *({role: 1.0} for role in ("prefill", "prefill", "decode", "decode"))
    ) as nodes:
        yield nodes


@pytest.fixture(scope="module")
async def calm(nodes: Nodes) -> tuple[Callable[[], list[Ask]], list[bytes]]:
    """Returns a function that makes the requests, and their undisturbed answers."""
    async with connected(PORT) as client:
        make = await drafted(client, prompts((160, 800)), Tokenizer.load(DEMO).decode)
        answers = await asyncio.gather(*(ask.run(client, max_tokens=NUM_TOKENS) for ask in make()))
    return make, answers


def kill_engine(nodes: Nodes, role: str) -> None:
    os.kill(nodes.engine(role), signal.SIGKILL)


def kill_node(nodes: Nodes, role: str) -> None:
    _, raylet = nodes.take(role)
    kill_raylet(raylet)


def vanish(nodes: Nodes, role: str) -> None:
    """No connection is closed, as if the node's network were cut: Ray's health checks find out,
    after 6 s."""
    nodes.freeze(role)


@pytest.mark.parametrize(("role", "num_tokens"), [("decode", 12), ("prefill", 1)])
@pytest.mark.parametrize("strike", [kill_engine, kill_node, vanish])
async def test_streams_survive(
    nodes: Nodes,
    calm: tuple[Callable[[], list[Ask]], list[bytes]],
    strike: Callable[[Nodes, str], None],
    role: str,
    num_tokens: int,
) -> None:
    """Strikes when some stream has its first token (`num_tokens` is 1), or when every stream has
    `num_tokens`. In the first case prompts are being handed off, and in the second all were."""
    make, expected = calm
    await asyncio.to_thread(wait_until_healthy, APP)
    asks = make()
    async with asyncio.timeout(REQUEST_S), connected(PORT) as client:
        before = await failovers(client)
        tasks = [asyncio.create_task(ask.run(client, max_tokens=NUM_TOKENS)) for ask in asks]
        while not (
            mid_stream(asks, num_tokens) if num_tokens > 1 else any(ask.counts for ask in asks)
        ):
            await asyncio.sleep(0.002)
        strike(nodes, role)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        count = await failovers(client) - before
    if strike is not kill_engine:
        nodes.add({role: 1.0})
    gap = check(asks, answers, expected)
    print(
        f"{strike.__name__} of {role} at {num_tokens}: longest gap {gap:.2f} s, {count:g} failovers"
    )
    assert gap < (VANISHED_S if strike is vanish else LONGEST_GAP_S)
    assert count > 0 or role == "prefill"


async def failovers(client: httpx.AsyncClient) -> float:
    text = (await client.get("/metrics")).text
    lines = [
        line for line in text.splitlines() if line.startswith("pdserve_router_failovers_total")
    ]
    return sum(float(line.split()[-1]) for line in lines)
