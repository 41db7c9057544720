"""Shows what the rule of the conditional split does to goodput, with prefill and decode workers on
paper and the real chooser.

Workers are paper engines in which prompts and decodes share steps (`paper_worker`). Routers choose
with the real code (`paper_cluster`). The hardware is a handful of constants of one H200, and only
steps take time. So this compares rules, and does not predict a server.

    python -m benchmarks.router.split_rule --load poisson --rates 15 20
    python -m benchmarks.router.split_rule --load closed --clients 64
    python -m benchmarks.router.split_rule --load trace --trace FILE --rates 2 4 6
"""

import argparse
import json
import lzma
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.router.paper_cluster import Layout, PaperCluster
from benchmarks.router.paper_worker import BLOCK, Request
from pdserve.bench.record import append, check_writable, circumstances

MODES: dict[str, tuple[Callable[[int, int], tuple[str, ...]], str, bool]] = {
    "always split": (lambda p, d: ("prefill",) * p + ("decode",) * d, "always", True),
    "whole, not paced": (lambda p, d: ("both",) * (p + d), "never", False),
    "whole, paced": (lambda p, d: ("both",) * (p + d), "never", True),
    "auto of old: 5 %": (lambda p, d: ("prefill",) * p + ("decode",) * d, "auto", False),
    "auto": (lambda p, d: ("prefill",) * p + ("decode",) * d, "auto", True),
}
MAX_PROMPT = 15_000
MAX_TOKENS = 600


def layout_of(mode: str, num_prefill: int = 1, num_decode: int = 1, **change: Any) -> Layout:
    roles, split, paced = MODES[mode]
    return Layout(roles(num_prefill, num_decode), split, paced, **change)  # type: ignore[arg-type]


def poisson(rate: float, prompt: int, tokens: int, count: int, seed: int) -> list[Request]:
    """Draws requests at `rate` requests per second."""
    draw = random.Random(seed)
    now = 0.0
    requests = []
    for number in range(count):
        now += 1000 * draw.expovariate(rate)
        requests.append(Request(number, now, prompt, tokens))
    return requests


def from_trace(path: Path, rate: float, count: int, skip: int) -> list[Request]:
    """Takes `count` requests of a trace after the first `skip`. Their times are scaled to `rate`
    requests per second."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
        rows = [json.loads(line) for line in file][skip : skip + count]
    begin = rows[0]["timestamp"]
    span = rows[-1]["timestamp"] - begin
    scale = 1000 * len(rows) / rate / span
    requests = []
    for number, row in enumerate(rows):
        prompt = min(MAX_PROMPT, row["input_length"])
        tokens = max(1, min(MAX_TOKENS, row["output_length"]))
        blocks = tuple(row["hash_ids"][: prompt // BLOCK])
        requests.append(Request(number, (row["timestamp"] - begin) * scale, prompt, tokens, blocks))
    return requests


def simulate(
    layout: Layout,
    requests: list[Request],
    ttft_ms: float,
    tpot_ms: float,
    seed: int = 0,
    clients: int = 0,
) -> PaperCluster:
    """Simulates a load. With `clients`, that many clients send the next request when their last one
    has ended. 0: all requests are sent at their times."""
    coming = iter(requests)

    def after(request: Request, now: float) -> Request | None:
        following = next(coming, None) if clients else None
        if following is not None:
            following.arrived = now
        return following

    cluster = PaperCluster(layout, ttft_ms, tpot_ms, seed, after)
    first = [next(coming) for _ in range(clients)] if clients else requests
    for request in first if clients else ():
        request.arrived = 0.0
    cluster.run(first)
    return cluster


def figures(cluster: PaperCluster) -> dict[str, float]:
    """Returns percentiles in milliseconds, without the first tenth of the requests."""
    done = sorted(cluster.done, key=lambda r: r.arrived)
    done = done[len(done) // 10 :]
    ttft = sorted(r.first - r.arrived for r in done)
    tpots = {r.number: (r.last - r.first) / (r.num_tokens - 1) for r in done if r.num_tokens > 1}
    tpot = sorted(tpots.values())
    good = sum(
        r.first - r.arrived <= cluster.ttft_ms and tpots.get(r.number, 0.0) <= cluster.tpot_ms
        for r in done
    )
    span = (max(r.last for r in done) - min(r.arrived for r in done)) / 1000
    return {
        "good": good / len(done),
        "goodput": good / span,
        "ttft_p50": ttft[len(ttft) // 2],
        "ttft_p99": ttft[len(ttft) * 99 // 100],
        "tpot_p50": tpot[len(tpot) // 2],
        "tpot_p99": tpot[len(tpot) * 99 // 100],
        "tokens_per_s": sum(r.num_tokens for r in done) / span,
        "split": sum(
            count
            for reason, count in cluster.reasons.items()
            if reason in ("pays", "late", "budget", "always")
        )
        / max(1, sum(cluster.reasons.values())),
    }


def requests_of(options: argparse.Namespace, rate: float, seed: int) -> list[Request]:
    if options.load == "trace":
        skip = seed * options.count
        return from_trace(options.trace, rate, options.count, skip)
    if options.load == "closed":
        return [Request(i, 0.0, options.prompt, options.tokens) for i in range(options.count)]
    return poisson(rate, options.prompt, options.tokens, options.count, seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", choices=("poisson", "closed", "trace"), default="poisson")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[15.0], help="requests per second"
    )
    parser.add_argument("--clients", type=int, default=64, help="clients of the closed loop")
    parser.add_argument("--trace", type=Path, help="file in Mooncake's format, may be .xz")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer, at least 2")
    parser.add_argument("--count", type=int, default=1200, help="requests")
    parser.add_argument("--seeds", type=int, default=3, help="number of runs; shows medians")
    parser.add_argument("--ttft", type=float, default=200.0, help="promised milliseconds")
    parser.add_argument("--tpot", type=float, default=7.0, help="promised milliseconds")
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 1), metavar=("P", "D"))
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--load-period", type=float, default=100.0, help="ms between Loads")
    parser.add_argument("--modes", nargs="+", choices=sorted(MODES), default=list(MODES))
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    options = parser.parse_args()
    check_writable(options.out)
    for rate in options.rates if options.load != "closed" else [0.0]:
        for mode in options.modes:
            layout = layout_of(
                mode,
                *options.workers,
                num_routers=options.routers,
                load_period_ms=options.load_period,
            )
            clients = options.clients if options.load == "closed" else 0
            runs = [
                figures(
                    simulate(
                        layout,
                        requests_of(options, rate, seed),
                        options.ttft,
                        options.tpot,
                        seed,
                        clients,
                    )
                )
                for seed in range(options.seeds)
            ]
            middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            print(
                f"{rate:5g} {mode:17}"
                + "".join(f"  {name} {value:.4g}" for name, value in middle.items()),
                flush=True,
            )
            if options.out is not None:
                row = {"benchmark": "split_rule", "mode": mode, "load": options.load, "rate": rate}
                row |= {"clients": clients, "promise": [options.ttft, options.tpot]}
                row |= {name: round(value, 4) for name, value in middle.items()}
                append(options.out, row | circumstances())


if __name__ == "__main__":
    main()
