"""Is a commit slower than another? Both run the same benchmarks in turn on one machine, each with
its own code.

    python -m benchmarks.ab OLD NEW --out benchmarks/results/ab-h200.jsonl  # one GPU
    python -m benchmarks.ab OLD NEW --rows decode-1 http-128 pair-10
    python -m benchmarks.ab OLD NEW --rows cluster_cpu 'kv_transfer --ages aged --tokens 8192'
    python -m benchmarks.ab OLD NEW --pack FOLDER  # only packs both, for a machine without git:
    python -m benchmarks.ab FOLDER/1a2b3c4.tar.xz FOLDER/5d6e7f8.tar.xz  # there

OLD and NEW are commits, or packs of commits. A row is an id of targets.toml, or `cluster_cpu`,
`kv_transfer` or `hand_off`. Options after its name go to that benchmark. Each side unpacks its own
package *and* benchmarks and measures with these. This program only starts them and reads their
rows. Runs alternate (old, new, old, new), so that the two of a pair are neighbours in time.

A figure's ratio is new / old, or old / new if higher is better. So above 1 the new side is worse.
The new side is not slower if the median ratio is at most 1.01, or if the 95 % interval contains
1.00 and is at most +-2 % wide (+-4 % on CPU). For a load of several clients, TTFT and TPOT are only
shown, and its tokens/s and the time of a request are judged. A figure that is undecided after
--pairs gets more pairs, up to --max-pairs. All rows go to --out with their side and pair. The exit
status is 1 if any figure is slower or undecided, and 2 if something could not be measured.
"""

import argparse
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks.support.markdown import table
from benchmarks.support.places import BENCHMARKS
from benchmarks.targets.comparison import GOOD, Comparison, Figure, compared, figures_of, half_width
from benchmarks.targets.sides import Side, pack, unpack
from benchmarks.targets.table import Row, part_of, read_rows
from pdserve.bench.option_values import POSITIVE, integer
from pdserve.bench.record import Json, append, check_writable, circumstances, gpu_name

DEFAULT_ROWS = ("decode-1", "batch-64", "batch-512-out", "prefill-2k", "http-1", "http-128")
OTHERS = ("cluster_cpu", "kv_transfer", "hand_off")
TARGETS = BENCHMARKS / "targets" / "targets.toml"


@dataclass(frozen=True)
class Work:
    """One command of a side: `python -m benchmarks.MODULE ARGUMENTS`."""

    module: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join([self.module, *self.arguments])


@dataclass(frozen=True)
class Pair:
    """The figures of one command on both sides, measured one after the other."""

    old: Mapping[str, Figure]
    new: Mapping[str, Figure]


class Comparer:
    """Runs both sides and keeps their figures."""

    def __init__(
        self, old: Side, new: Side, targets: Mapping[str, Row], options: argparse.Namespace
    ) -> None:
        self._sides = {"old": old, "new": new}
        self._targets = targets
        self._options = options
        self._device = gpu_name()
        self._half_widths: dict[str, float] = {}
        self._pairs: dict[Work, list[Pair]] = {}

    def run_pair(self, work: Work, bar: "tqdm[object]") -> None:
        """Runs one pair. Raises ValueError if a side gave no figures."""
        pairs = self._pairs.setdefault(work, [])
        measured = {}
        for name, side in self._sides.items():
            bar.set_description(f"pair {len(pairs) + 1}, {name}: {work.module}")
            rows = side.run(work.module, work.arguments, self._options.timeout)
            measured[name] = self._read(rows)
            for row in rows:
                mine = {"side": name, "pair": len(pairs) + 1, "commit": side.label}
                append(self._options.out, row | mine)
            bar.update()
        pairs.append(Pair(measured["old"], measured["new"]))

    def comparisons(self, work: Work) -> dict[str, Comparison]:
        """Returns the ratios up to now, by figure."""
        pairs = [(pair.old, pair.new) for pair in self._pairs.get(work, [])]
        return compared(pairs, self._half_widths) if pairs else {}

    def is_decided(self, work: Work) -> bool:
        return all(c.verdict in GOOD for c in self.comparisons(work).values())

    def medians(self, work: Work, name: str) -> tuple[float, float]:
        """Returns the medians of a figure on the old and on the new side."""
        pairs = self._pairs[work]
        old = statistics.median(pair.old[name].value for pair in pairs)
        new = statistics.median(pair.new[name].value for pair in pairs)
        return old, new

    def _read(self, rows: Sequence[Json]) -> dict[str, Figure]:
        figures: dict[str, Figure] = {}
        for row in rows:
            mine = figures_of(row, self._targets)
            if twice := figures.keys() & mine.keys():
                raise ValueError(
                    f"two rows have the figure {min(twice)}: ask for fewer cases at once"
                )
            figures |= mine
            self._half_widths |= dict.fromkeys(mine, half_width(row, self._device))
        return figures


def plan(rows: Sequence[str], targets: Mapping[str, Row], repeats: int) -> list[Work]:
    """Returns the commands of --rows. Target rows with the same options and of the same part
    (offline, http, pair) share one command. An undecided row is measured again without the others.
    Raises ValueError that names an unknown row."""
    works: list[Work] = []
    ids: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for text in rows:
        name, *arguments = shlex.split(text)
        if name in targets:
            ids.setdefault((part_of(targets[name]), tuple(arguments)), []).append(name)
        elif name in OTHERS:
            works.append(Work(name, tuple(arguments)))
        else:
            raise ValueError(
                f"--rows {name} is unknown; choose from {', '.join([*targets, *OTHERS])}"
            )
    for (_, given), names in ids.items():
        only = [word for name in names for word in ("--only", name)]
        works.append(Work("targets", (*only, "--repeats", str(repeats), *given)))
    return works


def compare(comparer: Comparer, works: Sequence[Work], num_pairs: int, max_pairs: int) -> None:
    """Runs pairs of every command, and then more pairs of undecided ones."""
    todo = list(works)
    with tqdm(total=2 * num_pairs * len(todo), unit="run") as bar:
        for number in range(1, max_pairs + 1):
            for work in todo:
                comparer.run_pair(work, bar)
            if number >= num_pairs:
                todo = [work for work in todo if not comparer.is_decided(work)]
                if not todo:
                    break
                bar.total = bar.n + 2 * len(todo) if number < max_pairs else bar.n


def report(
    comparer: Comparer, works: Sequence[Work], out: Path | None, sides: Sequence[Side]
) -> bool:
    """Prints the table and appends one row per figure. Returns True if no figure is slower or
    undecided."""
    head = ["figure", "old", "new", "ratio", "from - to", "95 % interval", "pairs", ""]
    lines = []
    all_good = True
    for work in works:
        for name, comparison in comparer.comparisons(work).items():
            old, new = comparer.medians(work, name)
            low, high = comparison.interval
            ratios = comparison.ratios
            all_good &= comparison.verdict in GOOD
            cells = [name, f"{old:,.4g}", f"{new:,.4g}", f"{comparison.median:.4f}"]
            cells += [f"{min(ratios):.4f} - {max(ratios):.4f}", f"{low:.4f} - {high:.4f}"]
            lines.append([*cells, str(len(ratios)), comparison.verdict])
            row = {
                "benchmark": "ab",
                "figure": name,
                "old": old,
                "new": new,
                "ratios": [round(ratio, 5) for ratio in ratios],
                "median": round(comparison.median, 5),
                "interval": [round(low, 5), round(high, 5)],
                "verdict": comparison.verdict,
                "device": gpu_name(),
            }
            labels = {"old_commit": sides[0].label, "new_commit": sides[1].label}
            append(out, row | labels | circumstances(sides[1].label))
    print(f"\n{sides[0].label} (old) and {sides[1].label} (new), {gpu_name()}\n")
    print(table(head, lines))
    return all_good


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", metavar="OLD", help="commit or pack")
    parser.add_argument("new", metavar="NEW", help="commit or pack")
    parser.add_argument("--rows", nargs="+", default=list(DEFAULT_ROWS), metavar="ROW")
    parser.add_argument("--pairs", type=integer(1), default=5, help="pairs per row (default 5)")
    parser.add_argument(
        "--max-pairs", type=integer(1), default=9, help="pairs of an undecided row (default 9)"
    )
    parser.add_argument(
        "--repeats",
        type=integer(1),
        default=1,
        help="repeats of offline rows within a run (default 1)",
    )
    parser.add_argument(
        "--timeout", type=POSITIVE, default=900.0, help="most seconds of a run (default 900)"
    )
    parser.add_argument(
        "--pack", type=Path, metavar="FOLDER", help="write both packs there and measure nothing"
    )
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    return parser.parse_args()


def _exit(*_: object) -> None:
    """Exits on a signal. The figures up to now are still reported."""
    sys.exit(128 + signal.SIGTERM)


def main() -> int:
    options = parse_arguments()
    try:
        if options.pack is not None:
            options.pack.mkdir(parents=True, exist_ok=True)
            for commit in (options.old, options.new):
                print(pack(commit, options.pack))
            return 0
        check_writable(options.out)
        targets = {row.id: row for row in read_rows(TARGETS)}
        works = plan(options.rows, targets, options.repeats)
        with tempfile.TemporaryDirectory(prefix="pdserve-ab-") as scratch:
            sides = [
                unpack(getattr(options, name), Path(scratch) / name) for name in ("old", "new")
            ]
            for side in sides:
                side.check()
            comparer = Comparer(sides[0], sides[1], targets, options)
            try:
                compare(comparer, works, options.pairs, max(options.pairs, options.max_pairs))
            finally:
                all_good = report(comparer, works, options.out, sides)
    except (ValueError, OSError) as error:
        print(f"ab: {error}", file=sys.stderr)
        return 2
    return 0 if all_good else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit)
    sys.exit(main())
