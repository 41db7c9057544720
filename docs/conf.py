"""The documentation as a site: `make docs` builds it in build/site with Sphinx.

Pages are Markdown, written so that a code host shows them too. Links that leave docs/ become plain
text here, since the site holds pages alone.
"""

import re
import shutil
from pathlib import Path, PurePosixPath

from sphinx.application import Sphinx

project = "pdserve"
copyright = "the pdserve authors"
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
root_doc = "README"
html_theme = "furo"
html_title = "pdserve"
html_show_sphinx = False
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def leaves_docs(page: str, link: str) -> bool:
    """Whether a relative link of this page, a path below docs/, leads out of docs/."""
    depth = 0
    for part in (PurePosixPath(page).parent / link.partition("#")[0]).parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return True
    return False


def contents(index: str) -> str:
    """A hidden table of contents for each section of the index, with the pages that it links."""
    parts = []
    for title, section in re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", index, re.M | re.S):
        pages = [link for _, link in LINK.findall(section) if not leaves_docs("README", link)]
        parts.append("\n".join([f"```{{toctree}}\n:hidden:\n:caption: {title}\n", *pages, "```"]))
    return "\n\n".join(parts)


def prepare(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace links out of docs/ by their text, and give the index its table of contents."""

    def shown(found: re.Match[str]) -> str:
        text, link = found.groups()
        is_outside = not re.match(r"[a-z]+:|#|/", link) and leaves_docs(page, link)
        return text if is_outside else found[0]

    more = f"\n\n{contents(source[0])}\n" if page == root_doc else ""
    source[0] = LINK.sub(shown, source[0]) + more


def add_front_page(app: Sphinx, error: Exception | None) -> None:
    """Show the index at the root of the site, too."""
    if error is None:
        shutil.copyfile(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", prepare)
    app.connect("build-finished", add_front_page)
