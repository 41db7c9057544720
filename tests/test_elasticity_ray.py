"""Part of `make soak`: the demo model over Ray on several raylets. Counts and roles change, and a
node leaves and returns, under constant load with long streams open. No request fails and every
answer equals an undisturbed one to the byte.

test_elasticity.py tests the moments of a request, without Ray.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.constant_load import Calm, Load, calmed, load
from support.raylets import Nodes, connected, kill_raylet, serving
from support.served import DEMO
from support.streams import COMPLETIONS, GREEDY, SAMPLED, Ask, prompts

from pdserve.cluster.client import Client, connect
from pdserve.router.admin import ClusterReport

pytestmark = pytest.mark.slow

APP = "elastic"
PORT = 8127
# tokens, and clients
LONG = 1900
NUM_LONG = 6
SHORT = 64
NUM_SHORT = 12
GAP_S = 5.0
CHANGE_S = 90.0
LOAD_S = 240.0
CONFIG = {
    "model": {"path": str(DEMO)},
    "engine": {"device": "cpu", "num_kv_blocks": 4096},
    "router": {"replicas": 2, "resources": {"ingress": 0.1}, "split": "always", "drain_s": 5.0},
    "prefill": {"resources": {"prefill": 1}},
    "decode": {"resources": {"decode": 1}},
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with serving(APP, PORT, CONFIG, {"prefill": 2.0}, {"decode": 2.0}, {"decode": 1.0}) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def client(nodes: Nodes) -> Iterator[Client]:
    with connect(app_name=APP) as client:
        yield client


def asks(num: int, max_tokens: int) -> list[Ask]:
    """Half of them greedy, half sampled."""
    bodies = [GREEDY, SAMPLED | {"seed": 7}]
    return [
        Ask(
            f"{max_tokens} tokens, {number}",
            COMPLETIONS,
            bodies[number % 2] | {"prompt": text, "max_tokens": max_tokens},
        )
        for number, text in enumerate(prompts((100,) * num))
    ]


@pytest.fixture(scope="module")
async def calm(nodes: Nodes) -> tuple[Calm, Calm]:
    """Returns undisturbed long requests, and short ones."""
    async with connected(PORT) as http:
        return await calmed(http, lambda: asks(NUM_LONG, LONG)), await calmed(
            http, lambda: asks(NUM_SHORT, SHORT)
        )


@asynccontextmanager
async def under_load(calm: tuple[Calm, Calm]) -> AsyncIterator[tuple[httpx.AsyncClient, Load]]:
    """Long streams are open, and short ones come and go."""
    long, short = calm
    async with (
        connected(PORT) as http,
        load(http, long, LOAD_S) as streams,
        load(http, short, LOAD_S) as asking,
    ):
        await streams.until_round()
        streams.is_over = True  # no second round
        yield http, asking
    assert max(streams.longest_gap_s, asking.longest_gap_s) < GAP_S


async def until(client: Client, reached: Callable[[ClusterReport], bool]) -> ClusterReport:
    began = time.monotonic()
    while not reached(report := await client.aworkers()):
        assert time.monotonic() - began < CHANGE_S, report
        await asyncio.sleep(0.1)
    workers = sorted((worker.role, worker.num_running) for worker in report.workers)
    print(f"{time.strftime('%X')}, {time.monotonic() - began:.1f} s: {workers}")
    return report


def roles(report: ClusterReport) -> tuple[int, int]:
    """Workers that prefill and that decode, draining ones left out; all must be running at Serve,
    too."""
    stay = [worker for worker in report.workers if worker.state == "running"]
    return sum(worker.role == "prefill" for worker in stay), sum(
        worker.role == "decode" for worker in stay
    )


def is_busy(report: ClusterReport, num_decode: int) -> bool:
    """So many workers decode something now."""
    return (
        sum(worker.role == "decode" and worker.num_running > 0 for worker in report.workers)
        == num_decode
    )


async def totals(http: httpx.AsyncClient, name: str, label: str) -> dict[str, float]:
    """A counter by one of its labels; the two routers take turns in answering, so often enough they
    are both seen."""
    found: dict[str, float] = {}
    for _ in range(16):
        async with httpx.AsyncClient(base_url=http.base_url) as fresh:
            text = (await fresh.get("/metrics")).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name:
                    found[sample.labels[label]] = max(
                        found.get(sample.labels[label], 0.0), sample.value
                    )
    return found


async def until_handed_over(http: httpx.AsyncClient, workers: Sequence[str]) -> None:
    """Each of these has handed a prompt over. Routers choose which one does, and hear of it once a
    second."""
    began = time.monotonic()
    while True:
        counts = await totals(http, "pdserve_kv_handoffs_total", "worker")
        if all(counts.get(worker, 0.0) > 0 for worker in workers):
            return
        assert time.monotonic() - began < CHANGE_S, counts
        await asyncio.sleep(0.2)


async def test_counts_and_roles_change_under_load(client: Client, calm: tuple[Calm, Calm]) -> None:
    """1P1D -> 2P3D, a D becomes a P and a P both, and back, -> 1P1D."""
    await until(client, lambda report: roles(report) == (1, 1))
    async with under_load(calm) as (http, asking):
        await client.ascale(prefill=2, decode=3)
        report = await until(client, lambda report: roles(report) == (2, 3) and is_busy(report, 3))
        names = {
            role: [w.worker for w in report.workers if w.role == role]
            for role in ("prefill", "decode")
        }
        await asking.until_round()
        await until_handed_over(http, names["prefill"])

        await client.aset_role(names["decode"][0], "prefill")
        await client.aset_role(names["prefill"][0], "both")
        await asking.until_round()
        await asking.until_round()
        await until_handed_over(http, [names["decode"][0]])
        report = await client.aworkers()
        assert roles(report) == (2, 2) and {w.role for w in report.workers} == {
            "prefill",
            "decode",
            "both",
        }
        await client.aset_role(names["decode"][0], "decode")
        await client.aset_role(names["prefill"][0], "prefill")

        # the workers that are to leave shall have long ones, too
        async with load(http, calm[0], LOAD_S) as late:
            await late.until_round()
            late.is_over = True
            await client.ascale(prefill=1, decode=1)
            await until(client, lambda report: len(report.workers) == 2 and roles(report) == (1, 1))
            await asking.until_round()
            asking.is_over = True  # what is left is to see the long ones end
        reasons = await totals(http, "pdserve_router_failovers_total", "reason")
        assert set(reasons) == {"drained"} and reasons["drained"] > 0, reasons
        print(f"moved: {reasons}")


async def test_a_node_leaves_and_another_like_it_comes(
    nodes: Nodes, client: Client, calm: tuple[Calm, Calm]
) -> None:
    await client.ascale(prefill=1, decode=3)
    before = await until(client, lambda report: roles(report) == (1, 3))
    async with under_load(calm) as (_, asking):
        await until(client, lambda report: is_busy(report, 3))
        resources, raylet = nodes.take("decode")
        kill_raylet(raylet)
        left = 3 - int(resources["decode"])
        await until(client, lambda report: roles(report) == (1, left))
        await asking.until_round()
        assert (await client.aworkers()).counts["decode"].target == 3
        nodes.add(resources)
        report = await until(client, lambda report: roles(report) == (1, 3) and is_busy(report, 3))
        new = {worker.worker for worker in report.workers} - {
            worker.worker for worker in before.workers
        }
        assert len(new) == resources["decode"]
        await asking.until_round()
