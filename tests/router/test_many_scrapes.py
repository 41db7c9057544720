"""Hundreds who ask for a page that takes a millisecond are served one in a turn of the event
loop."""

import asyncio
from collections.abc import Callable

import pytest
from router.harness import Harness
from router.turns import Turns

from pdserve.router.http import pages

Make = Callable[..., Harness]


async def test_scrapes_at_once_are_served_one_in_a_turn(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await make(0, 1).start()
    turns = Turns()
    exposition = pages.exposition

    def noting(*given: object) -> str:
        turns.note()
        return exposition(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(pages, "exposition", noting)
    http = harness.http()
    answers = await asyncio.gather(*(http.get("/metrics") for _ in range(50)))
    turns.close()
    assert {answer.status_code for answer in answers} == {200}
    assert sum(turns.counts) == 50 and max(turns.counts) == 1


async def test_the_document_of_the_interface_is_made_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    document = pages.openapi_document

    def noting(*given: object) -> dict[str, object]:
        made.append(given)
        return document(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(pages, "openapi_document", noting)
    http = (await make(0, 1).start()).http()
    first, second = [(await http.get("/openapi.json")).content for _ in range(2)]
    assert first == second and len(made) == 1
