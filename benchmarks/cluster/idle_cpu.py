"""Measures what an idle cluster costs: the CPU share of each worker (its replica and the processes
of its ranks) and of each rank, over half a minute without requests.

    python -m benchmarks.cluster.idle_cpu            # beside a running `make serve`

After that, a bare uvicorn shows how fast this machine is now. The exit code is 1 if a worker takes
5 % of a core or more, or a rank 1 %. All workers must have equally many ranks. Processes of this
machine are found by the titles that Ray gives them.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import psutil
from tqdm import tqdm

from benchmarks.support.yardstick import bare_us_per_token, beside
from pdserve.bench.record import append, check_writable, circumstances

LIMIT = 0.05
RANK_LIMIT = 0.01
REPLICAS = ("ray::ServeReplica:pdserve:Prefill", "ray::ServeReplica:pdserve:Decode")
ENGINE = "ray::EngineActor"


def titled(*titles: str) -> list[psutil.Process]:
    """Finds processes whose title begins with one of `titles`."""
    return [
        p
        for p in psutil.process_iter(["cmdline"])
        if " ".join(p.info["cmdline"] or []).startswith(titles)
    ]


def shares(processes: list[psutil.Process], seconds: int) -> list[float]:
    """Measures the CPU seconds per second of each process."""
    before = [sum(p.cpu_times()[:2]) for p in processes]
    for _ in tqdm(range(seconds), desc="idle", unit="s"):
        time.sleep(1)
    return [
        (sum(p.cpu_times()[:2]) - start) / seconds
        for p, start in zip(processes, before, strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--note", default="", help="what is special about the cluster")
    parser.add_argument("--out", type=Path, help="file to append a JSON line to")
    args = parser.parse_args()
    check_writable(args.out)
    replicas = titled(*REPLICAS)
    engines = titled(ENGINE)
    if not replicas or not engines or len(engines) % len(replicas):
        raise SystemExit(
            f"found {len(replicas)} workers and {len(engines)} ranks: start `make serve` first, "
            "and once"
        )
    measured = shares(replicas + engines, args.seconds)
    ranks = measured[len(replicas) :]
    ranks_each = len(engines) // len(replicas)
    worst = max(measured[: len(replicas)]) + ranks_each * max(ranks)
    mean = sum(measured) / len(replicas)
    bare = bare_us_per_token()
    print(
        f"{len(replicas)} workers: {mean:.1%} of a core each, at most {worst:.1%} (limit "
        f"{LIMIT:.0%}); {len(ranks)} ranks: {statistics.mean(ranks):.2%}, at most "
        f"{max(ranks):.2%} (limit {RANK_LIMIT:.0%}); {beside(bare)}"
    )
    row = {
        "benchmark": "idle_cpu",
        "workers": len(replicas),
        "mean": round(mean, 4),
        "worst": round(worst, 4),
        "ranks": len(ranks),
        "rank_mean": round(statistics.mean(ranks), 4),
        "rank_worst": round(max(ranks), 4),
    }
    row |= {"note": args.note} if args.note else {}
    append(args.out, row | {"bare_us_per_token": bare} | circumstances())
    return int(worst >= LIMIT or max(ranks) >= RANK_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
