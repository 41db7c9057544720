"""Writes a page about a run of the clients' tests: versions, commit, each test and its outcome.

A pytest plugin, registered by conftest.py where a file is asked for.
"""

import json
import re
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


class Record:
    """Writes the page when the session is over. path: of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[tuple[str, str, float, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        outcome: str = report.outcome if report.when == "call" or report.skipped else "error"
        if hasattr(report, "wasxfail"):
            outcome = "xfailed"
        self._rows.append((report.nodeid, outcome, report.duration, _reason(report)))

    def pytest_sessionfinish(self) -> None:
        self._path.write_text("\n".join(self._page()) + "\n")

    def _page(self) -> list[str]:
        outcomes = [row[1] for row in self._rows]
        counts = ", ".join(f"{outcomes.count(o)} {o}" for o in sorted(set(outcomes), reverse=True))
        return [
            "# What `make test-clients` says",
            "",
            f"{counts}. Unmodified clients against `pdserve up cluster.yaml`, commit {_commit()}, "
            f"{time.strftime('%Y-%m-%d', time.gmtime())}.",
            "",
            "| client | version |",
            "|---|---|",
            *(f"| {name} | {number} |" for name, number in _versions()),
            "",
            "| test | outcome | s | |",
            "|---|---|---|---|",
            *(
                f"| {node.removeprefix('tests/clients/')} | {outcome} | {seconds:.1f} | {why} |"
                for node, outcome, seconds, why in self._rows
            ),
        ]


def _reason(report: pytest.TestReport) -> str:
    """The error, or why a test was skipped or must fail; fits a table's cell."""
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail)
    if report.passed:
        return ""
    found = report.longrepr
    if isinstance(found, tuple):
        text = str(found[2])
    else:
        crash = getattr(found, "reprcrash", None)
        text = str(crash.message if crash is not None else found)
    return " ".join(text.split()).replace("|", "\\|")[:300]


def _versions() -> list[tuple[str, str]]:
    """Returns the installed versions of what requirements.txt and package.json name, and the
    versions that were recorded."""
    lines = (HERE / "requirements.txt").read_text().splitlines()
    names = [m[0] for line in lines if (m := re.match(r"[\w-]+", line)) is not None]
    found = [(name, version(name)) for name in names]
    for name in json.loads((HERE / "package.json").read_text())["dependencies"]:
        package = HERE / "node_modules" / name / "package.json"
        is_there = package.exists()
        found.append((name, json.loads(package.read_text())["version"] if is_there else "none"))
    recorded = json.loads((HERE / "open_webui" / "calls.json").read_text())
    found.append((recorded["client"], f"{recorded['version']}, its recorded calls"))
    return found


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
