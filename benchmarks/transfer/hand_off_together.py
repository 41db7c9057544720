"""GB/s in sum of several decode engines that pull from one prefill engine.

This is the part "together" of benchmarks/transfer/hand_off.py. This module knows no tables and no
command line.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from benchmarks.transfer.engine_pair import ANSWER_S, Pair
from benchmarks.transfer.hand_off_plan import TOGETHER, Plan, summary
from benchmarks.transfer.hand_off_steps import Pulls, published
from pdserve.bench.record import Json
from pdserve.protocol.events import Arrived

WARM = 4  # pulls of each engine before they count
EACH = 10  # pulls of each engine that count, times --repeats
POLL_S = 0.002


async def measure_together(
    plan: Plan, pairs: Sequence[Pair], tick: Callable[[], Any]
) -> list[Json]:
    """Returns a row for the first decode engine alone, one for the first two, and so on."""
    held, pulls_of = await published(plan, pairs[0])
    rows = []
    for number in range(1, len(pairs) + 1):
        async with AsyncExitStack() as stack:
            running = [await stack.enter_async_context(pulls_of(pair)) for pair in pairs[:number]]
            began = await _until(running, WARM)
            done = max(len(pulls.arrivals) for pulls in running)
            ended = await _until(running, done + EACH * plan.repeats)
            arrived = [event for pulls in running for event in pulls.between(began, ended)]
        rows.append({"part": TOGETHER, "decodes": number, **figures(plan, arrived, ended - began)})
        tick()
    pairs[0].p.end(held, cancel=True)
    return rows


def figures(plan: Plan, arrived: Sequence[Arrived], seconds: float) -> Json:
    """Summarises what arrived in so many seconds."""
    num_bytes = sum(event.num_bytes for event in arrived)
    return {
        "tokens": max(plan.tokens),
        "in_flight": plan.in_flight,
        "num_transfers": len(arrived),
        "bytes": arrived[0].num_bytes,
        "descriptors": arrived[0].num_descriptors,
        "gb_per_s": round(num_bytes / seconds / 1e9, 2),
        "pull_ms": summary([event.seconds for event in arrived]),
        "transport": "/".join(sorted({event.transport for event in arrived})),
    }


async def _until(running: Sequence[Pulls], count: int) -> float:
    """Waits until each engine has pulled so often. Returns when the last one had. Raises ValueError
    if an engine does not go on."""
    try:
        async with asyncio.timeout(ANSWER_S):
            while any(len(pulls.arrivals) < count for pulls in running):
                for pulls in running:
                    pulls.check()
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise ValueError(f"no {count} pulls by each decode engine in {ANSWER_S:g} s") from None
    return time.perf_counter()
