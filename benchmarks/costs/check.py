"""Compares measurements of the engine with predictions of the cost model.

- One GPU: the newest figures of each row in benchmarks/results.
- Two GPUs: the only three rows of tensor parallelism, with the sums that commit 8605074 had
  (log.md, which has no JSON lines of them). Also the halves of Llama-8B on two GPUs without sums,
  from the probes before that commit. No constant of the model is fitted to these rows.

Stages were never measured on several GPUs. cost_model.py uses this module.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.costs.loads import Workers, split_load
from benchmarks.costs.run import figure, run
from benchmarks.support.places import BENCHMARKS, RESULTS, SHAPES
from benchmarks.targets.table import HttpRow, OfflineRow, Row, read_model, read_rows
from pdserve.bench.record import Json
from pdserve.models.config import ModelSpec, read_spec
from pdserve.plan.costs.rates import H200
from pdserve.plan.costs.step import CostModel, Degrees

TABLES = BENCHMARKS / "targets"
LLAMA_8B = "llama-3.1-8b"
ONE_GPU = ("targets-h200.jsonl", "mixtures-h200.jsonl", "ab-h200.jsonl")
TENSOR_PARALLEL = "log.md, 8605074"
HALVES = "probes, halves without sums"
PAIRS_COMMIT = "ce33093"  # rows of two GPUs as P and D, with all prompts computed by P
TOLERANCE = 0.1


@dataclass(frozen=True)
class Check:
    """A prediction and its measurement. `is_judged` is False for means of a queue, because a small
    error of a prompt's time changes them much."""

    model: str
    degrees: Degrees
    row: str
    unit: str
    predicted: float
    measured: float
    source: str
    is_judged: bool = True

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured

    @property
    def is_off(self) -> bool:
        return self.is_judged and abs(self.ratio - 1) > TOLERANCE

    def record(self) -> Json:
        return {
            "benchmark": "cost_model",
            "model": self.model,
            "degrees": str(self.degrees),
            "row": self.row,
            "unit": self.unit,
            "predicted": round(self.predicted, 4),
            "measured": round(self.measured, 4),
            "ratio": round(self.ratio, 3),
            "source": self.source,
            "is_judged": self.is_judged,
        }


def shape_folder(name: str) -> Path:
    """Returns the folder of a shape in benchmarks/shapes, or `name` as the path of a folder."""
    return SHAPES / name if (SHAPES / name / "config.json").is_file() else Path(name)


@cache
def spec_of(name: str) -> ModelSpec:
    return read_spec(str(shape_folder(name)), "dummy")


def table_of(model: str) -> list[OfflineRow]:
    """Returns the rows that can be predicted, from the model's own table or from
    Llama-3.1-8B's."""
    tables = {read_model(path).name: path for path in sorted(TABLES.glob("*.toml"))}
    rows = read_rows(tables.get(model, TABLES / "targets.toml"))
    return [row for row in rows if isinstance(row, OfflineRow) and row.shape is not None]


def checks() -> Iterator[Check]:
    yield from _one_gpu()
    yield from _tensor_parallel()
    yield from _pairs()


def _one_gpu() -> Iterator[Check]:
    measured = newest_figures()
    for path in sorted(TABLES.glob("*.toml")):
        name = read_model(path).name
        model = CostModel(spec_of(name))
        for row in table_of(name):
            if found := measured.get((name, row.id)):
                figures, source = found
                assert row.metric is not None
                predicted = figure(model, row)[0]
                yield Check(
                    name, model.degrees, row.id, row.unit, predicted, figures[row.metric], source
                )


def newest_figures() -> dict[tuple[str, str], tuple[dict[str, float], str]]:
    """Returns the newest figures, by (model, row): medians over the runs of the newest commit that
    has the row, and their source. From comparisons, only the newer side is used."""
    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    newest: dict[tuple[str, str], tuple[str, str, str]] = {}
    for name in ONE_GPU:
        for line in (RESULTS / name).read_text().splitlines():
            row = json.loads(line)
            if row.get("benchmark") != "targets" or row.get("side") == "old":
                continue
            key = (row["model"], row["row"])
            runs[*key, row["commit"]].append(row["figures"])
            newest[key] = max(newest.get(key, ("",) * 3), (row["time"], row["commit"], name))
    found = {}
    for key, (_, commit, name) in newest.items():
        medians = [
            {k: v["median"] for k, v in figures.items() if isinstance(v, dict) and "median" in v}
            for figures in runs[*key, commit]
        ]
        figures = {k: statistics.median(one[k] for one in medians) for k in medians[0]}
        found[key] = (figures, f"{name}, {commit}")
    return found


def _tensor_parallel() -> Iterator[Check]:
    spec, degrees = spec_of(LLAMA_8B), Degrees(tp=2)
    then = CostModel(spec, degrees, has_one_shot_sums=True)
    free = replace(H200, sum_s=H200.light_tail_s, store_bytes_per_s=math.inf, flag_s=0.0)
    halves = CostModel(spec, degrees, free)

    def decode_ms(model: CostModel) -> float:
        """Predicts the figure as 8605074 measured it: the prompt's time is included."""
        return run(model, 1, 128, 256).seconds / 256 * 1e3

    def prefill_ms(model: CostModel) -> float:
        return run(model, 1, 8192, 1).seconds * 1e3

    for row, unit, predicted, measured, source in (
        ("decode-1", "ms/token", decode_ms(then), 2.66, TENSOR_PARALLEL),
        ("prefill-8k", "ms", prefill_ms(then), 153.0, TENSOR_PARALLEL),
        ("batch-64", "s", run(then, 64, 1024, 256).seconds, 2.42, TENSOR_PARALLEL),
        ("decode-1", "ms/token", decode_ms(halves), 2.53, HALVES),
        ("prefill-8k", "ms", prefill_ms(halves), 108.9, HALVES),
    ):
        yield Check(LLAMA_8B, degrees, row, unit, predicted, measured, source)


def _pairs() -> Iterator[Check]:
    rows = {row.id: row for row in read_rows(TABLES / "targets.toml") if is_open_pair(row)}
    model = CostModel(spec_of(LLAMA_8B))
    for line in (RESULTS / "targets-h200.jsonl").read_text().splitlines():
        result = json.loads(line)
        row = rows.get(result["row"])
        if row is None or result["commit"] != PAIRS_COMMIT:
            continue
        assert isinstance(row, HttpRow) and row.rate is not None
        num_in, num_out = row.shape.input_len.low, row.shape.output_len.low
        load = split_load(Workers(1, model), Workers(1, model), row.rate, num_in, num_out)
        source = f"targets-h200.jsonl, {PAIRS_COMMIT}, 1P + 1D"
        for name, seconds in (("tpot_ms", load.tpot_s), ("ttft_ms", load.ttft_s)):
            assert seconds is not None
            measured = result["figures"][name]["mean"]
            label = f"{row.id} {name.removesuffix('_ms').upper()}"
            is_judged = name == "tpot_ms"
            yield Check(
                LLAMA_8B, Degrees(), label, "ms", seconds * 1e3, measured, source, is_judged
            )


def is_open_pair(row: Row) -> bool:
    return isinstance(row, HttpRow) and row.is_pair and row.rate is not None
