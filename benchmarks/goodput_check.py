"""Predicts the windows of benchmarks.goodput by the planner's simulation, and compares them with
what was measured.

    python -m benchmarks.goodput_check --predict benchmarks/results/goodput-predicted.jsonl
    python -m benchmarks.goodput_check --predict FILE --only trace-auto --rates 6,7
    python -m benchmarks.goodput_check --against benchmarks/results/goodput-predicted.jsonl goodput

Predictions are made and kept before anything is measured. The requests are those that are sent:
same trace, same moments, same lengths. `goodput` is the folder that benchmarks.goodput wrote. The
exit status is 1 if a goodput is off by more than 10 %, or TTFT or TPOT (p50, p90) by more than 15
%. Latencies at rates at which less than half of the requests are in time are not judged, and
neither is a goodput of which the windows give a bound alone, unless this bound is off. Of equal
windows, and of equal predictions, the newest counts. If the folder has windows of several commits,
`--commits` says which ones count, and so does `--predicted-at` of the predictions.
"""

import argparse
import json
import math
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
from pdserve.bench.replay.figures import Run, WindowResult, limit
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


def predictions(
    profile: Profile, simulators: Simulators, only: Sequence[str], rates: str | None
) -> Iterator[Json]:
    """Yields a row for each window. only: such as "trace-auto". rates: instead of the usual
    ones."""
    found = traces()
    cases = [
        (name, layout, float(rate))
        for name, load in LOADS.items()
        for layout in LAYOUTS
        if f"{name}-{layout}" in only
        for rate in (rates or load.rates[layout]).split(",")
    ]
    for name, layout, rate in tqdm(cases, unit=" windows", leave=False):
        outcome = simulators.run(job(found[name], name, layout, rate, profile))
        row: Json = {"benchmark": "goodput_check", "load": name, "layout": layout, "rate": rate}
        row["kept"] = round(outcome.kept, 4)
        for figure in ("ttft_ms", "tpot_ms"):
            values = getattr(outcome, figure)
            row[figure] = dict(zip(("p50", "p90", "p99"), values, strict=True)) if values else None
        yield row | circumstances()


class Range(NamedTuple):
    """Bounds of a goodput that follow from windows, in requests per second."""

    least: float
    most: float

    def __str__(self) -> str:
        if self.least == self.most:
            return f"{self.least:.2f}"
        return f"{self.least:.2f} to {self.most:.2f}" if self.most < math.inf else f"> {self.least}"


def goodput(points: Sequence[Point]) -> Range:
    """Returns the highest rate at which the wanted share is in time."""
    found = limit(cast(Sequence[WindowResult], points), WANTED)
    if found.rate is None:
        return Range(0.0, min(point.rate for point in points))
    return Range(found.rate, math.inf if found.at_least else found.rate)


def compare(rows: Sequence[Json], folder: Path, commits: Sequence[str] = ()) -> int:
    """Prints predicted and measured figures. Returns how many are off. commits: whose windows
    count; none: all."""
    num_off = 0
    for name in LOADS:
        path = folder / f"{name}.jsonl"
        runs = Store(path).runs if path.exists() else []
        for series in series_of([run for run in runs if _is_of(run, commits)], name):
            mine = {r["rate"]: r for r in rows if (r["load"], r["layout"]) == (name, series.name)}
            results = [run.result for run in series.runs]
            for result in results:
                if result.rate in mine:
                    num_off += _show(f"{name} {series.name}", mine[result.rate], result)
            if mine:
                ours = goodput([Point(rate, row["kept"]) for rate, row in mine.items()])
                theirs = goodput([Point(r.rate, r.attainment) for r in results])
                num_off += _compared_goodput(f"{name} {series.name}: goodput", ours, theirs)
    return num_off


def _is_of(run: Run, commits: Sequence[str]) -> bool:
    commit = str(run.result.circumstances.get("commit", ""))
    return not commits or any(map(commit.startswith, commits))


def _compared_goodput(name: str, ours: Range, theirs: Range) -> bool:
    least = ours.least / theirs.most
    most = ours.most / theirs.least if theirs.least else math.inf
    is_off = least > 1 + GOODPUT_OFF or most < 1 - GOODPUT_OFF
    is_right = least >= 1 - GOODPUT_OFF and most <= 1 + GOODPUT_OFF
    ratio = f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"
    verdict = " !" if is_off else "" if is_right else ", not judged"
    print(f"{name}: predicted {ours}, measured {theirs} = {ratio}{verdict}")
    return is_off


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
    names = [f"{load}-{layout}" for load in LOADS for layout in LAYOUTS if layout != BEFORE]
    parser.add_argument("--only", action="append", choices=names, help="may be repeated")
    parser.add_argument("--rates", help="requests/s to predict, instead of the usual ones")
    parser.add_argument("--commits", nargs="+", default=(), help="whose windows to compare")
    parser.add_argument("--predicted-at", metavar="COMMIT", help="whose predictions to compare")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--predict", type=Path, metavar="FILE", help="file to append predictions to")
    way.add_argument("--against", type=Path, metavar="FILE", help="predictions to compare")
    options = parser.parse_args()
    if options.against is not None:
        if options.folder is None:
            parser.error("--against needs the folder of what was measured")
        lines = options.against.read_text().splitlines()
        wanted = options.predicted_at or ""
        rows = [row for row in map(json.loads, lines) if row.get("commit", "").startswith(wanted)]
        return int(compare(rows, options.folder, options.commits) > 0)
    check_writable(options.predict)
    with Simulators(1) as simulators:
        profile, only = read_profile(options.profile), options.only or names
        for row in predictions(profile, simulators, only, options.rates):
            tqdm.write(f"{row['load']} {row['layout']} {row['rate']:g}: {row['kept']:.1%}")
            append(options.predict, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
