"""Full garbage collections are left out while many objects are there."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.background import garbage
from pdserve.background.garbage import LATEST_S, GarbageCollector


@pytest.fixture
def full() -> Iterator[list[int]]:
    """The full collections that were made: how many objects each found to be garbage."""
    found: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "stop" and info["generation"] == 2:
            found.append(info["collected"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.unfreeze()


class Circle:
    def __init__(self) -> None:
        self.me = self


async def test_a_load_of_objects_begins_no_full_collection(full: list[int]) -> None:
    kept = [[number] for number in range(400_000)]
    assert full, "or this test shows nothing"
    collector = GarbageCollector()
    thresholds = gc.get_threshold()
    collector.start()
    full.clear()
    kept += [[number] for number in range(400_000)]
    assert not full
    collector.stop()
    assert gc.get_threshold() == thresholds


async def test_garbage_goes_while_few_objects_are_there_or_at_the_latest(
    full: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.0
    collector = GarbageCollector(lambda: seconds)
    collector.start()
    full.clear()

    def aged() -> None:
        circles = [Circle() for _ in range(1000)]
        gc.collect(1)  # what is left is old
        del circles

    aged()
    collector.look()
    assert len(full) == 1 and full[0] >= 1000
    monkeypatch.setattr(garbage, "FEW_OBJECTS", 500)
    aged()
    collector.look()
    seconds += LATEST_S - 1
    collector.look()
    assert len(full) == 1
    seconds += 1
    collector.look()
    assert len(full) == 2 and full[1] >= 1000
    collector.stop()
