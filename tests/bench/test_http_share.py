"""Tests benchmarks/cluster/http_share.py against the real router and a real engine: the parts add
up, and foreign load is noticed."""

import asyncio
from functools import partial
from typing import Any

import httpx
import pytest
from support.hosts import hosts
from support.served import DEMO, MODEL, cluster

from benchmarks.cluster import http_share, worker_use
from pdserve.bench.workload import Lengths

SIZES: dict[str, Any] = {
    "input_len": Lengths(40, 40),
    "output_len": Lengths(12, 12),
    "rounds": 2,
    "vocab_size": 500,
}


@pytest.mark.slow
async def test_the_parts_of_a_request_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with hosts(DEMO, "A", engine={"max_num_seqs": 2}) as workers:
        async with cluster(*workers) as running:
            measure = partial(asyncio.to_thread, partial(http_share.measure, running.url, **SIZES))
            one = await measure(clients=1)
            six = await measure(clients=6)

            def with_a_stranger(url: str) -> dict[str, float]:
                body = {"model": MODEL, "prompt": [1, 2], "max_tokens": 1}
                httpx.post(f"{url}/v1/completions", json=body, timeout=120)
                return real(url)

            real = http_share.router_times
            monkeypatch.setattr(http_share, "router_times", with_a_stranger)
            with pytest.raises(ValueError, match="other load"):
                await measure(clients=1)
    # a worker knows an arrival to half a step, and these requests have few steps
    for row in (one, six):
        assert sum(row["ms"].values()) == pytest.approx(row["request_ms"], rel=0.04)
        assert sum(row["share"].values()) == pytest.approx(1, abs=0.04)
        assert (
            min(row["ms"].values()) > -max(1, 0.05 * row["request_ms"]) and row["ms"]["device"] > 0
        )
    assert six["share"]["queue"] > 0.4 > one["share"]["queue"], (
        "two of six clients are served at a time"
    )
    for row, num_requests in ((one, 8), (six, 12)):
        (use,) = row["workers"]
        # the loads with one client have the same first prompt, so a block of it is cached
        assert use["prompt_tokens"] == 40 * num_requests - (32 if row is one else 0)
        assert use["generated_tokens"] == 12 * num_requests
        assert 0 < use["busy_s"] < use["seconds"] and use["steps"] >= 12
    assert one["workers"][0]["prompt_tokens_beside_decodes"] == 0
    assert len(worker_use.report([one, six]).splitlines()) == 4
    lines = http_share.report([one, six]).splitlines()
    assert len(lines) == 4 and all(line.count("|") == 11 for line in lines)
