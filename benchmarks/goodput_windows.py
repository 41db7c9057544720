"""The saved windows of `benchmarks.goodput` on two H200s, as the table and the plot of
docs/performance.md. `benchmarks.performance` writes both."""

import json
import lzma
from functools import cache
from typing import Any

from benchmarks.support.markdown import number, table
from benchmarks.support.places import RESULTS

SINCE = "3ced370a"  # first commit whose windows count; pacing changed much before
LAYOUTS = {
    "auto": "1P + 1D, `auto`",
    "always": "1P + 1D, `always`",
    "whole": "2 whole",
    "before": "2 whole, dcb4ba1",
}
COLORS = {"auto": "#1f77b4", "always": "#ff7f0e", "whole": "#2ca02c", "before": "#5b6b7b"}


@cache
def goodput_windows(load: str) -> dict[str, list[dict[str, Any]]]:
    """The windows under a load, by layout, the oldest first.

    Only the layout that runs an old commit may have been measured before SINCE.
    """
    with lzma.open(RESULTS / f"goodput-{load}-h200.jsonl.xz", "rt") as file:
        windows = [row for row in map(json.loads, file) if row["kind"] == "window"]
    commits = [row["circumstances"]["commit"] for row in windows]
    since = commits.index(SINCE)
    return {
        layout: [
            row
            for row in (windows if layout == "before" else windows[since:])
            if row["settings"]["label"] == layout
        ]
        for layout in LAYOUTS
    }


def around_goodput(load: str) -> list[dict[str, Any]]:
    """The newest window of each layout under a load in which 90 % are in time, and the newest at a
    higher rate in which they are not."""
    shown = []
    for rows in goodput_windows(load).values():
        kept = [row for row in rows if row["attainment"] >= 0.9][-1:]
        rate = kept[0]["settings"]["rate"] if kept else 0.0
        shown += kept
        shown += [r for r in rows if r["attainment"] < 0.9 and r["settings"]["rate"] > rate][-1:]
    return shown


def goodput_table() -> str:
    lines = []
    for load, name in (("trace", "trace"), ("poisson", "2,048/128")):
        for row in around_goodput(load):
            times = [
                " / ".join(number(row[figure][point]) for point in ("p50", "p90", "p99"))
                for figure in ("ttft_ms", "tpot_ms")
            ]
            settings = row["settings"]
            layout = LAYOUTS[settings["label"]]
            kept = f"{row['attainment']:.1%}"
            commit = row["circumstances"]["commit"]
            lines.append([name, layout, f"{settings['rate']:g}", kept, *times, commit])
    head = ["load", "layout", "requests/s", "in time"]
    points = "p50 / p90 / p99, ms"
    return table([*head, f"TTFT {points}", f"TPOT {points}", "commit"], lines)


def draw_goodput(axis: Any, load: str, title: str) -> None:
    """The share in time over the rate, of the newest window at each rate."""
    for layout, rows in goodput_windows(load).items():
        newest = {row["settings"]["rate"]: row["attainment"] for row in rows}
        rates = sorted(newest)
        label = LAYOUTS[layout].replace("`", "")
        axis.plot(rates, [100 * newest[r] for r in rates], "o-", label=label, color=COLORS[layout])
    axis.axhline(90, color="black", linewidth=0.8, linestyle="--")
    axis.set_xlabel("requests/s")
    axis.set_ylabel("in time, %")
    axis.set_title(title, fontsize=10)
