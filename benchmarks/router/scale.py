"""Measures what one router costs in front of 10, 100, 1,000 and 10,000 workers.

It measures the CPU of a request and of a token, messages per second, the memory of the prefix
index, and the time until a silent death is noticed.

    python -m benchmarks.router.scale --workers 10 100 1000 10000 \\
        --out benchmarks/results/scale-cpu.jsonl

The router is real and the workers are on paper (scale_scene.py). A third of them are P, and all
pairs are connected. A quarter hold the first half of each prompt. Other routers only appear in the
workers' reports. CPU is that of one core.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.support.yardstick import bare_us_per_token, beside
from pdserve.bench.record import append, check_writable, circumstances


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workers", nargs="+", type=int, choices=(10, 100, 1000, 10_000), default=[10, 100, 1000]
    )
    parser.add_argument("--split", choices=("auto", "always"), default="auto")
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    options = parser.parse_args()
    check_writable(options.out)
    bare = bare_us_per_token()
    print(beside(bare))
    for number in options.workers:
        row = run(number, options.split)
        append(
            options.out,
            {"benchmark": "scale"} | row | {"bare_us_per_token": bare} | circumstances(),
        )
        shown = (
            f"{name} {value:,.4g}" for name, value in row.items() if isinstance(value, float | int)
        )
        print("  ".join(shown), flush=True)
    return 0


def run(num_workers: int, split: str) -> dict[str, Any]:
    """Measures in a process of its own, whose clocks are virtual."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.router.scale_scene", str(num_workers), "--split", split],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    )
    if done.returncode:
        raise RuntimeError(f"{num_workers} workers: {done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout)
    return row


if __name__ == "__main__":
    sys.exit(main())
