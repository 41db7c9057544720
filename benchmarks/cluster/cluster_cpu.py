"""Measures what a streamed token costs the whole cluster in CPU time, and what the cluster adds to
the first token.

It runs `pdserve up` with engines on paper (paced_engine.py: a token every 20 ms, first tokens at
once). The HTTP clients are in this process.

    python -m benchmarks.cluster.cluster_cpu --out benchmarks/results/cluster-cpu.jsonl
    python -m benchmarks.cluster.cluster_cpu --mode aggregated --haproxy

All processes that descend from `pdserve up` count: Ray's, routers, replicas and engines. The
clients do not count. A second figure leaves out the time that the same processes take when idle.
Between the rounds a bare uvicorn (one process, no router) streams as much, which shows the cost of
a token on this machine now. The machine must be quiet. The targets are at most 95 us and 5 ms.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.cluster.token_cost import PROMPT_TOKENS, cpu_seconds, spent, stream_round
from benchmarks.support.places import DEMO
from benchmarks.support.served_cluster import Server, cluster_yaml, free_port, serving
from benchmarks.support.yardstick import bare_server
from pdserve.bench.load import LoadConfig, run_load
from pdserve.bench.option_values import POSITIVE, integer
from pdserve.bench.record import Json, append, check_writable, circumstances, repeated
from pdserve.bench.workload import Shape

# `pdserve` with another engine host, which its command line has no option for.
PAPER_CLI = [
    sys.executable,
    "-c",
    "import sys, pdserve.cluster.app as app, pdserve.cluster.cli as cli; "
    "app.ENGINE_HOST = 'benchmarks.support.paced_engine:PacedEngineHost'; sys.exit(cli.main())",
]
WANTED_US = 95.0
WANTED_MS = 5.0


def document(mode: str, port: int, split: str) -> dict[str, Any]:
    """Makes the cluster.yaml of 1P + 1D, or of one aggregated worker."""
    args = {"mode": mode, "model": {"path": str(DEMO)}, "router": {"split": split}}
    return cluster_yaml(args, port)


def measure(server: Server, bare: Server, options: argparse.Namespace) -> Json:
    before = cpu_seconds(server.pid)
    began = time.monotonic()
    time.sleep(options.idle_s)
    idle_share = sum(spent(before, cpu_seconds(server.pid)).values()) / (time.monotonic() - began)
    first = LoadConfig(
        server.url, Shape.parse(f"{options.first_tokens}x{PROMPT_TOKENS}x2"), clients=1
    )
    ttft = run_load(first, progress=False).figures()["ttft_ms"]
    rounds = []
    bare_us = []
    for number in range(options.rounds):
        rounds.append(stream_round(server, options.streams, options.tokens, idle_share))
        bare_us.append(stream_round(bare, options.streams, options.tokens, 0.0)["us_per_token"])
        cost = rounds[-1]["us_per_token"]
        print(
            f"round {number + 1}: {cost:.1f} us per token, bare uvicorn {bare_us[-1]:.1f}",
            flush=True,
        )
    rounds.sort(key=lambda figures: figures["us_per_token"])
    return {
        "ttft_ms": ttft,
        "bare_us_per_token": repeated(bare_us),
        "idle_cpu_share": round(idle_share, 4),
        **{
            name: repeated([figures[name] for figures in rounds])
            for name in ("us_per_token", "us_per_token_less_idle")
        },
        "median_round": rounds[len(rounds) // 2],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=("disaggregated", "aggregated"), default="disaggregated")
    parser.add_argument("--haproxy", action="store_true", help="put HAProxy in front")
    parser.add_argument("--streams", type=integer(1), default=64)
    parser.add_argument("--tokens", type=integer(2), default=600, help="tokens per stream")
    parser.add_argument("--rounds", type=integer(1), default=5, help="rounds; the median counts")
    parser.add_argument(
        "--first-tokens",
        type=integer(1),
        default=100,
        help="number of requests of one client to measure the TTFT",
    )
    parser.add_argument(
        "--idle-s", type=POSITIVE, default=10.0, help="seconds to measure the idle cluster"
    )
    parser.add_argument("--out", type=Path, help="file to append a JSON line to")
    options = parser.parse_args()
    check_writable(options.out)
    port = free_port()
    flags = ["--haproxy"] if options.haproxy else []
    try:
        with (
            serving(
                document(options.mode, port, "always"), port, PAPER_CLI, options=flags
            ) as server,
            bare_server() as bare,
        ):
            figures = measure(server, bare, options)
    except ValueError as error:
        print(f"cluster_cpu: {error}", file=sys.stderr)
        return 2
    us = figures["us_per_token"]
    ttft = figures["ttft_ms"]
    shape = {
        "mode": options.mode,
        "haproxy": options.haproxy,
        "streams": options.streams,
        "tokens": options.tokens,
    }
    append(
        options.out,
        {
            "benchmark": "cluster_cpu",
            **shape,
            **figures,
            "cores": os.cpu_count(),
            **circumstances(),
        },
    )
    print(
        f"{us['median']:.1f} us of CPU per token (spread {us['spread']:.1f}, "
        f"wanted {WANTED_US:g}), "
        f"{figures['us_per_token_less_idle']['median']:.1f} without what idles; "
        f"bare uvicorn {figures['bare_us_per_token']['median']:.1f}; "
        f"{figures['median_round']['by_kind']}\n"
        f"first token {ttft['p50']:.2f} ms, p99 {ttft['p99']:.2f} (wanted {WANTED_MS:g})"
    )
    return int(us["median"] > WANTED_US or ttft["p50"] > WANTED_MS)


if __name__ == "__main__":
    sys.exit(main())
