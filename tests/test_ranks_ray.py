"""Workers of two ranks over Ray: answers of one engine, and ranks killed and frozen under streams.

A rank that dies takes its replica along at once, one that stands still within
`engine.step_deadline_s`; streams go on elsewhere, and Serve makes a new replica with both ranks.
What happens at which moment of a request: test_failover.py.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.raylets import READY_S, Nodes, connected, serving, wait_until_healthy
from support.served import DEMO
from support.streams import Ask, check, drafted, mid_stream, prompts

from pdserve.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

APP = "ranks"
PORT = 8127
NUM_TOKENS = 200
NUM_KILLS = 20
NUM_FREEZES = 3
STEP_DEADLINE_S = 5.0
LONGEST_GAP_S = {signal.SIGKILL: 5.0, signal.SIGSTOP: STEP_DEADLINE_S + 5.0}
FOUND_S = {signal.SIGKILL: 1.0, signal.SIGSTOP: STEP_DEADLINE_S + 3.0}
REQUEST_S = 120.0
CONFIG = {
    "model": {"path": str(DEMO)},
    # of one degree: what is computed again elsewhere has the same bits
    "engine": {
        "device": "cpu",
        "num_kv_blocks": 1024,
        "tensor_parallel": 2,
        "step_deadline_s": STEP_DEADLINE_S,
    },
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


def until_whole(nodes: Nodes) -> None:
    """Both decode workers have both of their ranks, and serve."""
    until = time.monotonic() + READY_S
    while [len(ranks) for ranks in nodes.all_ranks("decode")] != [2, 2]:
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
        ranks = nodes.all_ranks("decode")[strike // 2 % 2]
        assert len(ranks) == 2
        os.kill(ranks[strike % 2], how)
        struck = time.monotonic()
        while not all(is_gone(rank) for rank in ranks):
            assert time.monotonic() - struck < FOUND_S[how], "a rank lives on"
            await asyncio.sleep(0.005)
        found_s = time.monotonic() - struck
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    gap = check(asks, answers, expected)
    print(f"{how.name} {strike}: found in {found_s:.3f} s, longest gap {gap:.2f} s")
    assert gap < LONGEST_GAP_S[how]
    await asyncio.to_thread(until_whole, nodes)
