"""The tables of docs/use/metrics.md, read."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "use" / "metrics.md"
ROW = re.compile(
    r"^\| `(?P<name>pdserve_\w+)` \| (?P<kind>\w+) \|(?P<labels>[^|]*)\|(?P<meaning>[^|]*)\|"
)


@dataclass(frozen=True)
class Row:
    """A row of the table. `labels` are separated by commas, without worker and role, which all
    metrics of workers have."""

    kind: str
    labels: str
    meaning: str


def written() -> dict[str, Row]:
    rows = [match for line in PAGE.read_text().splitlines() if (match := ROW.match(line))]
    assert len({row["name"] for row in rows}) == len(rows), "a metric has two rows"
    return {
        row["name"]: Row(row["kind"], row["labels"].strip(), row["meaning"].strip()) for row in rows
    }
