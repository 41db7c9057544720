"""Ranks of workers over Ray that are killed and frozen under streams: how a test strikes one, and
what must hold then. There are two decode workers, of two ranks each unless a test says another
number, and a test may strike ranks of prefill workers too."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from support.raylets import READY_S, Nodes, connected, wait_until_healthy
from support.streams import Ask, check, mid_stream

APP = "ranks"
PORT = 8127
MODEL_NAME = "pdserve-demo"  # as streams ask for it
NUM_TOKENS = 200
WORKER_RANKS = 2
NUM_RANKS = 2 * WORKER_RANKS  # of both decode workers
STEP_DEADLINE_S = 5.0
LONGEST_GAP_S = {signal.SIGKILL: 5.0, signal.SIGSTOP: STEP_DEADLINE_S + 5.0}
FOUND_S = {signal.SIGKILL: 1.0, signal.SIGSTOP: STEP_DEADLINE_S + 3.0}
REQUEST_S = 120.0  # an answer that is no stream comes as a whole, late on a busy machine

Calm = tuple[Callable[[], list[Ask]], list[bytes]]
"""A function that makes the requests, and their undisturbed answers."""


def is_gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def ranks_of(nodes: Nodes, role: str) -> list[int]:
    return [rank for ranks in nodes.all_ranks(role) for rank in ranks]


def until_whole(nodes: Nodes, worker_ranks: int, role: str) -> None:
    """Both workers of the role have all of their ranks, and serve."""
    until = time.monotonic() + READY_S
    while len(ranks_of(nodes, role)) != 2 * worker_ranks:
        assert time.monotonic() < until, "the replica is not back"
        time.sleep(0.1)
    wait_until_healthy(APP)


async def answers_of(make: Callable[[], list[Ask]]) -> list[bytes]:
    async with connected(PORT, REQUEST_S) as client:
        runs = (ask.run(client, max_tokens=NUM_TOKENS) for ask in make())
        return await asyncio.gather(*runs)


async def assert_streams_survive(
    nodes: Nodes,
    calm: Calm,
    how: signal.Signals,
    rank: int,
    worker_ranks: int = WORKER_RANKS,
    role: str = "decode",
) -> None:
    """Strikes this rank of the role's two workers while all streams run: it is found in time, its
    whole replica goes and comes back, and the answers are those of undisturbed requests. A decode
    worker is struck when all streams have begun, and a prefill worker when one has."""
    make, expected = calm
    await asyncio.to_thread(until_whole, nodes, worker_ranks, role)
    asks = make()
    async with asyncio.timeout(REQUEST_S), connected(PORT, REQUEST_S) as client:
        tasks = [asyncio.create_task(ask.run(client, max_tokens=NUM_TOKENS)) for ask in asks]
        while not (mid_stream(asks, 12) if role == "decode" else any(ask.counts for ask in asks)):
            await asyncio.sleep(0.002)
        ranks = ranks_of(nodes, role)
        os.kill(ranks[rank], how)
        struck = time.monotonic()
        while sum(map(is_gone, ranks)) < worker_ranks or not is_gone(ranks[rank]):
            assert time.monotonic() - struck < FOUND_S[how], "a rank lives on"
            await asyncio.sleep(0.005)
        found_s = time.monotonic() - struck
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    gap = check(asks, answers, expected)
    print(f"{how.name}, rank {rank} of {role}: found in {found_s:.3f} s, longest gap {gap:.2f} s")
    assert gap < LONGEST_GAP_S[how]
    assert sum(map(is_gone, ranks)) == worker_ranks, "the other worker is gone, too"
    await asyncio.to_thread(until_whole, nodes, worker_ranks, role)
