"""The two sides of a comparison: a commit's package and benchmarks, packed, unpacked and run by
themselves.

A pack is `pdserve/` and `benchmarks/` of one commit without the saved results, as .tar.xz (about
0.3 MB), so that it can be taken to a machine without git. It does not have the demo model: both
sides use the one of the tree that compares them. This module knows no figures. ab.py uses it.
"""

import json
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.places import REPOSITORY
from benchmarks.support.served_cluster import stop
from pdserve.bench.record import Json

PACKED = ("pdserve", "benchmarks", ":(exclude)benchmarks/results")
MAX_PACK_BYTES = 1 << 20
SUFFIX = ".tar.xz"
LOG_TAIL = 3000
REPORT_TARGETS = ("cluster_cpu",)  # their status 1 means that all was measured, but a target missed


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    label: str  # the commit, or the pack's name
    folder: Path  # place of its package and benchmarks

    def environment(self) -> dict[str, str]:
        """Returns this process's environment, with the side's package instead of this one's."""
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        others = [path for path in given if path and not (Path(path) / "pdserve").is_dir()]
        paths = os.pathsep.join([str(self.folder), *others])
        ray = {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled")}
        return os.environ | ray | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}

    def check(self) -> None:
        """Raises ValueError unless a Python process of this side imports this side's package."""
        code = "import pdserve; print(pdserve.__file__)"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
        )
        if not done.stdout.strip().startswith(f"{self.folder}{os.sep}"):
            raise ValueError(
                f"{self.label}: pdserve comes from elsewhere: {done.stdout}{done.stderr}"
            )

    def _place_of(self, module: str) -> str:
        """Returns the name of a benchmark's module on this side. Old commits have all benchmarks in
        one folder."""
        benchmarks = self.folder / "benchmarks"
        for path in sorted(benchmarks.glob(f"*/{module}.py")):
            return f"benchmarks.{path.parent.name}.{module}"
        return f"benchmarks.{module}"

    def run(self, module: str, arguments: tuple[str, ...], timeout_s: float) -> list[Json]:
        """Returns the rows that `python -m benchmarks.MODULE ARGUMENTS --out FILE` writes.

        Raises ValueError, with the end of its output, if it writes no row, does not end in time or
        has a status other than 0.
        """
        with tempfile.TemporaryDirectory(prefix="pdserve-ab-run-") as scratch:
            out = Path(scratch) / "rows.jsonl"
            log = Path(scratch) / "log"
            command = [sys.executable, "-m", self._place_of(module), *arguments, "--out", str(out)]
            with log.open("w") as sink:
                process = subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                try:
                    process.wait(timeout_s)
                    problem = f"it ended with status {process.returncode}"
                except subprocess.TimeoutExpired:
                    problem = f"it did not end within {timeout_s:g} s"
                finally:
                    stop(process)
            rows = read_rows(out)
            missed_target = module in REPORT_TARGETS and process.returncode == 1
            if not rows or not (process.returncode == 0 or missed_target):
                raise ValueError(
                    f"{self.label}: `benchmarks.{module} {' '.join(arguments)}` gave no figures: "
                    f"{problem}\n"
                    f"{log.read_text(errors='replace')[-LOG_TAIL:]}"
                )
            return rows


def read_rows(path: Path) -> list[Json]:
    """Reads JSON lines. A missing file has none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def pack(commit: str, folder: Path) -> Path:
    """Writes the pack of a commit into `folder`. Raises ValueError if there is no git or no such
    commit, or if the pack is too large."""
    try:
        name = _git("rev-parse", "--short", "--verify", f"{commit}^{{commit}}").decode().strip()
        data = lzma.compress(_git("archive", "--format=tar", name, "--", *PACKED))
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"").decode(errors="replace").strip()
        raise ValueError(
            f"{commit!r} is neither a pack nor a commit that git can read here ({said or error}): "
            "give "
            "a commit of this repository, or a file that `--pack FOLDER` wrote where git is"
        ) from error
    if len(data) > MAX_PACK_BYTES:
        raise ValueError(f"the pack of {name} has {len(data)} bytes, more than {MAX_PACK_BYTES}")
    path = folder / f"{name}{SUFFIX}"
    path.write_bytes(data)
    return path


def unpack(side: str, folder: Path) -> Side:
    """Unpacks a commit, or the pack at a path, into a new folder below `folder`. Raises what `pack`
    raises."""
    folder.mkdir(parents=True)
    source = Path(side) if side.endswith(SUFFIX) else pack(side, folder)
    tree = folder / "tree"
    try:
        with tarfile.open(source) as archive:
            archive.extractall(tree, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise ValueError(f"{side} is no pack of a commit: {error}") from error
    (tree / "demo").symlink_to(REPOSITORY / "demo")
    return Side(source.name.removesuffix(SUFFIX), tree.resolve())


def _git(*arguments: str) -> bytes:
    return subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, check=True
    ).stdout
