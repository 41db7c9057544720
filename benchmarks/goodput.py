"""Measures the goodput of two GPUs: requests per second of which 90 % keep their promises. 1P + 1D,
with `split: auto` and `always`, is compared with two whole workers.

    python -m benchmarks.goodput --out goodput                   # all; 40 minutes
    python -m benchmarks.goodput --out goodput --only trace-auto --rates 4,5
    python -m benchmarks.goodput --out goodput --before TREE     # also two whole workers of a tree
    python -m benchmarks.goodput --out goodput --gpus 0 --model demo/pdserve-demo    # on CPU

The loads are the shipped trace (benchmarks/traces), with promises of 1 s and 10 ms, and Poisson
arrivals of 2,048 tokens in and 128 out, with 200 and 7 ms. Caches are cold when a window begins,
which takes 100 seconds of the trace, and 60 of Poisson arrivals. Windows that OUT already has are
not sent again, so a sweep may take several runs. OUT/LOAD.jsonl has the requests, OUT/LOAD.html the
plots, and the table is printed. A refused request counts as one that was not in time. TREE is
another checkout, such as one of an earlier commit; its workers know no promises.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.places import BENCHMARKS, SHAPES
from benchmarks.support.served_cluster import (
    CLI,
    await_workers,
    cluster_yaml,
    free_port,
    run_command,
    serving,
)
from benchmarks.support.stand_in_tokenizer import servable_folder
from pdserve.bench.replay.window import Caps

START_S = 600.0
TRACE = BENCHMARKS / "traces" / "mooncake_synthetic_trace.jsonl.xz"
NUM_ARRIVALS = 5000
MAX_MODEL_LEN = 20000
NUM_WORKERS = 2
CPU_INPUT = 1024  # on CPU, prompts are cut to so many tokens
BEFORE = "before"
LAYOUTS = ("auto", "always", "whole", BEFORE)


@dataclass(frozen=True)
class Load:
    """A load, with its promises.

    seconds: length of a window.
    rates: requests per second to try, by layout.
    caps: the longest prompts and answers.
    """

    ttft_ms: float
    tpot_ms: float
    seconds: float
    rates: Mapping[str, str]
    caps: Caps

    @property
    def options(self) -> list[str]:
        """The caps, as `bench replay` takes them."""
        named = (("--max-input", self.caps.max_input), ("--max-output", self.caps.max_output))
        return [word for name, most in named if most is not None for word in (name, str(most))]


LOADS = {
    "trace": Load(
        1000.0,
        10.0,
        100.0,
        {"auto": "4,4.6,5.2", "always": "2,2.8,3.6", "whole": "4,4.6,5.2", BEFORE: "1.5,2.2,3"},
        Caps(15000, 600),
    ),
    "poisson": Load(
        200.0,
        7.0,
        60.0,
        {"auto": "17,19,21", "always": "15,17,19", "whole": "9,12,15", BEFORE: "9,12,14.6"},
        Caps(),
    ),
}


def poisson(path: Path) -> Path:
    """Writes a trace of Poisson arrivals, at one request per second, and returns its path."""
    draw, at = random.Random(0), 0.0
    with path.open("w") as lines:
        for _ in range(NUM_ARRIVALS):
            line = {"at_s": round(at, 6), "input_length": 2048, "output_length": 128}
            lines.write(json.dumps(line) + "\n")
            at += draw.expovariate(1.0)
    return path


def document(load: Load, layout: str, model: Path, num_gpus: int, port: int) -> dict[str, Any]:
    """Returns a cluster.yaml."""
    engine = {"max_model_len": MAX_MODEL_LEN}
    worker = {"num_gpus": num_gpus}
    args: dict[str, Any] = {
        "model": {"path": str(model), "name": "goodput", "load_format": "dummy"},
        "engine": engine if num_gpus else {},
    }
    if layout != BEFORE:
        args["slo"] = {"ttft_ms": load.ttft_ms, "tpot_ms": load.tpot_ms}
        args["logging"] = {"format": "json"}
    if layout in ("auto", "always"):
        args |= {"mode": "disaggregated", "router": {"split": layout}}
        args |= {"prefill": worker, "decode": worker}
    else:
        args |= {"mode": "aggregated", "decode": worker | {"replicas": NUM_WORKERS}}
    return cluster_yaml(args, port)


def command(
    name: str, load: Load, layout: str, rates: str, options: argparse.Namespace, url: str
) -> list[str]:
    """Returns the command that sends the windows of a layout."""
    trace = TRACE if name == "trace" else options.out / "poisson.trace"
    words = [*CLI, "bench", "replay", str(trace), "--url", url, "--rates", rates, *load.options]
    words += ["--duration", str(options.seconds or load.seconds), "--label", layout]
    words += ["--ttft-ms", str(load.ttft_ms), "--tpot-ms", str(load.tpot_ms)]
    words += ["--out", str(options.out / f"{name}.jsonl")]
    if not options.gpus:  # of two equal options the last one counts
        words += ["--max-input", str(CPU_INPUT)]
    return words + (["--commit", options.commit] if options.commit else [])


def measure(name: str, layout: str, options: argparse.Namespace) -> bool:
    """Sends all windows of a layout. Returns True if no request failed. Raises ValueError if its
    cluster does not become ready."""
    load = LOADS[name]
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="pdserve-goodput-") as scratch:
        model = options.model
        if not (model / "tokenizer.json").exists():
            model = servable_folder(model, Path(scratch))
        made = document(load, layout, model.resolve(), options.gpus, port)
        tree = options.before if layout == BEFORE else None
        log = options.out / f"{name}-{layout}.log"
        with serving(made, port, deadline_s=START_S, log=log, tree=tree) as server:
            if layout != BEFORE:
                await_workers(server.url, NUM_WORKERS, START_S)
            rates = options.rates or load.rates[layout]
            return run_command(command(name, load, layout, rates, options, server.url))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [f"{load}-{layout}" for load in LOADS for layout in LAYOUTS]
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument("--only", action="append", choices=names, help="may be repeated")
    parser.add_argument("--rates", help="requests/s to try, such as 4,5, instead of the usual ones")
    parser.add_argument("--seconds", type=float, help="of a window, instead of the usual ones")
    parser.add_argument("--model", type=Path, default=SHAPES / "llama-3.1-8b")
    parser.add_argument("--gpus", type=int, choices=(0, 1), default=1, help="of a worker")
    parser.add_argument("--before", type=Path, metavar="TREE", help="checkout of another commit")
    parser.add_argument("--commit", help="revision noted in results (default: git's)")
    return parser.parse_args()


def main() -> int:
    options = parse()
    options.out.mkdir(exist_ok=True)
    poisson(options.out / "poisson.trace")
    are_done = True
    for name in LOADS:
        for layout in LAYOUTS:
            wanted = options.only is None or f"{name}-{layout}" in options.only
            if not wanted or (layout == BEFORE and options.before is None):
                continue
            try:
                are_done &= measure(name, layout, options)
            except (ValueError, OSError) as error:
                print(f"{name}-{layout}: {error}", file=sys.stderr)
                are_done = False
        results = options.out / f"{name}.jsonl"
        if results.exists():
            page = ["--page", str(options.out / f"{name}.html")]
            run_command([*CLI, "bench", "replay-page", str(results), *page])
    return int(not are_done)


if __name__ == "__main__":
    sys.exit(main())
