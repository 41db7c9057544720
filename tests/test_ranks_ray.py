"""Workers of two ranks over Ray: answers of one engine, and ranks killed under streams.

A rank that dies takes its replica along at once; streams go on elsewhere, and Serve makes a new
replica with both ranks. What happens at which moment of a request: test_failover.py.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.raylets import Nodes, connected, serving, wait_until_healthy
from support.served import DEMO
from support.streams import Ask, check, drafted, mid_stream, prompts

from pdserve.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

APP = "ranks"
PORT = 8127
NUM_TOKENS = 200
NUM_STRIKES = 6
LONGEST_GAP_S = 5.0
FOUND_S = 1.0
REQUEST_S = 120.0
CONFIG = {
    "model": {"path": str(DEMO)},
    # of one degree: what is computed again elsewhere has the same bits
    "engine": {"device": "cpu", "num_kv_blocks": 1024, "tensor_parallel": 2},
    "router": {"resources": {"ingress": 0.1}, "split": "always"},
    "prefill": {"replicas": 1, "resources": {"prefill": 1}},
    "decode": {"replicas": 2, "resources": {"decode": 1}},
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with serving(APP, PORT, CONFIG, *({r: 1.0} for r in ("prefill", "decode", "decode"))) as nodes:
        yield nodes


@pytest.fixture(scope="module")
async def calm(nodes: Nodes) -> tuple[Callable[[], list[Ask]], list[bytes]]:
    """What makes the requests, and their undisturbed answers."""
    async with connected(PORT) as client:
        make = await drafted(client, prompts((160, 500)), Tokenizer.load(DEMO).decode)
        answers = await asyncio.gather(*(ask.run(client, max_tokens=NUM_TOKENS) for ask in make()))
    return make, answers


def is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("strike", range(NUM_STRIKES))
async def test_streams_survive_the_death_of_a_rank(
    nodes: Nodes, calm: tuple[Callable[[], list[Ask]], list[bytes]], strike: int
) -> None:
    make, expected = calm
    await asyncio.to_thread(wait_until_healthy, APP)
    asks = make()
    async with asyncio.timeout(REQUEST_S), connected(PORT) as client:
        tasks = [asyncio.create_task(ask.run(client, max_tokens=NUM_TOKENS)) for ask in asks]
        while not mid_stream(asks, 12):
            await asyncio.sleep(0.002)
        ranks = nodes.ranks("decode")
        assert len(ranks) == 2
        os.kill(ranks[strike % 2], signal.SIGKILL)
        struck = time.monotonic()
        while not all(is_gone(rank) for rank in ranks):
            assert time.monotonic() - struck < FOUND_S, "the other rank lives on"
            await asyncio.sleep(0.005)
        found_s = time.monotonic() - struck
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    gap = check(asks, answers, expected)
    print(f"strike {strike}: found in {found_s:.3f} s, longest gap {gap:.2f} s")
    assert gap < LONGEST_GAP_S
