"""Predicts a model's times on several H200s: the rows of benchmarks/targets, and the pieces of
their time.

    python -m benchmarks.engine.cost_model --model llama-3.1-8b --tp 2
    python -m benchmarks.engine.cost_model --model llama-3.1-70b --tp 2 --pp 2
    python -m benchmarks.engine.cost_model --model qwen3-30b-a3b --dp 4 --ep
    python -m benchmarks.engine.cost_model --check  # beside all that was measured
    python -m benchmarks.engine.cost_model --all --out benchmarks/results/cost-model.jsonl

--check prints predicted / measured, and its status is 1 if a row is off by more than 10 %. Nothing
runs on a device. The rates (rates.py) and the cost of a step (step.py) are in pdserve/plan/costs/.
Whole rows (run.py), prefill and decode workers (loads.py), and measurements (check.py) are in
benchmarks/costs/.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from benchmarks.costs.check import (
    LLAMA_8B,
    LLAMA_70B,
    QWEN,
    Check,
    checks,
    spec_of,
    table_of,
)
from benchmarks.costs.loads import Workers, hand_over_s, split_load
from benchmarks.costs.run import figure
from benchmarks.support.markdown import table
from pdserve.bench.cli import add_output_arguments
from pdserve.bench.option_values import integer
from pdserve.bench.record import Json, append, check_writable, circumstances
from pdserve.plan.costs.step import PIECES, CostModel, Degrees

# The cases that --all predicts.
CASES: tuple[tuple[str, Degrees], ...] = (
    (LLAMA_8B, Degrees()),
    (LLAMA_8B, Degrees(tp=2)),
    (LLAMA_8B, Degrees(pp=2)),
    (LLAMA_8B, Degrees(tp=4)),
    (LLAMA_8B, Degrees(tp=2, pp=2)),
    (LLAMA_70B, Degrees(tp=2)),
    (LLAMA_70B, Degrees(pp=2)),
    (LLAMA_70B, Degrees(tp=4)),
    (LLAMA_70B, Degrees(tp=2, pp=2)),
    (QWEN, Degrees()),
    (QWEN, Degrees(tp=2)),
    (QWEN, Degrees(tp=2, ep=True)),
    (QWEN, Degrees(dp=2, ep=True)),
    (QWEN, Degrees(tp=4, ep=True)),
    (QWEN, Degrees(dp=4, ep=True)),
)
# Requests per second of the rows of 2P + 2D with one GPU each: benchmarks/several_gpus.py.
RATES = (20, 30, 40)
# Degrees of prefill and decode workers between which that benchmark hands prompts off.
HAND_OVERS = (
    (Degrees(tp=4), Degrees(tp=2)),
    (Degrees(pp=2), Degrees(tp=4)),
)
HAND_OVER_TOKENS = 8192
# KiB of the rows that four ranks sum in benchmarks/engine/sums.py.
SUM_SIZES = tuple(8 << power for power in range(14))


def predictions(name: str, degrees: Degrees) -> Iterator[Json]:
    """Predicts each row of the model's table. Raises ValueError if the model does not fit these
    degrees."""
    model = CostModel(spec_of(name), degrees)
    for row in table_of(name):
        predicted, run = figure(model, row)
        yield _record(name, str(degrees), row.id, row.unit, predicted) | {
            "shape": str(row.shape),
            "pieces": {piece: round(part, 6) for piece, part in run.pieces.items()},
            "seconds": round(run.seconds, 6),
        }


def four_gpu_predictions() -> Iterator[Json]:
    """Predicts what benchmarks/several_gpus.py measures in addition to the rows of the tables."""
    spec = spec_of(LLAMA_8B)
    one = Workers(2, CostModel(spec))
    for rate in RATES:
        load = split_load(one, one, rate, 2048, 128)
        for name, seconds in (("TPOT", load.tpot_s), ("TTFT", load.ttft_s)):
            if seconds is not None:
                yield _record(
                    LLAMA_8B, "2P + 2D", f"{rate} req/s, 2048/128, {name}", "ms", seconds * 1e3
                )
    for p, d in HAND_OVERS:
        seconds = hand_over_s(CostModel(spec, p), CostModel(spec, d), HAND_OVER_TOKENS)
        yield _record(
            LLAMA_8B, f"{p} -> {d}", f"hand-over of {HAND_OVER_TOKENS}", "ms", seconds * 1e3
        )
    for ranks in (2, 4):
        model = CostModel(spec, Degrees(tp=ranks))
        for kib in SUM_SIZES:
            microseconds = model.sums.seconds(kib * 1024 // (2 * spec.hidden_size)) * 1e6
            yield _record(LLAMA_8B, f"{ranks} ranks", f"sum of {kib} KiB", "us", microseconds)


def _record(model: str, degrees: str, row: str, unit: str, predicted: float) -> Json:
    return {
        "benchmark": "cost_model",
        "model": model,
        "degrees": degrees,
        "row": row,
        "unit": unit,
        "predicted": round(predicted, 4),
    }


def piece_table(rows: Sequence[Json]) -> str:
    """Returns a table of each row's figure and the share of each piece in its time."""
    used = [piece for piece in (*PIECES, "idle") if any(row["pieces"][piece] for row in rows)]
    lines = [
        [
            row["row"],
            f"{row['predicted']:,.4g} {row['unit']}",
            *(f"{row['pieces'][piece] / row['seconds']:.1%}" for piece in used),
        ]
        for row in rows
    ]
    return table(["row", "predicted", *used], lines)


def check_table(found: Sequence[Check]) -> str:
    def verdict(check: Check) -> str:
        if not check.is_judged:
            return "not judged"
        return "off" if check.is_off else ""

    lines = [
        [
            check.device.split()[1],
            check.model,
            str(check.degrees),
            check.row,
            f"{check.predicted:,.4g}",
            f"{check.measured:,.4g} {check.unit}",
            f"{check.ratio:.3f}",
            verdict(check),
            check.source,
        ]
        for check in found
    ]
    return table(
        ["card", "model", "GPUs", "row", "predicted", "measured", "ratio", "", "source"], lines
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=LLAMA_8B, help="folder of benchmarks/shapes, or one with config.json"
    )
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        parser.add_argument(
            f"--{name}", type=integer(1), default=1, help=f"degree of {what} parallelism"
        )
    parser.add_argument("--ep", action="store_true", help="share experts over a stage's ranks")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="predict rows that were measured")
    action.add_argument("--all", action="store_true", help="predict rows that were not measured")
    add_output_arguments(parser)
    options = parser.parse_args()
    try:
        check_writable(options.out)
        if options.check:
            found = list(checks())
            print(check_table(found))
            status = int(any(check.is_off for check in found))
            rows = [check.record() for check in found]
        else:
            status, rows = 0, list(_predict(options))
    except (ValueError, OSError) as error:
        print(f"cost_model: {error}", file=sys.stderr)
        return 2
    if options.out is not None:
        told = circumstances(options.commit)
        for row in rows:
            append(options.out, row | told)
    return status


def _predict(options: argparse.Namespace) -> Iterator[Json]:
    degrees = Degrees(options.tp, options.pp, options.dp, options.ep)
    cases = CASES if options.all else ((options.model, degrees),)
    for name, degrees in cases:
        rows = list(predictions(name, degrees))
        print(f"\n{name}, {degrees}\n\n{piece_table(rows)}")
        yield from rows
    if options.all:
        rows = list(four_gpu_predictions())
        lines = [
            [row["degrees"], row["row"], f"{row['predicted']:,.4g} {row['unit']}"] for row in rows
        ]
        print(f"\nFour GPUs\n\n{table(['', 'row', 'predicted'], lines)}")
        yield from rows


if __name__ == "__main__":
    sys.exit(main())
