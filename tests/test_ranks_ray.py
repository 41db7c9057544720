"""Workers of two ranks over Ray: answers of one engine, and ranks killed and frozen under streams.

The ranks share every layer, on one node; or they are stages, each on a node of its own; or they are
homes that share the experts of a mixture. A rank that
dies takes its replica along at once, one that stands still within `engine.step_deadline_s`; streams
go on elsewhere, and Serve makes a new replica with both ranks. What happens at which moment of a
request: test_failover.py.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.raylets import READY_S, Nodes, connected, serving, wait_until_healthy
from support.served import DEMO
from support.streams import Ask, check, drafted, mid_stream, prompts
from support.tiny_models import make_speaking

from pdserve.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

APP = "ranks"
MODEL_NAME = "pdserve-demo"  # as streams ask for it
PORT = 8127
NUM_TOKENS = 200
NUM_KILLS = 20
NUM_FREEZES = 3
STEP_DEADLINE_S = 5.0
LONGEST_GAP_S = {signal.SIGKILL: 5.0, signal.SIGSTOP: STEP_DEADLINE_S + 5.0}
FOUND_S = {signal.SIGKILL: 1.0, signal.SIGSTOP: STEP_DEADLINE_S + 3.0}
REQUEST_S = 120.0
NUM_RANKS = 4  # of both decode workers
# What is computed again elsewhere must have the same bits: P and D are of one degree of tensor
# parallelism. Stages change none, and so may differ.
TENSORS = {"engine": {"tensor_parallel": 2}}, {"engine": {"tensor_parallel": 2}}, 2
STAGES: tuple[dict[str, Any], dict[str, Any], int] = (
    {},
    {"engine": {"pipeline_parallel": 2}},
    NUM_RANKS,
)
HOMES = {"engine": {"data_parallel": 2, "expert_parallel": True}}
EXPERTS = HOMES, HOMES, 2
KINDS = {"tensors": TENSORS, "stages": STAGES, "experts": EXPERTS}


def config_of(model: Path, prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
    engine = {"device": "cpu", "num_kv_blocks": 1024, "step_deadline_s": STEP_DEADLINE_S}
    return {
        "model": {"path": str(model), "name": MODEL_NAME},
        "engine": engine,
        "router": {"resources": {"ingress": 0.1}, "split": "always"},
        "prefill": {"replicas": 1, "resources": {"prefill": 1}, **prefill},
        "decode": {"replicas": 2, "resources": {"decode": 1}, **decode},
    }


@pytest.fixture(scope="module", params=KINDS)
def nodes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes]:
    prefill, decode, num_nodes = KINDS[request.param]
    model = DEMO
    if request.param == "experts":
        model = make_speaking("qwen3-moe", tmp_path_factory.mktemp("experts"))
    resources = [{"prefill": 1.0}] + [{"decode": 1.0}] * num_nodes
    with serving(APP, PORT, config_of(model, prefill, decode), *resources) as nodes:
        yield nodes


@pytest.fixture(scope="module")
async def calm(nodes: Nodes) -> tuple[Callable[[], list[Ask]], list[bytes]]:
    """Returns a function that makes the requests, and their undisturbed answers."""
    async with connected(PORT) as client:
        make = await drafted(client, prompts((160, 500)), Tokenizer.load(DEMO).decode)
        answers = await asyncio.gather(*(ask.run(client, max_tokens=NUM_TOKENS) for ask in make()))
    return make, answers


def is_gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def decode_ranks(nodes: Nodes) -> list[int]:
    return [rank for ranks in nodes.all_ranks("decode") for rank in ranks]


def until_whole(nodes: Nodes) -> None:
    """Both decode workers have both of their ranks, and serve."""
    until = time.monotonic() + READY_S
    while len(decode_ranks(nodes)) != NUM_RANKS:
        assert time.monotonic() < until, "the replica is not back"
        time.sleep(0.1)
    wait_until_healthy(APP)


@pytest.mark.parametrize(
    ("how", "strike"),
    [(signal.SIGKILL, strike) for strike in range(NUM_KILLS)]
    + [(signal.SIGSTOP, strike) for strike in range(NUM_FREEZES)],
)
async def test_streams_survive_a_rank(
    nodes: Nodes,
    calm: tuple[Callable[[], list[Ask]], list[bytes]],
    how: signal.Signals,
    strike: int,
) -> None:
    make, expected = calm
    await asyncio.to_thread(until_whole, nodes)
    asks = make()
    async with asyncio.timeout(REQUEST_S), connected(PORT) as client:
        tasks = [asyncio.create_task(ask.run(client, max_tokens=NUM_TOKENS)) for ask in asks]
        while not mid_stream(asks, 12):
            await asyncio.sleep(0.002)
        ranks = decode_ranks(nodes)
        os.kill(ranks[strike % NUM_RANKS], how)
        struck = time.monotonic()
        while sum(map(is_gone, ranks)) < 2 or not is_gone(ranks[strike % NUM_RANKS]):
            assert time.monotonic() - struck < FOUND_S[how], "a rank lives on"
            await asyncio.sleep(0.005)
        found_s = time.monotonic() - struck
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    gap = check(asks, answers, expected)
    print(f"{how.name} {strike}: found in {found_s:.3f} s, longest gap {gap:.2f} s")
    assert gap < LONGEST_GAP_S[how]
    assert sum(map(is_gone, ranks)) == 2, "the other worker lives on"
    await asyncio.to_thread(until_whole, nodes)
