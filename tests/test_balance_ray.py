"""Roles follow load in a running cluster: the demo model over Ray, with one prefill worker and two
decode workers under prompts alone. No request fails, and every answer equals an undisturbed one.

test_balance.py tests the decisions themselves, and test_elasticity_ray.py changes that somebody
asks for.
"""

import asyncio
import random
import time
from collections.abc import Iterator

import pytest
from support.constant_load import calmed, load
from support.raylets import Nodes, connected, serving
from support.served import DEMO
from support.streams import COMPLETIONS, GREEDY, Ask

from pdserve.cluster.client import Client, connect
from pdserve.cluster.scaling.balance import SUSTAINED_S

pytestmark = pytest.mark.slow

APP = "balance"
PORT = 8131
NUM_CLIENTS = 6
NUM_TOKENS = 1500
SOON_S = 45.0  # until the load is in the reports, and the change in the fleet
CALM_S = 15.0  # of the first answers, which are load, too
CONFIG = {
    "model": {"path": str(DEMO)},
    "engine": {"device": "cpu", "num_kv_blocks": 4096},
    "prefill": {"replicas": 1, "resources": {"prefill": 1}},
    "decode": {"replicas": 2, "resources": {"decode": 1}},
    "router": {"resources": {"ingress": 0.1}},
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with serving(APP, PORT, CONFIG, {"prefill": 1.0}, {"decode": 2.0}) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def client(nodes: Nodes) -> Iterator[Client]:
    with connect(app_name=APP) as client:
        yield client


def asks() -> list[Ask]:
    """Requests that are nearly all prompt."""
    draw = random.Random(5)
    return [
        Ask(
            f"prompt {number}",
            COMPLETIONS,
            GREEDY | {"prompt": draw.choices(range(100, 200), k=NUM_TOKENS), "max_tokens": 2},
        )
        for number in range(NUM_CLIENTS)
    ]


async def roles(client: Client) -> list[str]:
    return sorted(worker.role for worker in (await client.aworkers()).workers)


async def until_roles(client: Client, wanted: list[str], seconds: float) -> float:
    """Returns how many seconds that took."""
    began = time.monotonic()
    while (now := await roles(client)) != wanted:
        assert time.monotonic() - began < seconds, now
        await asyncio.sleep(0.5)
    return time.monotonic() - began


async def test_a_lasting_load_of_prompts_makes_a_decode_worker_prefill(client: Client) -> None:
    """The change comes when the load has lasted for a minute, and not much sooner."""
    await until_roles(client, ["decode", "decode", "prefill"], SOON_S)
    async with connected(PORT) as http:
        calm = await calmed(http, asks)
        async with load(http, calm) as asking:
            took_s = await until_roles(
                client, ["decode", "prefill", "prefill"], SUSTAINED_S + SOON_S
            )
            assert took_s > SUSTAINED_S - CALM_S
            print(f"a decode worker became a prefill worker after {took_s:.0f} s")
            begun = len(asking.started)
            while len(asking.started) < begun + 2 * NUM_CLIENTS:
                await asyncio.sleep(0.1)
    assert await roles(client) == ["decode", "prefill", "prefill"]
