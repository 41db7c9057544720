"""The tables that benchmarks/transfer/hand_off.py prints. They know only its rows."""

from collections.abc import Sequence

from benchmarks.support.markdown import table
from pdserve.bench.record import Json


def request_table(rows: Sequence[Json]) -> str:
    """Returns a table with times in ms: median / worst."""
    head = [
        "tokens",
        "",
        "TTFT",
        "1st to 2nd token",
        "TPOT",
        "lag",
        "seen",
        "pull",
        "MiB",
        "early",
        "descriptors",
    ]
    lines = []
    for row in rows:
        cells = [
            f"{row['tokens']:,}",
            row["mode"],
            *(_times(row[name]) for name in ("ttft_ms", "gap_ms", "tpot_ms")),
        ]
        if "bytes" in row:
            rate = "-" if row["gb_per_s"] is None else f"{row['gb_per_s']:.1f}"
            cells += [_times(row[name]) for name in ("lag_ms", "seen_ms", "pull_ms")] + [
                f"{row['bytes'] / 2**20:,.1f}"
            ]
            cells += [
                f"{row['early_share']:.0%}",
                f"{row['descriptors']:,.0f}",
                row["transport"],
                rate,
            ]
        else:
            cells += [""] * 8
        lines.append([*cells, f"{row['num_different']} of {row['repeats']}"])
    return table([*head, "transport", "GB/s", "other answers"], lines)


def step_table(row: Json) -> str:
    """Returns a table of one line."""
    what = (
        f"{row['batch']} x {row['context']:,}" if row["part"] == "decode" else f"{row['chunk']:,}"
    )
    ratio = row["ratio"]
    cells = [
        what,
        f"{row['tokens']:,}",
        str(row["pairs"]),
        *(_times(row[name]) for name in ("off_ms", "on_ms")),
    ]
    cells += [f"{ratio['median']:.3f}", " to ".join(f"{value:.3f}" for value in ratio["quarters"])]
    cells += [" to ".join(f"{value:.3f}" for value in ratio["range"]), str(row["num_transfers"])]
    cells += [f"{row['gb_per_s']:.1f}", row["transport"]]
    first = "D decodes" if row["part"] == "decode" else "P computes"
    head = [
        first,
        "pulled prompt",
        "pairs",
        "step ms without",
        "with transfers",
        "ratio",
        "half of the pairs",
        "range",
    ]
    return table([*head, "transfers", "GB/s", "transport"], [cells])


def together_table(rows: Sequence[Json]) -> str:
    """Returns a table with a line for each number of decode engines."""
    head = ["decode engines", "pulled prompt", "transfers", "MiB each", "pull", "GB/s", "transport"]
    return table(
        head,
        [
            [
                str(row["decodes"]),
                f"{row['tokens']:,}",
                str(row["num_transfers"]),
                f"{row['bytes'] / 2**20:,.1f}",
                _times(row["pull_ms"]),
                f"{row['gb_per_s']:.1f}",
                row["transport"],
            ]
            for row in rows
        ],
    )


def _times(figures: Json) -> str:
    return f"{figures['p50']:.2f} / {figures['worst']:.2f}"
