"""A series holds the windows that make one curve: the same load at several rates, from one file.

Knows no servers. Called by table.py, page.py and commands.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pdserve.bench.replay.figures import Limit, Promises, Run, Settings, limit


@dataclass(frozen=True)
class Series:
    """The runs of one curve, at least one, by ascending rate. Legends and headings show `name`."""

    name: str
    runs: list[Run]

    def limit(self, wanted: float) -> Limit:
        """Returns the highest rate at which the share `wanted` keeps both promises."""
        return limit([run.result for run in self.runs], wanted)

    def judged(self, promises: Promises) -> "Series":
        """Returns the same answers, measured by other promises."""
        return Series(self.name, [run.judged(promises) for run in self.runs])


def series_of(runs: Sequence[Run], name: str) -> list[Series]:
    """Returns the series of one file; of equal windows the newest counts.

    A series without a label gets `name`. If a file holds several series, their names say in which
    settings they differ.
    """
    newest = {run.result.settings: run for run in runs}
    groups: dict[Settings, list[Run]] = {}
    for settings, run in newest.items():
        key = msgspec.structs.replace(settings, rate=None, speed=None)
        groups.setdefault(key, []).append(run)
    found = []
    for settings, members in groups.items():
        members.sort(key=lambda run: run.result.rate)
        parts = [settings.label or name, *_differences(settings, list(groups))]
        found.append(Series(", ".join(parts), members))
    return found


def _differences(settings: Settings, others: Sequence[Settings]) -> list[str]:
    alike = [other for other in others if other.label == settings.label]
    return [
        f"{field} {getattr(settings, field)}"
        for field in settings.__struct_fields__
        if field not in ("label", "rate", "speed", "digest")
        and any(getattr(other, field) != getattr(settings, field) for other in alike)
    ]
