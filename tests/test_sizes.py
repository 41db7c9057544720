"""Files, classes and folders stay small enough to be read: docs/design/architecture.md says which
are larger, and why."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "design" / "architecture.md").read_text()
HEADING = "## Size limits and their exceptions"

MAX_LINES = 400
MAX_METHODS = 25
MAX_MODULES = 14


def files() -> list[Path]:
    found = [
        path for room in ("pdserve", "benchmarks", "demo") for path in (ROOT / room).rglob("*.py")
    ]
    assert len(found) > 200
    return sorted(found)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT)).removeprefix("pdserve/")


def explained(name: str) -> bool:
    """Whether the page has a sentence about it."""
    return f"`{name}`" in PAGE[PAGE.index(HEADING) :].partition("\n## ")[0]


def test_no_file_is_long() -> None:
    lines = {name_of(path): path.read_text().count("\n") for path in files()}
    assert not {name: n for name, n in lines.items() if n > MAX_LINES and not explained(name)}


def test_no_class_has_many_methods() -> None:
    many: dict[str, int] = {}
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
                count = sum(isinstance(part, kinds) for part in node.body)
                if count > MAX_METHODS and not explained(node.name):
                    many[f"{name_of(path)}: {node.name}"] = count
    assert not many


def test_no_folder_has_many_modules() -> None:
    folders = {path.parent for path in files()}
    counts = {
        name_of(f): len([p for p in f.glob("*.py") if p.name != "__init__.py"]) for f in folders
    }
    assert not {name: n for name, n in counts.items() if n > MAX_MODULES and not explained(name)}
