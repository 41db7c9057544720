"""What an idle cluster costs: the CPU share of each worker (replica and engine process) over half a minute without
requests.

    .venv/bin/python benchmarks/idle_cpu.py            # beside a running `make serve`
Exit code 1 when a worker takes 5 % of a core or more. Finds the processes of this machine by the titles Ray gives them.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import psutil
from tqdm import tqdm

LIMIT = 0.05
REPLICAS = ("ray::ServeReplica:pdserve:Prefill", "ray::ServeReplica:pdserve:Decode")
ENGINE = "ray::EngineActor"


def titled(*titles: str) -> list[psutil.Process]:
    """Processes whose title begins with one of `titles`."""
    return [p for p in psutil.process_iter(["cmdline"]) if " ".join(p.info["cmdline"] or []).startswith(titles)]


def shares(processes: list[psutil.Process], seconds: int) -> list[float]:
    """CPU seconds a second of each process."""
    before = [sum(p.cpu_times()[:2]) for p in processes]
    for _ in tqdm(range(seconds), desc="idle", unit="s"):
        time.sleep(1)
    return [(sum(p.cpu_times()[:2]) - start) / seconds for p, start in zip(processes, before, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="append a JSON line here")
    args = parser.parse_args()
    replicas, engines = titled(*REPLICAS), titled(ENGINE)
    if not replicas or len(replicas) != len(engines):
        raise SystemExit(
            f"found {len(replicas)} workers and {len(engines)} engines: start `make serve` first, and once"
        )
    measured = shares(replicas + engines, args.seconds)
    worst = max(measured[: len(replicas)]) + max(measured[len(replicas) :])
    mean = sum(measured) / len(replicas)
    print(f"{len(replicas)} workers: {mean:.1%} of a core each, at most {worst:.1%} (limit {LIMIT:.0%})")
    if args.out:
        row = {"benchmark": "idle_cpu", "workers": len(replicas), "mean": round(mean, 4), "worst": round(worst, 4)}
        with args.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
    return int(worst >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
