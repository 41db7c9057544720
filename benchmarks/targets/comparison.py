"""Chooses the figures of a benchmark's rows to compare, and decides if a side is not slower.

A figure's ratio is new / old, or old / new for figures that are better when higher. So above 1 the
new side is worse. This module is pure data and starts nothing. ab.py uses it.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.targets.table import HIGHER_IS_BETTER, HttpRow, Row, http_figures
from pdserve.bench.record import Json

Verdict = Literal["not slower", "undecided", "slower", "shown"]
GOOD: tuple[Verdict, ...] = ("not slower", "shown")

MAX_RATIO = 1.01
# largest half width of a 95 % interval that may decide
GPU_HALF_WIDTH = 0.02
CPU_HALF_WIDTH = 0.04
# Student's t for a two-sided 95 % interval, by degrees of freedom from 1 on. Beyond the table, the
# normal quantile is used.
T_95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
NORMAL_95 = 1.960


@dataclass(frozen=True)
class Figure:
    """One number of a row. If `is_judged` is False, it is shown but decides nothing."""

    value: float
    higher_is_better: bool = False
    is_judged: bool = True

    def over(self, old: "Figure") -> float:
        """Returns the ratio to the old side's figure, which is above 1 if this one is worse."""
        return old.value / self.value if self.higher_is_better else self.value / old.value


@dataclass(frozen=True)
class Comparison:
    """The comparison of one figure."""

    ratios: tuple[float, ...]  # one per pair of neighbouring runs
    half_width: float  # largest half width of an interval that may decide
    is_judged: bool = True  # see Figure

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the ratio's geometric mean (Student's t over logarithms). It is
        unbounded for a single pair."""
        count = len(self.ratios)
        if count < 2:
            return 0.0, math.inf
        logs = [math.log(ratio) for ratio in self.ratios]
        quantile = T_95[count - 2] if count - 2 < len(T_95) else NORMAL_95
        middle = statistics.mean(logs)
        reach = quantile * statistics.stdev(logs) / math.sqrt(count)
        return math.exp(middle - reach), math.exp(middle + reach)

    @property
    def verdict(self) -> Verdict:
        """The verdict. It is "not slower" if the median is at most 1.01, or if a narrow interval
        contains 1."""
        if not self.is_judged:
            return "shown"
        low, high = self.interval
        if self.median <= MAX_RATIO:
            return "not slower"
        if low <= 1.0 <= high:
            return "not slower" if (high - low) / 2 <= self.half_width else "undecided"
        return "slower" if low > 1.0 else "undecided"


def half_width(row: Json, device: str) -> float:
    """Returns the largest half width of an interval that may decide this row's figures. `device` is
    the machine's GPU, or "cpu"."""
    on_cpu = row["benchmark"] == "cluster_cpu" or row.get("device", device) == "cpu"
    return CPU_HALF_WIDTH if on_cpu else GPU_HALF_WIDTH


def figures_of(row: Json, targets: Mapping[str, Row]) -> dict[str, Figure]:
    """Returns the figures of a row, by name. A name begins with the row's name.

    - targets: Rows of the table of targets, by id.

    Raises ValueError if the row's benchmark is unknown, or if requests of its load failed.
    """
    if row["benchmark"] == "targets":
        return _of_targets(row, targets)
    if row["benchmark"] == "cluster_cpu":
        name = f"cluster_cpu {row['mode']}"
        return {
            f"{name} us_per_token": Figure(row["us_per_token"]["median"]),
            f"{name} ttft_p50": Figure(row["ttft_ms"]["p50"]),
        }
    if row["benchmark"] == "kv_transfer":
        sizes = f"{row['block_size']}->{row['to_block_size']}"
        name = f"kv_transfer {row['pool']} {row['tokens']} {sizes} {row['tls']}"
        return {f"{name} gb_per_s": Figure(row["gb_per_s"], higher_is_better=True)}
    if row["benchmark"] == "hand_off":
        return _of_hand_off(row)
    raise ValueError(f"rows of benchmark {row['benchmark']!r} cannot be compared")


def _of_targets(row: Json, targets: Mapping[str, Row]) -> dict[str, Figure]:
    target = targets.get(row["row"])
    if target is None:
        raise ValueError(f"row {row['row']!r} is not in the table of targets")
    figures = row["figures"]
    if not isinstance(target, HttpRow):
        value = figures[target.metric]["median"]
        better = target.unit in HIGHER_IS_BETTER
        return {f"{target.id} {target.metric}": Figure(value, better)}
    if figures["num_failed"]:
        raise ValueError(
            f"{target.id}: {figures['num_failed']} requests failed: {figures['errors']}"
        )
    values = http_figures(figures)
    shown = {
        name: value for name in ("ttft_p50", "tpot_p50") if (value := values[name]) is not None
    }
    # With several clients that each wait for their answer, TTFT and TPOT trade off, depending on
    # which prompts happen to share a step. The time of a request is fixed by clients = requests/s x
    # time of a request, so that is judged.
    is_crowd = target.clients is not None and target.clients > 1
    found = {
        f"{target.id} {name}": Figure(value, is_judged=not is_crowd)
        for name, value in shown.items()
    }
    if target.clients is not None:
        found[f"{target.id} tok_s"] = Figure(figures["output_tokens_per_s"], higher_is_better=True)
    if is_crowd:
        found[f"{target.id} request_ms"] = Figure(_request_ms(figures, target))
    return found


def _request_ms(figures: Json, target: HttpRow) -> float:
    """Returns the mean time of a request, from the mean TTFT and the mean TPOT."""
    lengths = target.shape.output_len
    following = (lengths.low + lengths.high) / 2 - 1
    return float(figures["ttft_ms"]["mean"] + following * figures["tpot_ms"]["mean"])


def _of_hand_off(row: Json) -> dict[str, Figure]:
    if row["part"] != "requests":
        return {
            f"hand_off {row['part']} {name}": Figure(row[name]["p50"])
            for name in ("off_ms", "on_ms")
        }
    names = [name for name in ("ttft_ms", "gap_ms", "tpot_ms", "pull_ms") if name in row]
    where = f"hand_off {row['tokens']} {row['mode']}"
    return {f"{where} {name}": Figure(row[name]["p50"]) for name in names}


def compared(
    pairs: Sequence[tuple[Mapping[str, Figure], Mapping[str, Figure]]],
    half_width_of: Mapping[str, float],
) -> dict[str, Comparison]:
    """Returns comparisons by figure, for all figures that both sides of every pair have."""
    names = [name for name in pairs[0][0] if all(name in side for pair in pairs for side in pair)]
    return {
        name: Comparison(
            tuple(new[name].over(old[name]) for old, new in pairs), half_width_of[name]
        )
        for name in names
    }
