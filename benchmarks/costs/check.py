"""Compares measurements of the engine with predictions of the cost model.

- Rows of benchmarks/targets on one, two and four GPUs: the newest figures of each model, degrees
  and row in benchmarks/results. No constant of the model is fitted to a row of several GPUs.
- Open loops of requests on one prefill and one decode worker.

Rows of one and two H200s are judged, but for mixtures on two: they are bound by the host's
launches, which differ from host to host. Rows of four GPUs are shown, not judged: two processes of
one commit there were a tenth apart, and most rows have one process alone. Rows of H100s are shown,
with the few rates that are an H100's own. cost_model.py uses this module.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.costs.loads import Workers, split_load
from benchmarks.costs.run import figure
from benchmarks.support.places import BENCHMARKS, RESULTS, SHAPES
from benchmarks.targets.newest import newest_figures
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
    "four-gpus-h200.jsonl",
    "four-gpus-h100.jsonl",
)
DEVICES: dict[str, Rates] = {"NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": H100}
JUDGED = "NVIDIA H200"
MOST_JUDGED_GPUS = 2
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
    for case, measured in sorted(newest_figures(FILES).items()):
        row = tables[case.model].get(case.row) if case.model in tables else None
        if row is None:
            continue
        assert row.metric is not None
        spec = spec_of(case.model)
        most_gpus = MOST_JUDGED_GPUS if spec.experts is None else 1
        is_judged = case.device == JUDGED and case.degrees.num_gpus <= most_gpus
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
