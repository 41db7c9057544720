"""Writes the tables and plots of docs/performance.md from saved results.

    python -m benchmarks.performance           # tables and plots
    python -m benchmarks.performance --tables  # tables alone; needs no matplotlib

The figures come from benchmarks/results/*.jsonl (ours) and benchmarks/targets/*.toml (vLLM). This
script measures nothing. `tests/bench/test_performance.py` fails when the tables are out of date.
"""

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.goodput_windows import draw_goodput, goodput_table
from benchmarks.support.markdown import number, table
from benchmarks.support.places import BENCHMARKS, REPOSITORY, RESULTS
from benchmarks.targets.newest import newest_figures
from benchmarks.targets.table import (
    HIGHER_IS_BETTER,
    HttpRow,
    OfflineRow,
    http_figures,
    part_of,
    read_model,
    read_results,
    read_rows,
)

PAGE = REPOSITORY / "docs" / "performance.md"
IMAGES = REPOSITORY / "docs" / "images"
TARGETS = BENCHMARKS / "targets"
VLLM, REPLICAS, OURS = "#9aa5b1", "#5b6b7b", "#1f77b4"
SIDES = (("vLLM P/D", "vllm", VLLM), ("2 x vLLM", "replicas", REPLICAS), ("pdserve", "", OURS))
Results = Mapping[str, Mapping[str, Any]]

FORMS = (
    ("fp8", "fp8 weights"),
    ("fp8-kv", "fp8 weights and KV"),
    ("awq", "AWQ"),
    ("gptq", "GPTQ"),
    ("int4-fp8", "int4, activations in fp8"),
)
TWO_GPUS = "two-gpus-h200.jsonl"
LATENCIES = ("TTFT p50 / p99, ms", "TPOT p50 / p99, ms", "output tokens/s")
SEVERAL_FILES = (TWO_GPUS, "four-gpus-h200.jsonl")
SEVERAL_ROWS = {
    "decode-1": "decode_ms_per_token",
    "prefill-8k": "prefill_ms",
    "batch-512-in": "tokens_per_s",
    "batch-512-out": "tokens_per_s",
}


def offline_figures(rows: Iterable[OfflineRow], results: Results) -> list[tuple[OfflineRow, float]]:
    """Each measured row with our figure."""
    return [
        (row, results[row.id]["figures"][row.metric]["median"]) for row in rows if row.id in results
    ]


def speed(row: OfflineRow, ours: float) -> float:
    """Our speed over vLLM's; above 1, ours is faster."""
    return ours / row.vllm if row.unit in HIGHER_IS_BETTER else row.vllm / ours


def offline_table(targets: str, results: Path) -> str:
    rows = [row for row in read_rows(TARGETS / targets) if isinstance(row, OfflineRow)]
    measured = results_of(results, read_model(TARGETS / targets).name)
    return table(
        ["work", "vLLM", "pdserve", "speed, pdserve / vLLM"],
        [
            [row.work, f"{number(row.vllm)} {row.unit}", number(ours), f"{speed(row, ours):.2f}"]
            for row, ours in offline_figures(rows, measured)
        ],
    )


def results_of(path: Path, model: str) -> dict[str, dict[str, Any]]:
    """The newest row of a model for each id. One file may hold several forms of its weights."""
    rows = map(json.loads, path.read_text().splitlines())
    return {
        row["row"]: row for row in rows if row["benchmark"] == "targets" and row["model"] == model
    }


def qwen3_fp8_table() -> str:
    """Qwen3-30B-A3B in block FP8, beside the same commit's figures in bf16."""
    rows = read_rows(TARGETS / "qwen3-30b-a3b.toml")
    offline = [row for row in rows if isinstance(row, OfflineRow)]
    file = RESULTS / "mixtures-h200.jsonl"
    bf16 = dict(offline_figures(offline, results_of(file, "qwen3-30b-a3b")))
    fp8 = offline_figures(offline, results_of(file, "qwen3-30b-a3b-fp8"))
    lines = []
    for row, ours in fp8:
        ratio = ours / bf16[row] if row.unit in HIGHER_IS_BETTER else bf16[row] / ours
        lines.append([row.work, f"{number(bf16[row])} {row.unit}", number(ours), f"{ratio:.2f}"])
    return table(["work", "bf16", "block FP8", "speed, FP8 / bf16"], lines)


def loads(part: str, results: Results) -> list[tuple[HttpRow, dict[str, float | None]]]:
    """The measured loads of a part ("http" or "pair") with our figures."""
    rows = [row for row in read_rows(TARGETS / "targets.toml") if isinstance(row, HttpRow)]
    return [
        (row, http_figures(results[row.id]["figures"]))
        for row in rows
        if part_of(row) == part and row.id in results
    ]


def latencies(figures: Mapping[str, float | None]) -> list[str]:
    """The cells below LATENCIES. `figures` are HTTP_FIGURES; one that is missing is shown as -."""
    ttft, tpot = (
        " / ".join(number(figures.get(f"{name}_{p}")) for p in ("p50", "p99"))
        for name in ("ttft", "tpot")
    )
    return [ttft, tpot, number(figures.get("tok_s"))]


def http_table(part: str, results: Path) -> str:
    lines = []
    for row, ours in loads(part, read_results(results)):
        sides = [("vLLM", row.vllm), ("pdserve", ours)]
        if part == "pair":
            sides = [("vLLM P/D", row.vllm), ("2 x vLLM", row.replicas), ("pdserve", ours)]
        for place, (name, figures) in enumerate(sides):
            lines.append(["" if place else row.work, name, *latencies(figures)])
    return table(["load", "", *LATENCIES], lines)


def two_gpus(key: str, **wanted: str) -> dict[Any, dict[str, Any]]:
    """The newest row of TWO_GPUS for each value of `key`, of those with the wanted values."""
    rows = [json.loads(line) for line in (RESULTS / TWO_GPUS).read_text().splitlines()]
    chosen = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    return {row[key]: row for row in chosen if key in row}


def fp8_pair_table() -> str:
    """A prefill and a decode worker of Llama-8B with weights and KV cache in fp8."""
    measured = loads("pair", two_gpus("row", model="llama-3.1-8b-fp8"))
    lines = [[row.work.split(" (vLLM")[0], *latencies(ours)] for row, ours in measured]
    return table(["load", *LATENCIES], lines)


def homes_table() -> str:
    """One engine of two homes under clients of 1,024 tokens in, 128 out."""
    measured = two_gpus("clients", part="30b-ep2-dp")
    return table(
        ["clients", *LATENCIES],
        [
            [f"{clients}", *latencies(http_figures(row))]
            for clients, row in sorted(measured.items())
        ],
    )


def several_lines() -> dict[tuple[str, str, str], dict[str, float]]:
    """(model, degrees, cards) -> SEVERAL_ROWS' newest figures."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for case, measured in newest_figures(SEVERAL_FILES).items():
        row = case.row.removeprefix("qwen3-")
        num_gpus = case.degrees.num_gpus
        if row in SEVERAL_ROWS and num_gpus > 1:  # those of one are for comparison
            key = case.model, str(case.degrees), f"{num_gpus} x {case.device.split()[1]}"
            found.setdefault(key, {})[row] = measured.figures[SEVERAL_ROWS[row]]
    return dict(sorted(found.items()))


def several_table() -> str:
    head = [
        "model",
        "degrees",
        "GPUs",
        "decode, batch 1, ms/token",
        "prefill 8,192, ms",
        "512 x (1,024 in, 128 out), tokens/s",
        "512 x (256 in, 512 out), tokens/s",
    ]
    return table(
        head,
        [
            [*line, *(number(figures.get(row)) for row in SEVERAL_ROWS)]
            for line, figures in several_lines().items()
        ],
    )


def quantised_table() -> str:
    """Figures of quantised weights. vLLM's are an H200's."""
    cards = [read_results(RESULTS / f"quantised-{card}.jsonl") for card in ("h200", "h100")]
    lines = []
    for form, name in FORMS:
        rows = read_rows(TARGETS / f"llama-3.1-8b-{form}.toml")
        offline = [row for row in rows if isinstance(row, OfflineRow)]
        ours = [
            {row.id: figure for row, figure in offline_figures(offline, results)}
            for results in cards
        ]
        for row in offline:
            figures = [number(found.get(row.id)) for found in ours]
            lines.append([name, row.work, f"{number(row.vllm)} {row.unit}", *figures])
    return table(["form", "work", "vLLM, H200", "pdserve, H200", "pdserve, H100"], lines)


def tables() -> dict[str, str]:
    """The tables by their names in the page."""
    h200 = RESULTS / "targets-h200.jsonl"
    return {
        "engine": offline_table("targets.toml", h200),
        "http": http_table("http", h200),
        "pair": http_table("pair", h200),
        "qwen3": offline_table("qwen3-30b-a3b.toml", RESULTS / "mixtures-h200.jsonl"),
        "qwen3-fp8": qwen3_fp8_table(),
        "deepseek": offline_table("deepseek-v2-lite.toml", RESULTS / "mixtures-h200.jsonl"),
        "several": several_table(),
        "homes": homes_table(),
        "fp8-pair": fp8_pair_table(),
        "goodput": goodput_table(),
        "quantised": quantised_table(),
    }


def with_tables(page: str, made: Mapping[str, str]) -> str:
    """The page with each table between its two markers. ValueError when a marker is missing."""
    for name, text in made.items():
        place = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.S)
        if not place.search(page):
            raise ValueError(
                f"{PAGE} has no place for the table {name}: write <!-- table: {name} -->"
            )
        page = place.sub(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page)  # type: ignore[misc]
    return page


def save(figure: Any, name: str) -> None:
    figure.savefig(IMAGES / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    print(f"wrote {IMAGES.relative_to(REPOSITORY)}/{name}.svg")


def draw_speeds(axis: Any, pairs: Sequence[tuple[str, float]], title: str) -> None:
    """Bars of speeds over vLLM's, with a line at 1."""
    names = [name for name, _ in pairs][::-1]
    values = [value for _, value in pairs][::-1]
    bars = axis.barh(names, values, color=[OURS if value >= 1 else VLLM for value in values])
    axis.bar_label(bars, [f"{value:.2f}" for value in values], padding=3, fontsize=8)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlim(0, max(values) * 1.12)
    axis.set_xlabel("speed, pdserve / vLLM 0.25.1 (more is better)")
    axis.set_title(title, fontsize=10)


def draw_pair(axes: Sequence[Any]) -> None:
    """TTFT p50 and TPOT p99 of each load on two GPUs, ours beside vLLM's."""
    measured = loads("pair", read_results(RESULTS / "targets-h200.jsonl"))
    names = [
        row.work.replace(" Poisson", "").split(" (")[0].replace(", ", "\n") for row, _ in measured
    ]
    for axis, figure, title in (
        (axes[0], "ttft_p50", "TTFT p50, ms (less is better)"),
        (axes[1], "tpot_p99", "TPOT p99, ms (less is better)"),
    ):
        for place, (label, side, color) in enumerate(SIDES):
            values = [(getattr(row, side) if side else ours)[figure] for row, ours in measured]
            spots = [at + (place - 1) * 0.27 for at in range(len(values))]
            axis.bar(spots, values, width=0.27, label=label, color=color)
        axis.set_xticks(range(len(names)), names, fontsize=7)
        axis.set_title(title, fontsize=10)
    axes[0].set_yscale("log")
    axes[0].set_yticks([30, 60, 100, 200, 400, 600], ["30", "60", "100", "200", "400", "600"])
    axes[0].minorticks_off()
    axes[0].legend(fontsize=8)


def draw_several(axis: Any) -> None:
    """Tokens per second over the ways to spread a model."""
    lines = [
        (f"{model.replace('llama-3.1', 'Llama').replace('qwen3', 'Qwen3')}, {spread}, {cards}", row)
        for (model, spread, cards), row in several_lines().items()
        if "batch-512-in" in row
    ]
    bars = axis.barh(
        [name for name, _ in lines][::-1],
        [row["batch-512-in"] for _, row in lines][::-1],
        color=OURS,
    )
    axis.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
    axis.set_xlim(0, max(row["batch-512-in"] for _, row in lines) * 1.15)
    axis.set_xlabel("tokens/s, 512 x (1,024 in, 128 out)")


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "pdserve", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    rows = [row for row in read_rows(TARGETS / "targets.toml") if isinstance(row, OfflineRow)]
    measured = offline_figures(rows, read_results(RESULTS / "targets-h200.jsonl"))
    speeds = [(row.work, speed(row, ours)) for row, ours in measured if row.kind != "start"]
    figure, axis = pyplot.subplots(figsize=(7, 3.4))
    draw_speeds(axis, speeds, "One engine, Llama-3.1-8B shape, bf16, one H200")
    save(figure, "engine-speed")
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.4))
    draw_pair(axes)
    save(figure, "pair-latency")
    figure, axis = pyplot.subplots(figsize=(7, 3))
    draw_several(axis)
    save(figure, "several-gpus")
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.4))
    draw_goodput(axes[0], "trace", "the trace: TTFT <= 1 s, TPOT <= 10 ms")
    draw_goodput(axes[1], "poisson", "2,048/128: TTFT <= 200 ms, TPOT <= 7 ms")
    axes[0].legend(fontsize=8)
    save(figure, "goodput")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tables", action="store_true", help="write the tables and draw nothing")
    asked = parser.parse_args()
    PAGE.write_text(with_tables(PAGE.read_text(), tables()))
    print(f"wrote {PAGE.relative_to(REPOSITORY)}")
    if not asked.tables:
        draw()


if __name__ == "__main__":
    main()
