"""Times single calls on a CUDA device and compares them with its ceiling. The benchmarks of kernels
share this module. It knows no kernel."""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from tqdm import tqdm

from pdserve.bench.record import append, git_commit


@dataclass(frozen=True)
class Case:
    """One measurement. `work` is the bytes moved (unit "TB/s") or the floating-point operations
    (unit "TFLOP/s") of each of the `num_calls` calls that `call` makes."""

    name: str
    call: Callable[[], object]
    work: float
    unit: str
    num_calls: int = 1


@dataclass(frozen=True)
class Result:
    """The figures of one case, which become a JSON line of --out."""

    name: str
    microseconds: float
    rate: float
    unit: str
    ceiling: float
    device: str
    commit: str


def add_timer_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    parser.add_argument("--only", default="", help="run only cases whose name starts with this")
    parser.add_argument("--sweep", action="store_true", help="also time other tiles and counts")
    parser.add_argument("--read-ceiling", type=float, default=4.45, help="TB/s")
    parser.add_argument("--flop-ceiling", type=float, default=696.0, help="bf16 TFLOP/s")
    parser.add_argument(
        "--commit", default=git_commit(), help="revision to note in --out (default: git's)"
    )


def time_all(cases: Iterator[Case], options: argparse.Namespace) -> None:
    """Prints the figures of each case that --only names, and appends them to --out."""
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, and torch sees none")
    ceilings = {"TB/s": options.read_ceiling, "TFLOP/s": options.flop_ceiling}
    progress = tqdm(cases, unit=" cases", leave=False)
    tqdm.write(f"{'kernel':<64}{'us':>10}{'rate':>9} {'unit':<8}{'of ceiling':>11}")
    for case in progress:
        if not case.name.startswith(options.only):
            continue
        progress.set_description(case.name)
        result = measure(case, ceilings, options.commit)
        share = result.rate / result.ceiling
        tqdm.write(
            f"{result.name:<64}{result.microseconds:>10.1f}{result.rate:>9.3f} "
            f"{result.unit:<8}{share:>11.0%}"
        )
        append(options.out, asdict(result))


def measure(case: Case, ceilings: dict[str, float], commit: str) -> Result:
    milliseconds = triton.testing.do_bench(case.call, warmup=50, rep=200, return_mode="median")
    milliseconds /= case.num_calls
    rate = case.work / (milliseconds * 1e-3) / 1e12
    device = torch.cuda.get_device_name()
    return Result(
        case.name, milliseconds * 1e3, rate, case.unit, ceilings[case.unit], device, commit
    )


def replayed(step: Callable[[], object]) -> Callable[[], object]:
    """Captures `step` in a CUDA graph, as the engine does. Without a graph, short calls would wait
    for the host."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
