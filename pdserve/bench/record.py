"""Summarises and records results of benchmarks: figures, the circumstances they were measured
under, and JSON lines.

Knows no engine and no server. Torch-free. Used by bench.cli, bench.replay and the scripts in
benchmarks/.
"""

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pdserve

Json = dict[str, Any]


def percentiles(seconds: Sequence[float], points: Sequence[int] = (50, 99)) -> Json:
    """Returns percentiles and the mean, in ms, of times in seconds.

    The keys are "p50", "p99" or those of `points`, and "mean". Percentiles are linear between
    neighbours, like numpy's. All are None if there are no values.
    """
    names = [*(f"p{point}" for point in points), "mean"]
    if not seconds:
        return dict.fromkeys(names)
    values = np.asarray(seconds) * 1e3
    figures = [*np.percentile(values, points), values.mean()]
    return {name: round(float(figure), 3) for name, figure in zip(names, figures, strict=True)}


def repeated(values: Sequence[float]) -> Json:
    """Returns median and spread (largest - smallest) of a few repeats."""
    return {
        "median": round(float(np.median(values)), 6),
        "spread": round(max(values) - min(values), 6),
    }


def circumstances(commit: str | None = None) -> Json:
    """Returns what belongs beside every figure: commit, torch version, time and command line.

    Of absolute paths in the command line only the last part is kept. `commit` is used if given;
    otherwise git is asked.
    """
    words = (Path(word).name if word.startswith("/") else word for word in sys.argv)
    return {
        "commit": commit or git_commit(),
        "torch": importlib.metadata.version("torch"),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(words),
    }


def git_commit() -> str:
    """Returns the short commit of the checkout that pdserve runs from, or "unknown".

    A `+` follows if files were changed.
    """
    folder = Path(pdserve.__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--exclude=*", "--dirty=+"],
            cwd=folder,
            capture_output=True,
            text=True,
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def gpu_name() -> str:
    """Returns the first GPU's name, or "cpu".

    It asks the driver's tool, so that this process holds no memory on the device.
    """
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return (
        done.stdout.strip().splitlines()[0]
        if done.returncode == 0 and done.stdout.strip()
        else "cpu"
    )


def check_writable(path: Path | None) -> None:
    """Raises OSError if the file cannot be written, before anything is measured. Leaves no file
    where there was none."""
    if path is not None:
        is_new = not path.exists()
        with path.open("a"):
            pass
        if is_new:
            path.unlink()


def append(path: Path | None, row: Mapping[str, Any]) -> None:
    """Adds one JSON line; does nothing if path is None."""
    if path is not None:
        with path.open("a") as out:
            out.write(json.dumps(row) + "\n")
            out.flush()
            os.fsync(out.fileno())
