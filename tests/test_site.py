"""The documentation's site builds without a warning, and every page is in its navigation once."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
INDEX = """# Index

## Where to begin

| I want to | page |
|---|---|
| try it | [a.md](use/a.md) |

## Use

See [a folder](use).

### Begin

| page | what it has |
|---|---|
| [a.md](use/a.md) | a |
| [a.md](use/a.md#part) | a part of it |

### Run it

| page | what it has |
|---|---|
| [a.md](use/a.md) | again |
| [b.md](use/b.md) | b |

## Elsewhere

| page | what it has |
|---|---|
| [c.md](c.md) | c |
| [out.md](../out.md) | outside |

## Outside

| page | what it has |
|---|---|
| [out.md](../out.md) | outside |
"""


@pytest.mark.processes
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    made = subprocess.run(
        [*command, "-d", tmp_path / "trees", DOCS, tmp_path / "site"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stderr
    pages = [page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")]
    assert all((tmp_path / "site" / page).exists() for page in pages)
    assert "mermaid" in (tmp_path / "site" / "design" / "architecture.html").read_text()
    front = (tmp_path / "site" / "index.html").read_text()
    linked = re.findall(r'<li class="toctree-l1"><a class="reference internal" href="(.+?)"', front)
    assert sorted(linked) == sorted(str(page) for page in pages if page.name != "README.html")
    captions = re.findall(r'<span class="caption-text">(.+?)</span>', front)
    assert {"Begin", "Watch it", "The engine"} <= set(captions)
    assert "Use" not in captions  # all its pages are below headings of their own


def test_each_heading_of_the_index_becomes_a_caption() -> None:
    tables = runpy.run_path(str(DOCS / "conf.py"))["contents"](INDEX)
    found = re.findall(r":caption: (.+)\n\n((?:.+\.md\n)+)```", tables)
    assert [(caption, pages.split()) for caption, pages in found] == [
        ("Begin", ["use/a.md"]),
        ("Run it", ["use/b.md"]),
        ("Elsewhere", ["c.md"]),
    ]
    assert tables.count("{toctree}") == 3


def test_links_that_the_site_cannot_follow_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = runpy.run_path(str(DOCS / "conf.py"))
    shown_on_site, link = conf["shown_on_site"], conf["LINK"]
    (tmp_path / "use").mkdir()
    (tmp_path / "design").mkdir()
    (tmp_path / "design" / "README.md").write_text("# Design")
    monkeypatch.setitem(shown_on_site.__globals__, "DOCS", tmp_path)

    def shown(text: str) -> str:
        return str(link.sub(shown_on_site("use/page.md"), text))

    assert shown("see [the tests](../../tests/README.md#x)") == "see the tests"
    assert shown("[use](../use/)") == "[use](../README.md)"
    assert shown("[design](../design)") == "[design](../design/README.md)"
    for kept in ("[a](b.md#c)", "[a](#c)", "[a](https://b.org)", "![a](../../b.png)"):
        assert shown(kept) == kept
    for code in ("`a[b](../../c)`", "```python\na[b](../../c)\n```\n"):
        assert shown(code) == code
