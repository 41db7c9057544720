"""Every benchmark starts from a fresh shell: no variable of the environment is needed but PATH and
HOME."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

# One process for all of them: torch, Ray and the rest are imported once.
SHOW_HELP_OF_ALL = """
import contextlib, importlib, io, sys
for name in sys.argv[1:]:
    module = importlib.import_module(f"benchmarks.{name}")
    if not hasattr(module, "main"):
        continue
    sys.argv[:] = [f"{name}.py", "--help"]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        module.main()
        print(f"{name}: --help did not end it", file=sys.stderr)
    if "usage: " not in shown.getvalue():
        print(f"{name}: no help", file=sys.stderr)
    else:
        print(name)
"""


def is_command(path: Path) -> bool:
    text = path.read_text()
    return '__name__ == "__main__"' in text or "\ndef main(" in text


@pytest.mark.processes
def test_every_benchmark_imports_and_shows_its_help() -> None:
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    assert len(files) > 30
    names = {
        path: ".".join(path.relative_to(ROOT / "benchmarks").with_suffix("").parts)
        for path in files
    }
    fresh = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = [sys.executable, "-c", SHOW_HELP_OF_ALL, *names.values()]
    done = subprocess.run(command, cwd=ROOT, env=fresh, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.split() == [name for path, name in names.items() if is_command(path)]
