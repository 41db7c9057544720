"""Compares the planner's predictions with measurements on two H200s: TTFT and TPOT of 1P + 1D and
of two whole workers under the loads of benchmarks/targets.

    python -m benchmarks.plan_check --out benchmarks/results/plan-check.jsonl

The requests are those that were sent (same seed, same moments). Each line names its measured row.
The rows were measured before workers paced their steps (docs/design/pacing.md), so the simulated
workers do not pace them either. `--split auto` has changed its choices since then, so its rows must
be measured again. The exit status is 1 if a figure is off by more than 15 %.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.places import RESULTS
from benchmarks.support.simulated_pair import simulated_pair
from pdserve.bench.record import append, check_writable, circumstances
from pdserve.bench.workload import poisson_arrivals
from pdserve.plan.profile.profile import DEFAULT, Profile, read_profile
from pdserve.plan.search.simulators import Simulators
from pdserve.plan.simulation.jobs import Job, Outcome, Request

TOLERANCE = 0.15
FIGURES = (
    ("ttft_ms", 0, "p50"),
    ("ttft_ms", 2, "p99"),
    ("tpot_ms", 0, "p50"),
    ("tpot_ms", 2, "p99"),
)


@dataclass(frozen=True)
class Case:
    """One measured load. Either `rate` or `clients` is set."""

    name: str
    row: str
    commits: tuple[str, ...]
    words: str  # part of the command that measured it
    split: str
    num_requests: int
    num_in: int
    num_out: int
    rate: float | None = None  # requests per second
    clients: int | None = None

    def requests(self) -> tuple[Request, ...]:
        times = (
            poisson_arrivals(self.rate, self.num_requests, 0)
            if self.rate is not None
            else [0.0] * self.num_requests
        )
        return tuple(
            Request(at, ((f"own {number}", self.num_in),), self.num_out)
            for number, at in enumerate(times)
        )


def _cases() -> Iterator[Case]:
    for kind, commits, words, split in (
        ("1P + 1D, always", ("7d1ffa9",), "--split always", "always"),
        ("2 whole", ("65b9175",), "--replicas", "never"),
    ):
        yield Case(kind, "pair-10", commits, words, split, 200, 2048, 128, rate=10)
        yield Case(kind, "pair-15", commits, words, split, 300, 2048, 128, rate=15)
        yield Case(kind, "pair-64", commits, words, split, 320, 1024, 128, clients=64)
    yield Case("2 whole", "pair-10-512", ("65b9175",), "--replicas", "never", 200, 2048, 512, 10)


def measured(case: Case) -> dict[str, Any]:
    """Returns medians over the case's runs: figure -> p50, p99."""
    found: list[dict[str, Any]] = []
    for name in ("targets-h200.jsonl", "split-rule-h200.jsonl"):
        for line in (RESULTS / name).read_text().splitlines():
            row = json.loads(line)
            if (
                row["row"] == case.row
                and row["commit"] in case.commits
                and case.words in row["command"]
                and row["time"] not in {each["time"] for each in found}
            ):
                found.append(row)
    assert found, f"{case.name} {case.row} was not measured"
    return {
        figure: {
            name: statistics.median(row["figures"][figure][name] for row in found)
            for name in ("p50", "p99")
        }
        for figure in ("ttft_ms", "tpot_ms")
    }


def predicted(case: Case, profile: Profile, simulators: Simulators) -> Outcome:
    return simulators.run(
        Job(
            pools=simulated_pair(profile, case.split != "never", {"enable_prefix_caching": False}),
            requests=case.requests(),
            clients=case.clients,
            split=case.split,
            is_paced=False,
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", type=Path, default=DEFAULT)
    parser.add_argument("--only", default="", help="check only cases and rows with this text")
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    options = parser.parse_args()
    check_writable(options.out)
    profile = read_profile(options.profile)
    num_off = 0
    with Simulators(1) as simulators:
        for case in _cases():
            if options.only not in f"{case.name} {case.row}":
                continue
            real = measured(case)
            outcome = predicted(case, profile, simulators)
            row: dict[str, Any] = {"benchmark": "plan_check", "case": case.name, "row": case.row}
            texts = []
            for figure, place, name in FIGURES:
                value = getattr(outcome, figure)[place]
                ratio = value / real[figure][name]
                num_off += abs(ratio - 1) > TOLERANCE
                row[f"{figure}_{name}"] = {
                    "predicted": round(value, 3),
                    "measured": round(real[figure][name], 3),
                    "ratio": round(ratio, 3),
                }
                mark = "!" if abs(ratio - 1) > TOLERANCE else " "
                texts.append(f"{value:8.2f} /{real[figure][name]:8.2f} {ratio:5.2f}{mark}")
            print(f"{case.name:16} {case.row:12}" + "  ".join(texts), flush=True)
            append(options.out, row | circumstances())
    print("predicted / measured, ratio: TTFT p50, TTFT p99, TPOT p50, TPOT p99 in ms")
    return 1 if num_off else 0


if __name__ == "__main__":
    sys.exit(main())
