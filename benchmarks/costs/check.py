"""Compares measurements of the engine with predictions of the cost model.

- Rows of benchmarks/targets on one, two and four GPUs: the newest figures of each model, degrees
  and row in benchmarks/results. No constant of the model is fitted to a row of several GPUs.
- Open loops of requests on one prefill and one decode worker.

Rows of H200s are judged, but for mixtures on several GPUs: their eager steps are bound by the
host's launches, which differ from host to host. Rows of H100s are shown, with the few rates that
are an H100's own. cost_model.py uses this module.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.costs.loads import Workers, split_load
from benchmarks.costs.run import figure
from benchmarks.support.places import BENCHMARKS, RESULTS, SHAPES
from benchmarks.targets.table import HttpRow, OfflineRow, Row, read_model, read_rows
from pdserve.bench.record import Json
from pdserve.models.config import ModelSpec, read_spec
from pdserve.plan.costs.rates import H100, H200, Rates
from pdserve.plan.costs.step import CostModel, Degrees

TABLES = BENCHMARKS / "targets"
LLAMA_8B, LLAMA_70B = "llama-3.1-8b", "llama-3.1-70b"
QWEN, LATENTS = "qwen3-30b-a3b", "deepseek-v2-lite"
MODELS = (LLAMA_8B, LLAMA_70B, QWEN, LATENTS)  # the model predicts 16-bit weights alone
FILES = (
    "targets-h200.jsonl",
    "mixtures-h200.jsonl",
    "two-gpus-h200.jsonl",
    "two-gpus-h100.jsonl",
    "four-gpus-h100.jsonl",
)
DEVICES: dict[str, Rates] = {"NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": H100}
JUDGED = "NVIDIA H200"
PAIRS_COMMIT = "ce33093"  # rows of two GPUs as P and D, with all prompts computed by P
TOLERANCE = 0.1


@dataclass(frozen=True)
class Check:
    """A prediction and its measurement. `is_judged` is also False for means of a queue, because a
    small error of a prompt's time changes them much."""

    device: str
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
            "device": self.device,
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
    yield from _rows()
    yield from _pairs()


def _rows() -> Iterator[Check]:
    tables = {name: {row.id: row for row in table_of(name)} for name in MODELS}
    for case, measured in sorted(newest_figures().items()):
        row = tables[case.model].get(case.row)
        if row is None:
            continue
        assert row.metric is not None
        spec = spec_of(case.model)
        is_judged = case.device == JUDGED
        is_judged = is_judged and (spec.experts is None or case.degrees.num_gpus == 1)
        predicted = figure(CostModel(spec, case.degrees, DEVICES[case.device]), row)[0]
        yield Check(
            case.device,
            case.model,
            case.degrees,
            case.row,
            row.unit,
            predicted,
            measured.figures[row.metric],
            measured.source,
            is_judged,
        )


class Case(NamedTuple):
    """A row of a table, and on which card and degrees of ranks it was measured."""

    device: str
    model: str
    degrees: Degrees
    row: str


class Measured(NamedTuple):
    """The newest figures of a case, and their file and commit."""

    figures: dict[str, float]
    source: str


def newest_figures() -> dict[Case, Measured]:
    """Returns the newest figures of each case: medians over the runs of the newest commit that has
    it. Comparisons of two commits are not used: they are made beside other work, on whatever card
    there was, and a prompt of 2,048 tokens takes 45 ms on one card and 50 on another."""
    runs: dict[tuple[Case, str], list[dict[str, Any]]] = defaultdict(list)
    newest: dict[Case, tuple[str, str, str]] = {}
    for name in FILES:
        for line in (RESULTS / name).read_text().splitlines():
            row = json.loads(line)
            if row.get("benchmark") != "targets" or row["model"] not in MODELS:
                continue
            case = Case(row["device"], row["model"], _degrees(row.get("engine", {})), row["row"])
            runs[case, row["commit"]].append(row["figures"])
            newest[case] = max(newest.get(case, ("",) * 3), (row["time"], row["commit"], name))
    found = {}
    for case, (_, commit, name) in newest.items():
        medians = [
            {k: v["median"] for k, v in figures.items() if isinstance(v, dict) and "median" in v}
            for figures in runs[case, commit]
        ]
        figures = {k: statistics.median(one[k] for one in medians) for k in medians[0]}
        found[case] = Measured(figures, f"{name}, {commit}")
    return found


def _degrees(engine: Json) -> Degrees:
    """Returns the degrees that fields of an engine ask for."""
    return Degrees(
        engine.get("tensor_parallel", 1),
        engine.get("pipeline_parallel", 1),
        engine.get("data_parallel", 1),
        engine.get("expert_parallel", False),
    )


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
                JUDGED,
                LLAMA_8B,
                Degrees(),
                label,
                "ms",
                seconds * 1e3,
                measured,
                source,
                is_judged,
            )


def is_open_pair(row: Row) -> bool:
    return isinstance(row, HttpRow) and row.is_pair and row.rate is not None
