"""Relative links in the repository's Markdown files lead to files and headings that exist."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)\s]+)\)")


def pages() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = [ROOT / name for name in listed.stdout.splitlines()] or [
        path
        for folder in ("docs", "benchmarks", "demo", "tests")
        for path in (ROOT / folder).rglob("*.md")
    ]
    return [path for path in found if path.is_file()]


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The headings of a page as GitHub names them in links."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.M):
        plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.append(f"{name}-{found.count(name)}" if name in found else name)
    return frozenset(found)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        is_there = target.exists() and (
            not anchor or target.suffix != ".md" or anchor in anchors(target)
        )
        if not is_there:
            broken.append(link)
    assert not broken


def test_every_page_of_docs_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {
        (index.parent / link.partition("#")[0]).resolve()
        for link in LINK.findall(index.read_text())
    }
    every = {path.resolve() for path in (ROOT / "docs").rglob("*.md")} - {index.resolve()}
    assert not every - linked
