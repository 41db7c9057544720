"""The table of targets: reads rows and model from targets.toml, shows saved results beside them,
and marks figures that are behind.

This module is pure data and text. It measures nothing and imports no torch.
benchmarks/targets/measure.py uses it.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support.places import SHAPES
from pdserve.bench.workload import Shape

DEFAULT_MODEL = "llama-3.1-8b"
BEHIND = "✗"
BETWEEN = "~"
REACHED = "✓"
LEGEND = (
    f"{BEHIND} behind vLLM, or behind what ours must reach where vLLM's is not known   "
    f"{BETWEEN} between the two   {REACHED} reached"
)
KINDS = ("start", "latency", "throughput")
PARTS = ("offline", "http", "pair")
HIGHER_IS_BETTER = ("tok/s", "tok_s")
GAP = "gap_p50"  # from the first token to the second; shown only if there is a target for it
HTTP_FIGURES = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "tok_s", GAP)
HTTP_COLUMNS = {
    "ttft": "TTFT p50 / p99 ms",
    GAP: "1st to 2nd token p50 ms",
    "tpot": "TPOT p50 / p99 ms",
    "tok_s": "out tok/s",
}


@dataclass(frozen=True)
class OfflineRow:
    """A row of one engine without a server."""

    id: str
    work: str
    kind: str  # "start", or the bench command that measures `shape`
    unit: str
    vllm: float
    target: float
    floor: float | None = None
    shape: Shape | None = None
    metric: str = "seconds"  # the figure of the result that counts

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if self.kind != "start" and self.shape is None:
            raise ValueError(f"kind {self.kind} needs a shape")


@dataclass(frozen=True)
class HttpRow:
    """A row of a server under a load, with clients (closed loop) or a rate (open loop)."""

    id: str
    work: str
    shape: Shape
    vllm: Mapping[str, float]  # known figures of HTTP_FIGURES, in ms and tok/s
    clients: int | None = None
    rate: float | None = None
    replicas: Mapping[str, float] = field(default_factory=dict)  # figures of two whole vLLM workers
    target: Mapping[str, float] = field(default_factory=dict)  # figures that ours must reach
    is_pair: bool = False  # True: a prefill and a decode worker with a GPU each; False: one worker

    def __post_init__(self) -> None:
        if unknown := [
            name
            for name in {**self.vllm, **self.replicas, **self.target}
            if name not in HTTP_FIGURES
        ]:
            raise ValueError(f"{', '.join(unknown)}: figures are {', '.join(HTTP_FIGURES)}")


Row = OfflineRow | HttpRow


def read_rows(path: Path) -> list[Row]:
    """Reads rows in the file's order. Raises ValueError that names the wrong row."""
    document = _read(path)
    rows: list[Row] = []
    for kind, section in ((OfflineRow, "offline"), (HttpRow, "http"), (HttpRow, "pair")):
        for entry in document.get(section, []):
            try:
                more: dict[str, Any] = (
                    {"shape": Shape.parse(entry["shape"])} if "shape" in entry else {}
                )
                more |= {"is_pair": True} if section == "pair" else {}
                rows.append(kind(**(entry | more)))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}: [[{section}]] {entry.get('id', entry)}: {error}"
                ) from error
    return rows


def read_model(path: Path) -> Path:
    """Returns the folder of the table's model: the one in `shapes/` that its key `model` names, or
    Llama-3.1-8B's. Raises ValueError if there is no such folder."""
    name = _read(path).get("model", DEFAULT_MODEL)
    known = sorted(folder.parent.name for folder in SHAPES.glob("*/config.json"))
    if name not in known:
        raise ValueError(f"{path}: model must be one of {', '.join(known)}, not {name!r}")
    return SHAPES / name


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error


def choose(rows: Sequence[Row], only: Sequence[str]) -> list[Row]:
    """Returns the rows of the named parts ("offline", "http", "pair") and ids. Without names, all
    rows of one GPU. Raises ValueError for a name that is unknown or has no rows in this table."""
    known = [*PARTS, *(row.id for row in rows)]
    for name in only:
        if name not in known:
            raise ValueError(f"--only {name} is unknown; choose from {', '.join(known)}")
        if not any(name in (row.id, part_of(row)) for row in rows):
            raise ValueError(f"--only {name}: the table has no such rows")
    wanted = only or ("offline", "http")
    return [row for row in rows if row.id in wanted or part_of(row) in wanted]


def part_of(row: Row) -> str:
    if isinstance(row, OfflineRow):
        return "offline"
    return "pair" if row.is_pair else "http"


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Reads the newest saved result of each row, by id. Raises ValueError that names a line that is
    no result."""
    results = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            result = json.loads(line)
            if result["benchmark"] == "targets":
                results[result["row"]] = result
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} line {number} is no result of benchmarks/targets/measure.py: {line[:80]}"
            ) from error
    return results


def mark(ours: float, vllm: float | None, target: float | None, higher_is_better: bool) -> str:
    """Returns the mark of a figure. If one of vllm and target is None, the other one must be
    reached."""
    sign = 1 if higher_is_better else -1
    reached = [bound is None or sign * ours >= sign * bound for bound in (vllm, target)]
    if all(reached):
        return REACHED
    return BETWEEN if reached[0] and vllm is not None else BEHIND


def render(rows: Sequence[Row], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns Markdown tables of all rows. Rows without a result show a dash."""
    offline = [row for row in rows if isinstance(row, OfflineRow)]
    parts = []
    if offline:
        lines = [_offline_line(row, results.get(row.id)) for row in offline]
        head = ["work", "vLLM", "floor", "ours must reach", "ours", "vLLM's speed x", ""]
        parts.append("One GPU, offline\n\n" + _table([head, *lines]))
    for part, title in (
        ("http", "One GPU, HTTP server, streaming"),
        ("pair", "Two GPUs, 1P + 1D, streaming"),
    ):
        http = [row for row in rows if isinstance(row, HttpRow) and part_of(row) == part]
        names = [
            name for name in HTTP_COLUMNS if name != GAP or any(GAP in row.target for row in http)
        ]
        lines = [line for row in http for line in _http_lines(row, results.get(row.id), names)]
        head = ["load", "", *(HTTP_COLUMNS[name] for name in names), "failed", "client CPU"]
        if lines:
            parts.append(f"{title}\n\n" + _table([head, *lines]))
    origins = sorted(
        {
            f"{r['model']}, {r['device']}, {r['commit']}"
            for row in rows
            if (r := results.get(row.id))
        }
    )
    return "\n\n".join([*parts, LEGEND, *(f"ours: {origin}" for origin in origins)])


def _offline_line(row: OfflineRow, result: Mapping[str, Any] | None) -> list[str]:
    higher = row.unit in HIGHER_IS_BETTER
    bound = "≥" if higher else "≤"
    floor = "" if row.floor is None else f"{row.floor:,g}"
    line = [row.work, f"{row.vllm:,g} {row.unit}", floor, f"{bound} {row.target:,g}"]
    if result is None:
        return [*line, "-", "", ""]
    ours = result["figures"][row.metric]["median"]
    factor = ours / row.vllm if higher else row.vllm / ours
    cell = _number(ours)
    if "num_cached_kernels" in result["figures"]:
        cell += f", {result['figures']['num_cached_kernels']} kernels cached"
    return [*line, cell, f"{factor:.2f}", mark(ours, row.vllm, row.target, higher)]


def _http_lines(
    row: HttpRow, result: Mapping[str, Any] | None, names: Sequence[str]
) -> list[list[str]]:
    """Returns the lines of one row. `names` are keys of HTTP_COLUMNS."""

    def line(first: str, second: str, cells: Mapping[str, str], *rest: str) -> list[str]:
        return [first, second, *(_http_column(name, cells) for name in names), *rest]

    lines = [line(row.work, "vLLM", _shown(row, row.vllm), "", "")]
    if row.target:
        lines.append(line("", "must reach", _shown(row, row.target), "", ""))
    if result is None:
        return [*lines, ["", "ours", "-", *([""] * (len(names) + 1))]]
    figures = result["figures"]
    cells = {name: _http_cell(row, name, value) for name, value in http_figures(figures).items()}
    failed = f"{figures['num_failed']} {BEHIND}" if figures["num_failed"] else "0"
    return [*lines, line("", "ours", cells, failed, f"{figures['client_cpu_share']:.0%}")]


def _shown(row: HttpRow, figures: Mapping[str, float]) -> dict[str, str]:
    return {
        name: _number(figures[name]) if name in figures else _blank(row, name)
        for name in HTTP_FIGURES
    }


def _blank(row: HttpRow, name: str) -> str:
    return "" if name == GAP and GAP not in row.target else "-"


def http_figures(figures: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns HTTP_FIGURES from a load's figures (bench.load). Older runs have no gap."""
    latencies = {
        f"{name}_{p}": figures[f"{name}_ms"][p] for name in ("ttft", "tpot") for p in ("p50", "p99")
    }
    gap = figures["gap_ms"]["p50"] if "gap_ms" in figures else None
    return latencies | {GAP: gap, "tok_s": figures["output_tokens_per_s"]}


def _http_cell(row: HttpRow, name: str, value: float | None) -> str:
    if name == GAP and GAP not in row.target:
        return ""
    if value is None:
        return f"- {BEHIND}"
    vllm = row.vllm.get(name)
    target = row.target.get(name)
    if (vllm is None and target is None) or (name == "tok_s" and row.rate is not None):
        return _number(value)
    return f"{_number(value)} {mark(value, vllm, target, name in HIGHER_IS_BETTER)}"


def _http_column(name: str, cells: Mapping[str, str]) -> str:
    return cells[name] if name in cells else f"{cells[f'{name}_p50']} / {cells[f'{name}_p99']}"


def _number(value: float) -> str:
    """Writes a number with three to four significant digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _table(lines: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table with aligned columns."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    ]
    return "\n".join(
        [text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]]
    )
