"""The documentation as a site: `make docs` builds it in build/site with Sphinx.

Pages are Markdown, written so that a code host shows them too. The site holds pages alone: links
out of docs/ become plain text, and links to folders lead to the folder's README.md or the index.
The navigation comes from the tables of the index, docs/README.md.
"""

import re
import shutil
from collections.abc import Callable
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

DOCS = Path(__file__).parent
FENCE = r"^(?P<fence>```+|~~~+).*?^(?P=fence)"
CODE = re.compile(FENCE, re.M | re.S)
# Code comes first, so that nothing inside it is taken for a link.
LINK = re.compile(
    FENCE + r"|`[^`\n]+`|(?<!!)\[(?P<text>[^\]]*)\]\((?P<link>[^)\s]+)\)", re.M | re.S
)
HEADING = re.compile(r"^#{2,3} (.+)$", re.M)
ROW = re.compile(r"^\| *\[[^\]]+\]\(([^)\s#]+\.md)(?:#[^)]*)?\)", re.M)


def leaves_docs(page: str, link: str) -> bool:
    """Whether a relative link of this page, a path below docs/, leads out of docs/."""
    depth = 0
    for part in (PurePosixPath(page).parent / link.partition("#")[0]).parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return True
    return False


def contents(index: str) -> str:
    """Returns hidden tables of contents, one for each `##` or `###` heading of the index.

    A page belongs to the first heading with a row that begins with a link to it. A heading without
    such rows has no table of contents."""
    _, *parts = HEADING.split(CODE.sub("", index))
    seen: set[str] = set()
    tables = []
    for caption, section in zip(parts[::2], parts[1::2], strict=True):
        pages = [
            page
            for page in dict.fromkeys(ROW.findall(section))
            if page not in seen and not leaves_docs(root_doc, page)
        ]
        seen.update(pages)
        if pages:
            lines = ["", "", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]
            tables.append("\n".join(lines))
    return "".join(tables)


def shown_on_site(page: str) -> Callable[[re.Match[str]], str]:
    """Returns a function that turns a link of this page into what the site shows."""

    def shown(found: re.Match[str]) -> str:
        text, link = found["text"], found["link"]
        if link is None or re.match(r"[a-z]+:|#|/", link):
            return found[0]
        if leaves_docs(page, link):
            return text
        folder = (DOCS / page).parent / link.partition("#")[0]
        if not folder.is_dir():
            return found[0]
        if (folder / "README.md").is_file():
            return f"[{text}]({link.rstrip('/')}/README.md)"
        up = "../" * (len(PurePosixPath(page).parts) - 1)
        return f"[{text}]({up}{root_doc}.md)"

    return shown


def prepare(app: Sphinx, page: str, source: list[str]) -> None:
    """Replaces links that the site cannot follow, and gives the index its tables of contents."""
    more = f"{contents(source[0])}\n" if page == root_doc else ""
    source[0] = LINK.sub(shown_on_site(page), source[0]) + more


def add_front_page(app: Sphinx, error: Exception | None) -> None:
    """Shows the index at the root of the site, too."""
    if error is None:
        shutil.copyfile(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", prepare)
    app.connect("build-finished", add_front_page)
