"""Predicts the windows of benchmarks.goodput by the planner's simulation, and compares them with
what was measured.

    python -m benchmarks.goodput_check --predict benchmarks/results/goodput-predicted.jsonl
    python -m benchmarks.goodput_check --against benchmarks/results/goodput-predicted.jsonl goodput

Predictions are made and kept before anything is measured. The requests are those that are sent:
same trace, same moments, same lengths. `goodput` is the folder that benchmarks.goodput wrote. The
exit status is 1 if a goodput is off by more than 10 %, or TTFT or TPOT (p50, p90) by more than 15
%. Rates at which less than half of the requests are in time are not judged.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from tqdm import tqdm

from benchmarks.goodput import (
    BEFORE,
    LAYOUTS,
    LOADS,
    MAX_MODEL_LEN,
    TRACE,
    poisson,
)
from benchmarks.support.simulated_pair import simulated_pair
from pdserve.bench.record import Json, append, check_writable, circumstances
from pdserve.bench.replay.figures import WindowResult, limit
from pdserve.bench.replay.series import series_of
from pdserve.bench.replay.store import Store
from pdserve.bench.replay.trace import Trace, read_trace
from pdserve.bench.replay.window import Pace, Span, take_window
from pdserve.plan.loads import requests_of
from pdserve.plan.profile.profile import DEFAULT, Profile, read_profile
from pdserve.plan.search.simulators import Simulators
from pdserve.plan.simulation.jobs import Job

WANTED = 0.9
GOODPUT_OFF, LATENCY_OFF = 0.10, 0.15
USEFUL = 0.5  # share in time below which latencies say only that queues grow


class Point(NamedTuple):
    """The share of requests in time at a rate, as `limit` reads it."""

    rate: float
    attainment: float


def traces() -> dict[str, Trace]:
    """Returns the requests of each load."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            "trace": read_trace(TRACE),
            "poisson": read_trace(poisson(Path(folder) / "poisson")),
        }


def job(trace: Trace, name: str, layout: str, rate: float, profile: Profile) -> Job:
    """Returns the job that simulates a window."""
    load = LOADS[name]
    window = take_window(trace, Span(), Pace(rate=rate, duration_s=load.seconds), load.caps)
    is_split = layout != "whole"
    return Job(
        pools=simulated_pair(profile, is_split, {}),
        requests=requests_of(window),
        ttft_ms=load.ttft_ms,
        tpot_ms=load.tpot_ms,
        split=layout if is_split else "never",
        max_model_len=MAX_MODEL_LEN,
    )


def predictions(profile: Profile, simulators: Simulators) -> Iterator[Json]:
    """Yields a row for each window."""
    found = traces()
    cases = [
        (name, layout, float(rate))
        for name, load in LOADS.items()
        for layout in LAYOUTS
        if layout != BEFORE
        for rate in load.rates[layout].split(",")
    ]
    for name, layout, rate in tqdm(cases, unit=" windows", leave=False):
        outcome = simulators.run(job(found[name], name, layout, rate, profile))
        row: Json = {"benchmark": "goodput_check", "load": name, "layout": layout, "rate": rate}
        row["kept"] = round(outcome.kept, 4)
        for figure in ("ttft_ms", "tpot_ms"):
            values = getattr(outcome, figure)
            row[figure] = dict(zip(("p50", "p90", "p99"), values, strict=True)) if values else None
        yield row | circumstances()


def goodput(points: Sequence[Point]) -> float | None:
    """Returns the highest rate at which the wanted share is in time."""
    return limit(cast(Sequence[WindowResult], points), WANTED).rate


def compare(rows: Sequence[Json], folder: Path) -> int:
    """Prints predicted and measured figures. Returns how many are off."""
    num_off = 0
    for name in LOADS:
        path = folder / f"{name}.jsonl"
        for series in series_of(Store(path).runs, name) if path.exists() else ():
            mine = {r["rate"]: r for r in rows if (r["load"], r["layout"]) == (name, series.name)}
            results = [run.result for run in series.runs if run.result.rate in mine]
            for result in results:
                num_off += _show(f"{name} {series.name}", mine[result.rate], result)
            if results:
                theirs = goodput([Point(r.rate, r.attainment) for r in results])
                ours = goodput([Point(r.rate, mine[r.rate]["kept"]) for r in results])
                num_off += _compared(f"{name} {series.name}: goodput", ours, theirs, GOODPUT_OFF)
    return num_off


def _show(name: str, row: Json, result: WindowResult) -> int:
    print(f"{name} at {row['rate']:g}/s: {row['kept']:.1%} in time, {result.attainment:.1%}")
    if result.attainment < USEFUL:
        return 0
    return sum(
        _compared(f"    {figure} {place}", row[figure][place], values[place], LATENCY_OFF)
        for figure, values in (("ttft_ms", result.ttft_ms), ("tpot_ms", result.tpot_ms))
        for place in ("p50", "p90")
    )


def _compared(name: str, ours: float | None, theirs: Any, most: float) -> bool:
    if ours is None or theirs is None:
        print(f"{name}: predicted {ours}, measured {theirs}")
        return ours is not theirs
    is_off = abs(ours / theirs - 1) > most
    print(f"{name}: {ours:.2f} / {theirs:.2f} = {ours / theirs:.2f}{' !' if is_off else ''}")
    return is_off


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="what benchmarks.goodput wrote")
    parser.add_argument("--profile", type=Path, default=DEFAULT)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--predict", type=Path, metavar="FILE", help="file to append predictions to")
    way.add_argument("--against", type=Path, metavar="FILE", help="predictions to compare")
    options = parser.parse_args()
    if options.against is not None:
        if options.folder is None:
            parser.error("--against needs the folder of what was measured")
        lines = options.against.read_text().splitlines()
        return int(compare([json.loads(line) for line in lines], options.folder) > 0)
    check_writable(options.predict)
    with Simulators(1) as simulators:
        for row in predictions(read_profile(options.profile), simulators):
            tqdm.write(f"{row['load']} {row['layout']} {row['rate']:g}: {row['kept']:.1%}")
            append(options.predict, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
