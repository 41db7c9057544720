"""The documentation's site builds without a warning, and every page is in it."""

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"

pytestmark = pytest.mark.processes


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    made = subprocess.run(
        [*command, "-d", tmp_path / "trees", DOCS, tmp_path / "site"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stderr
    for page in DOCS.rglob("*.md"):
        assert (tmp_path / "site" / page.relative_to(DOCS)).with_suffix(".html").exists()
    assert "mermaid" in (tmp_path / "site" / "design" / "architecture.html").read_text()
    front = (tmp_path / "site" / "index.html").read_text()
    assert 'href="use/configuration.html"' in front
