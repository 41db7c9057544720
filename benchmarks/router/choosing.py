"""Compares the router's policies for workers with small prefix caches: computed prompt tokens, and
waiting times.

Four workers run in threads. Each has a real engine (scheduler, blocks, prefix cache, sampler) and a
real worker loop, but no model. A step takes the time that its rows would take on some device, and
its logits have no meaning. A real router runs in this process. Workloads are open: requests arrive
at random moments, whatever the workers do. Policies take turns, each with new workers.

    python -m benchmarks.router.choosing --out benchmarks/results/choosing-cpu.jsonl
    python -m benchmarks.router.choosing --workloads shared --policies round-robin default \\
        --repeats 1
"""

import argparse
import asyncio
import itertools
import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.paced_worker import FIRST_TOKEN, NUM_TOKENS, VOCAB, Arrival, running
from benchmarks.support.places import DEMO
from benchmarks.support.yardstick import bare_us_per_token, beside
from pdserve.bench.record import append, check_writable, circumstances
from pdserve.configs.router import RouterConfig
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.choosing.policies import POLICIES
from pdserve.router.request.service import Service
from pdserve.text.tokenizer import Tokenizer

Tokens = tuple[int, ...]


def _tokens(draw: random.Random, count: int) -> Tokens:
    return tuple(draw.choices(range(FIRST_TOKEN, VOCAB), k=count))


def _moments(draw: random.Random, count: int, rate: float) -> list[float]:
    return list(itertools.accumulate(draw.expovariate(rate) for _ in range(count)))


def shared(draw: random.Random, count: int) -> list[Arrival]:
    """Draws requests with one of eight system prompts of 512 tokens, and 32 tokens of their own."""
    systems = [_tokens(draw, 512) for _ in range(8)]
    return [
        Arrival(at, draw.choice(systems) + _tokens(draw, 32)) for at in _moments(draw, count, 30.0)
    ]


def distinct(draw: random.Random, count: int) -> list[Arrival]:
    """Draws requests with nothing in common. Lengths are 32 to 1,500, and many are short."""
    lengths = [min(1500, max(32, int(draw.lognormvariate(5.5, 1.0)))) for _ in range(count)]
    return [
        Arrival(at, _tokens(draw, length))
        for at, length in zip(_moments(draw, count, 30.0), lengths, strict=True)
    ]


def conversations(draw: random.Random, count: int) -> list[Arrival]:
    """Draws twelve conversations at a time, each with a session's name. A conversation has up to
    eight turns, which repeat the earlier ones and add 128 tokens."""
    arrivals = []
    histories = [_tokens(draw, 128) for _ in range(12)]
    names = itertools.count(12)
    sessions = [str(i) for i in range(12)]
    for at in _moments(draw, count, 20.0):
        which = draw.randrange(12)
        if len(histories[which]) >= 128 * 8:
            histories[which] = ()
            sessions[which] = str(next(names))
        histories[which] += _tokens(draw, 128)
        arrivals.append(Arrival(at, histories[which], sessions[which]))
    return arrivals


WORKLOADS: dict[str, Callable[[random.Random, int], list[Arrival]]] = {
    "shared": shared,
    "distinct": distinct,
    "conversations": conversations,
}


async def measure(
    policy: str, arrivals: Sequence[Arrival], num_workers: int, num_kv_blocks: int
) -> dict[str, float]:
    """Measures the prompt tokens that all workers compute, their share of all prompt tokens, and
    the milliseconds to the first token."""
    async with running(num_workers, num_kv_blocks) as (fleet, workers):
        service = Service(fleet, Tokenizer.load(DEMO), RouterConfig(policy=policy), "demo")
        waits = await asyncio.gather(*(_ask(service, arrival) for arrival in arrivals))
    computed = sum(worker.engine.stats.prompt_tokens for worker in workers)
    waits.sort()
    return {
        "computed": computed,
        "share": computed / sum(len(arrival.prompt) for arrival in arrivals),
        "ttft_mean_ms": 1000 * statistics.fmean(waits),
        "ttft_p90_ms": 1000 * waits[len(waits) * 9 // 10],
    }


async def _ask(service: Service, arrival: Arrival) -> float:
    """Sends a request. Returns the seconds to its first token."""
    await asyncio.sleep(arrival.at)
    began = time.perf_counter()
    first = 0.0
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    async for _ in service.generate([arrival.prompt], sampling, session_id=arrival.session):
        first = first or time.perf_counter() - began
    return first


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--blocks", type=int, default=160, help="KV cache per worker, in blocks of 16 tokens"
    )
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument(
        "--repeats", type=int, default=5, help="repeats of all policies, each with a new draw"
    )
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    options = parser.parse_args()
    check_writable(options.out)
    torch.set_num_threads(1)
    bare = bare_us_per_token()
    print(beside(bare))
    logging.getLogger("pdserve").setLevel(logging.ERROR)
    for workload in options.workloads:
        runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in options.policies}
        for repeat in range(options.repeats):
            arrivals = WORKLOADS[workload](random.Random(repeat), options.requests)
            for policy in options.policies:
                runs[policy].append(
                    asyncio.run(measure(policy, arrivals, options.workers, options.blocks))
                )
        for policy, results in runs.items():
            append(
                options.out, _row(options, workload, policy, results) | {"bare_us_per_token": bare}
            )
            print(
                f"{workload:14}{policy:14}"
                + "".join(f"{k} {_median(results, k):9.2f}  " for k in results[0])
            )


def _row(
    options: argparse.Namespace, workload: str, policy: str, results: list[dict[str, float]]
) -> dict[str, Any]:
    row: dict[str, Any] = {"benchmark": "choosing", "workload": workload, "policy": policy}
    row |= {"workers": options.workers, "blocks": options.blocks, "requests": options.requests}
    for name in results[0]:
        values = [result[name] for result in results]
        row[name] = {
            "median": round(_median(results, name), 4),
            "min": min(values),
            "max": max(values),
        }
    return row | circumstances()


def _median(results: list[dict[str, float]], name: str) -> float:
    return statistics.median(result[name] for result in results)


if __name__ == "__main__":
    main()
