"""Serves closed and open loops of requests by homes that share experts, on paper: Qwen3-30B-A3B on
H200s, in virtual time.

    python -m benchmarks.costs.homes_on_paper  # as the engine is now, beside two H200s
    python -m benchmarks.costs.homes_on_paper --captured 3072  # an earlier engine, the same way
    python -m benchmarks.costs.homes_on_paper --all --ttft-ms 1000 --tpot-ms 14

The measured rows are those of the part 30b-ep2-dp in results/two-gpus-h200.jsonl at two commits.
The engine of ae8a0b89 has graphs of prompts up to 8,192 rows, and that of 0899658 had them up to
3,072. Three numbers of lock_step.Costs are fitted. `together` is fitted to the rows of 0899658, and
`alone` to the length of a decode step. `eager_s` is fitted to earlier rows (designs-h200.jsonl,
4b64054), many of whose steps ran eagerly. The others are estimates. So the rows of ae8a0b89 are
predicted, not fitted.

The status is 1 if tokens per second or a TPOT is off by more than 10 %. The mean gap between the
first two tokens is only shown: that of 512 clients came 11 % shorter at ae8a0b89 than predicted.
All figures are means over --seeds runs.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.support.places import RESULTS
from pdserve.plan.simulation.virtual_time import patch_clocks

if TYPE_CHECKING:
    from benchmarks.costs.lock_step import Costs, Course, Load

TOLERANCE = 0.1
FULL_STEP = 8192  # rows of a home, the default on a GPU
# Maximum rows of the graphs of prompts -> the commit that was measured with them.
MEASURED = {FULL_STEP: "ae8a0b89", 3072: "0899658"}
JUDGED = ("tokens/s", "TPOT p50", "TPOT p99")
FIGURES = (*JUDGED, "gap mean", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99")


def measured(clients: int, captured: int) -> dict[str, float]:
    """Returns the figures measured with so many clients, and graphs up to `captured` rows."""
    wanted = {"part": "30b-ep2-dp", "clients": clients, "commit": MEASURED[captured]}
    lines = map(json.loads, (RESULTS / "two-gpus-h200.jsonl").read_text().splitlines())
    *_, row = (line for line in lines if wanted.items() <= line.items())
    found = {"tokens/s": row["output_tokens_per_s"], "gap mean": row["gap_ms"]["mean"]}
    for name in ("ttft", "tpot", "itl"):
        for share in ("p50", "p99"):
            found[f"{name.upper()} {share}"] = row[f"{name}_ms"][share]
    return found


def figures(courses: "Sequence[Course]") -> dict[str, float]:
    """Returns tokens per second, and milliseconds."""
    began = min(course.called_at for course in courses)
    ended = max(course.tokens[-1] for course in courses)
    count = sum(len(course.tokens) for course in courses)
    gaps = [
        [b - a for a, b in zip(course.tokens, course.tokens[1:], strict=False)]
        for course in courses
    ]
    found = {
        "tokens/s": count / (ended - began),
        "gap mean": 1e3 * statistics.mean(each[0] for each in gaps),
    }
    for name, values in (
        ("TTFT", [course.tokens[0] - course.called_at for course in courses]),
        ("TPOT", [statistics.mean(each) for each in gaps]),
        ("ITL", [gap for each in gaps for gap in each]),
    ):
        ordered = sorted(values)
        for share in (50, 99):
            place = min(len(ordered) - 1, len(ordered) * share // 100)
            found[f"{name} p{share}"] = 1e3 * ordered[place]
    return found


def predicted(loads: "Sequence[Load]", costs: "Costs", options: argparse.Namespace) -> list[Any]:
    """Returns the figures of each load, means over several runs. In each run one engine serves
    all loads, one after the other."""
    from benchmarks.costs.check import QWEN, spec_of
    from benchmarks.costs.lock_step import Clients, LockStepExecutor, lock_step_engine
    from pdserve.configs.router import SloConfig

    slo = SloConfig(ttft_ms=options.ttft_ms, tpot_ms=options.tpot_ms)
    runs: list[list[dict[str, float]]] = [[] for _ in loads]
    for seed in range(options.seeds):
        engine = lock_step_engine(spec_of(QWEN), options.homes, slo, costs, seed)
        executor = engine.executor
        assert isinstance(executor, LockStepExecutor)
        for load, found in zip(loads, runs, strict=True):
            executor.clear()
            one = figures(Clients(engine, load, costs, seed).run())
            one["steps with prompts"] = executor.num_mixed
            one["of them eager"] = executor.num_eager
            found.append(one)
    return [{name: statistics.mean(r[name] for r in found) for name in found[0]} for found in runs]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--captured", type=int, default=FULL_STEP, help="most rows that have a graph"
    )
    parser.add_argument("--eager-ms", type=float, default=80.0, help="see lock_step.Costs")
    parser.add_argument("--together", type=float, default=1.15, help="see lock_step.Costs")
    parser.add_argument("--homes", type=int, default=2)
    parser.add_argument("--ttft-ms", type=float, help="promise; default: none")
    parser.add_argument("--tpot-ms", type=float, help="promise; default: none")
    parser.add_argument("--seeds", type=int, default=3, help="number of runs")
    parser.add_argument("--all", action="store_true", help="also loads that were not measured")
    options = parser.parse_args()
    patch_clocks()
    # only after the clocks are patched, because these modules keep references to them
    from benchmarks.costs.lock_step import Costs, Load
    from pdserve.engine.graph_sizes import prompt_sizes

    sizes = prompt_sizes(FULL_STEP, True, options.homes)
    captured = [size for size in sizes if size <= options.captured]
    costs = Costs(captured, eager_s=options.eager_ms / 1e3, together=options.together)
    per_home = options.homes / 2
    closed = [(64, 320), (512, 1536), *([(1, 20), (8, 64)] if options.all else [])]
    loads = [Load(num, 1024, 128, clients=max(1, int(c * per_home))) for c, num in closed]
    if options.all:
        rates = [rate * per_home for rate in (5, 10, 20)]
        loads += [Load(int(15 * rate), 2048, 128, rate=rate) for rate in rates]
    is_like = options.homes == 2 and options.tpot_ms is None and options.captured in MEASURED
    num_off = 0
    for load, found in zip(loads, predicted(loads, costs, options), strict=True):
        clients = load.clients if is_like else None
        real = measured(clients, options.captured) if clients in (64, 512) else {}
        texts = []
        for name in FIGURES:
            ratio = found[name] / real[name] if real else 1.0
            num_off += name in JUDGED and abs(ratio - 1) > TOLERANCE
            beside = f" ({real[name]:,.1f} measured, {ratio:.2f})" if real else ""
            texts.append(f"  {name:9} {found[name]:9,.1f}{beside}")
        counts = f"{found['steps with prompts']:.0f} steps with prompts"
        print(f"{load}: {counts}, {found['of them eager']:.0f} of them eager")
        print("\n".join(texts), flush=True)
    return 1 if num_off else 0


if __name__ == "__main__":
    sys.exit(main())
