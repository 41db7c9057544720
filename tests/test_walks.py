"""Each walk of CONTRIBUTING.md, applied to a copy of the package, does what it says. It changes at
most two files; a kernel, which has an interface and a twin, changes four."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
MAX_FILES = {"a kernel (largest absolute value per row)": 4}

SECTION = re.compile(r"^## Walk: (.+?)$(.+?)(?=^## |\Z)", re.M | re.S)
WALKS: dict[str, str] = dict(SECTION.findall(PAGE))
BLOCK = re.compile(r"```(python|diff)\n(.+?)```", re.S)


def apply(walk: str, package: Path) -> tuple[set[Path], str]:
    """The files that the walk changes, and what stands under "It works"."""
    text, _, check = walk.partition("\nIt works:\n")
    changed: set[Path] = set()
    file: Path | None = None
    at = 0
    for block in BLOCK.finditer(text):
        named = re.findall(r"`(pdserve/[\w/]+\.py)`", text[at : block.start()])
        file = package.parent / named[-1] if named else file
        at = block.end()
        assert file is not None, "a block before any file was named"
        changed.add(file)
        kind, content = block.groups()
        if kind == "python":
            assert not file.exists(), f"{file} is there already"
            file.write_text(content)
            continue
        lines = content.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line.startswith("-"))
        new = "".join(f"{line[1:]}\n" for line in lines if line.startswith("+"))
        before = file.read_text()
        assert before.count(old) == 1, f"{file} does not hold this once: {old}"
        file.write_text(before.replace(old, new))
    [code] = BLOCK.findall(check)
    return changed, code[1]


def test_there_are_walks() -> None:
    assert len(WALKS) == 6


@pytest.mark.sampled(2)
@pytest.mark.processes
@pytest.mark.lengthy
@pytest.mark.parametrize("title", WALKS)
def test_a_walk_works(title: str, tmp_path: Path) -> None:
    package = tmp_path / "pdserve"
    shutil.copytree(ROOT / "pdserve", package, ignore=shutil.ignore_patterns("__pycache__"))
    changed, code = apply(WALKS[title], package)
    assert 1 <= len(changed) <= MAX_FILES.get(title, 2)
    ruff = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml")]
    subprocess.run([*ruff, *map(str, changed)], check=True, timeout=60)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", code, str(ROOT)],
        check=True,
        timeout=300,
        cwd=tmp_path,
        env=environment,
    )
