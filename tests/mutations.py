"""Do the tests notice real mistakes? Applies each mutation of tests/mutations.toml to a copy of the
tree, runs the tests that guard the place, and says which of them failed.

    python tests/mutations.py                    # all of them, two at a time (make mutate)
    python tests/mutations.py eviction lease     # those whose names hold one of these words

The exit status is 1 if a mutation survives without a written reason, or if one with a reason is
caught after all. It is also 1 if a mutation's text is not in its file exactly once, because then
the code has moved and the list must follow. First the guards run on the unchanged tree, where they
must pass. This script knows no code of pdserve. It is run by hand, not by CI.
"""

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
COPIED = ("pdserve", "tests", "benchmarks", "demo", "docs", "cluster.yaml", "pyproject.toml")
AT_ONCE = 2
LIMIT_S = 600.0

T = TypeVar("T")
Verdict = Literal[
    "caught",
    "survived",
    "survived, with a reason",
    "caught, but said to be equivalent",
    "moved",
    "broken",
]
GOOD: tuple[Verdict, ...] = ("caught", "survived, with a reason")


@dataclass(frozen=True)
class Mutation:
    """A change of the code that tests must notice.

    - old: Text that `file` has exactly once.
    - guards: Arguments of pytest.
    - seeds: Seeds of hypothesis, each of which must catch the mutation.
    - survives: The reason why no test can catch it. Empty: a test must catch it.
    """

    name: str
    file: str
    old: str
    new: str
    guards: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    survives: str = ""

    def mutated(self, root: Path) -> str | None:
        """The file's new text; None when the old one is not there exactly once."""
        path = root / self.file
        text = path.read_text() if path.exists() else ""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


@dataclass(frozen=True)
class Outcome:
    """The result of one mutation. `by` is the test that failed, or the reason for no verdict."""

    mutation: Mutation
    verdict: Verdict
    by: str
    seconds: float


def read_list(path: Path) -> list[Mutation]:
    """ValueError for two of one name and for mutations that change nothing."""
    found = []
    for entry in tomllib.loads(path.read_text())["mutation"]:
        guards = tuple(entry.pop("guards"))
        seeds = tuple(entry.pop("seeds", (0,)))
        found.append(Mutation(**entry, guards=guards, seeds=seeds))
    names = [mutation.name for mutation in found]
    wrong = {name for name in names if names.count(name) > 1}
    wrong |= {mutation.name for mutation in found if mutation.old == mutation.new}
    if wrong:
        raise ValueError(
            f"mutations need names of their own, and must change something: {sorted(wrong)}"
        )
    return found


def copied(root: Path, to: Path) -> Path:
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, to / name)
    return to


def run_tests(
    tree: Path, guards: Sequence[str], seed: int, limit_s: float = LIMIT_S
) -> tuple[int, str]:
    """Runs pytest. Returns its status (-1: it did not end) and output. The tree's package comes
    before an installed one. No bytecode is kept, because it could outlive a change."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-rfE", "--tb=line"]
    process = subprocess.Popen(
        [*command, f"--hypothesis-seed={seed}", *guards],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return -1, process.communicate()[0]
    return process.returncode, output


def try_one(mutation: Mutation, tree: Path, limit_s: float = LIMIT_S) -> Outcome:
    """Apply the mutation to this copy, run its guards, and take it back."""
    began = time.monotonic()
    path = tree / mutation.file
    text = mutation.mutated(tree)
    if text is None:
        return Outcome(
            mutation, "moved", f"{mutation.file} does not hold the old text exactly once", 0.0
        )
    before = path.read_text()
    path.write_text(text)
    caught_by: list[str] = []
    try:
        for seed in mutation.seeds:
            status, output = run_tests(tree, mutation.guards, seed, limit_s)
            if status not in (-1, 0, 1):
                return Outcome(mutation, "broken", output[-2000:], time.monotonic() - began)
            if status == 0:
                break
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
            caught_by.append(failed[1] if failed else f"no end within {limit_s:g} s")
    finally:
        path.write_text(before)
    is_caught = len(caught_by) == len(mutation.seeds)
    by = ", ".join(dict.fromkeys(caught_by)) if is_caught else mutation.survives
    return Outcome(mutation, _verdict(is_caught, mutation.survives), by, time.monotonic() - began)


def _verdict(is_caught: bool, reason: str) -> Verdict:
    if is_caught:
        return "caught, but said to be equivalent" if reason else "caught"
    return "survived, with a reason" if reason else "survived"


def try_all(mutations: Sequence[Mutation], root: Path = ROOT) -> list[Outcome]:
    """In the order of the list. RuntimeError when the guards fail without any mutation."""
    with (
        tempfile.TemporaryDirectory(prefix="mutations-") as folder,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(AT_ONCE):
            trees.put(copied(root, Path(folder) / str(number)))

        def lent(work: Callable[[Path], T]) -> Future[T]:
            def with_tree() -> T:
                tree = trees.get()
                try:
                    return work(tree)
                finally:
                    trees.put(tree)

            return threads.submit(with_tree)

        guards = dict.fromkeys(mutation.guards for mutation in mutations)
        for passing in _progress(
            [lent(partial(_require_passing, each)) for each in guards], "unchanged"
        ):
            passing.result()
        tries = [lent(partial(try_one, mutation)) for mutation in mutations]
        for tried in _progress(tries, "mutations"):
            outcome = tried.result()
            if outcome.verdict not in GOOD:
                tqdm.write(f"{outcome.verdict}: {outcome.mutation.name} {outcome.by}")
        return [tried.result() for tried in tries]


def _progress(runs: Sequence[Future[T]], what: str) -> Iterator[Future[T]]:
    return iter(tqdm(as_completed(runs), total=len(runs), desc=what, unit="run"))


def _require_passing(guards: Sequence[str], tree: Path) -> None:
    status, output = run_tests(tree, guards, 0)
    if status:
        raise RuntimeError(
            f"pytest {' '.join(guards)} fails without any mutation:\n{output[-4000:]}"
        )


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns the outcomes as a Markdown table."""
    lines = ["| mutation | file | verdict | by | s |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        by = re.sub(r"\[.*?\]", "", outcome.by).replace("tests/", "").replace("|", "\\|")
        file = outcome.mutation.file.removeprefix("pdserve/")
        seeds = f" ({len(outcome.mutation.seeds)} seeds)" if len(outcome.mutation.seeds) > 1 else ""
        lines.append(
            f"| {outcome.mutation.name} | {file} | {outcome.verdict}{seeds} | {by} | "
            f"{outcome.seconds:.0f} |"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="apply mutations, and say which tests notice them")
    parser.add_argument(
        "words", nargs="*", help="only mutations whose name holds one of these words"
    )
    parser.add_argument("--out", type=Path, help="write the table to this file, too")
    options = parser.parse_args(words)
    mutations = read_list(Path(__file__).with_suffix(".toml"))
    moved = [mutation.name for mutation in mutations if mutation.mutated(ROOT) is None]
    if moved:
        print(
            "their text has moved, tests/mutations.toml must follow:",
            *moved,
            sep="\n  ",
            file=sys.stderr,
        )
        return 1
    chosen = [
        m for m in mutations if not options.words or any(word in m.name for word in options.words)
    ]
    outcomes = try_all(chosen)
    num_caught = sum(outcome.verdict == "caught" for outcome in outcomes)
    text = f"{num_caught} of {len(outcomes)} mutations are caught.\n\n{table(outcomes)}\n"
    print(text)
    if options.out is not None:
        options.out.write_text(f"# What `make mutate` says\n\n{text}")
    return int(any(outcome.verdict not in GOOD for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
