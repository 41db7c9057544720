"""JSON lines of files that other processes write meanwhile."""

import json
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Without a last line that has no end yet: its writer may be in the middle of it."""
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines() if line.strip()]
