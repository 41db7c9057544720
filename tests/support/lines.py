"""Lines of files that other processes write meanwhile."""

from pathlib import Path


def whole_lines(path: Path) -> list[str]:
    """Without a last one that has no end yet: its writer may be in the middle of it."""
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()
