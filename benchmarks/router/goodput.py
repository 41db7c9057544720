"""Measures what refusing late requests gains: requests per second that keep their TTFT target, for
several values of `slo.refuse_beyond`.

There are two workers of support/paced_worker.py (a step takes the time that its rows would take on
some device), and a real router. Prompts of 100 to 900 tokens arrive at random moments, at rates
below and above the workers' capacity. Refused requests are not sent again.

    python -m benchmarks.router.goodput --out benchmarks/results/goodput-cpu.jsonl
"""

import argparse
import asyncio
import logging
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.support.paced_worker import FIRST_TOKEN, NUM_TOKENS, VOCAB, Arrival, running
from benchmarks.support.places import DEMO
from benchmarks.support.yardstick import bare_us_per_token, beside
from pdserve.bench.record import append, check_writable, circumstances
from pdserve.configs.router import RouterConfig, SloConfig
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import ApiError
from pdserve.router.request.service import Service
from pdserve.text.tokenizer import Tokenizer

TTFT_MS = 500.0
WARM_UP = 24  # number of requests until workers have reported their speed


def arrivals(draw: random.Random, rate: float, seconds: float) -> list[Arrival]:
    at = 0.0
    found = []
    while (at := at + draw.expovariate(rate)) < seconds:
        found.append(
            Arrival(at, tuple(draw.choices(range(FIRST_TOKEN, VOCAB), k=draw.randint(100, 900))))
        )
    return found


async def measure(
    refuse_beyond: float | None, asked: Sequence[Arrival], seconds: float
) -> dict[str, float]:
    """Measures the requests per second that are in time, and the shares that are in time, late and
    refused. Also returns the TTFT in ms of those that were not refused."""
    slo = SloConfig(ttft_ms=TTFT_MS, refuse_beyond=refuse_beyond)
    async with running(2, 4096) as (fleet, _):
        service = Service(fleet, Tokenizer.load(DEMO), RouterConfig(), "demo", slo=slo)
        for arrival in arrivals(random.Random(99), 1.0, 2 * WARM_UP)[:WARM_UP]:
            await _ask(service, arrival.prompt)
        await asyncio.sleep(1.5)
        answers = await asyncio.gather(*(_after(arrival, service) for arrival in asked))
    waits = sorted(answer for answer in answers if answer is not None)
    in_time = sum(wait <= TTFT_MS for wait in waits)
    return {
        "goodput": in_time / seconds,
        "in_time": in_time / len(answers),
        "late": (len(waits) - in_time) / len(answers),
        "refused": 1 - len(waits) / len(answers),
        "ttft_p50_ms": statistics.median(waits),
        "ttft_p99_ms": waits[len(waits) * 99 // 100],
    }


async def _after(arrival: Arrival, service: Service) -> float | None:
    await asyncio.sleep(arrival.at)
    return await _ask(service, arrival.prompt)


async def _ask(service: Service, prompt: tuple[int, ...]) -> float | None:
    """Sends a prompt. Returns the milliseconds to its first token, or None if it was refused."""
    began = time.perf_counter()
    first = 0.0
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    try:
        async for _ in service.generate([prompt], sampling):
            first = first or 1000 * (time.perf_counter() - began)
    except ApiError as error:
        assert error.code == "predicted_late", error
        return None
    return first


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[15.0, 45.0], help="requests per second"
    )
    parser.add_argument(
        "--limits", nargs="+", type=float, default=[0.0, 4.0, 2.0, 1.0, 0.5], help="0: never refuse"
    )
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument(
        "--repeats", type=int, default=3, help="repeats of all limits, each with a new draw"
    )
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    options = parser.parse_args()
    check_writable(options.out)
    torch.set_num_threads(1)
    bare = bare_us_per_token()
    print(beside(bare))
    logging.getLogger("pdserve").setLevel(logging.ERROR)
    for rate in options.rates:
        runs: dict[float, list[dict[str, float]]] = {limit: [] for limit in options.limits}
        for repeat in range(options.repeats):
            asked = arrivals(random.Random(repeat), rate, options.seconds)
            for limit in options.limits:
                runs[limit].append(asyncio.run(measure(limit or None, asked, options.seconds)))
        for limit, results in runs.items():
            middle = {
                name: round(statistics.median(r[name] for r in results), 3) for name in results[0]
            }
            spread = {
                f"{name}_spread": [min(v), max(v)]
                for name in middle
                if (v := [round(r[name], 3) for r in results])
            }
            row = {
                "benchmark": "goodput",
                "rate": rate,
                "ttft_ms": TTFT_MS,
                "refuse_beyond": limit or None,
            }
            append(
                options.out, row | middle | spread | {"bare_us_per_token": bare} | circumstances()
            )
            print(
                f"{rate:6.1f}/s  beyond {limit or None!s:5}"
                + "".join(f"  {k} {v:g}" for k, v in middle.items()),
                flush=True,
            )


if __name__ == "__main__":
    main()
