"""The load generator against the real router and a real engine, with the demo model."""

import asyncio
from typing import Any

from support.hosts import hosts
from support.served import DEMO, MODEL, cluster

from pdserve.bench.load import LoadConfig, LoadResult, run_load
from pdserve.bench.workload import Shape


async def test_a_load_on_a_real_server() -> None:
    def load(url: str, **options: Any) -> LoadResult:
        return run_load(
            LoadConfig(url=url, shape=Shape.parse("6x20-40x9"), timeout_s=300, **options),
            progress=False,
        )

    with hosts(DEMO, "A") as workers:
        async with cluster(*workers) as running:
            closed = await asyncio.to_thread(load, running.url, clients=3)
            opened = await asyncio.to_thread(load, running.url, rate=30.0, vocab_size=1792)
            refused = await asyncio.to_thread(
                load, running.url, clients=1, num_warmups=0, vocab_size=2000
            )
    for result in (closed, opened):
        assert result.model == MODEL and not result.errors
        assert [(o.num_tokens, o.finish_reason) for o in result.outcomes] == [(9, "length")] * 6
        assert all(0 < o.ttft < 300 and 1 < len(o.arrivals) <= 9 for o in result.outcomes)
    assert refused.errors and all(
        "outside the vocabulary 0..1791" in error for error in refused.errors
    )
