"""Sections of an answer: in order, one at a time, and the same however the answer was cut."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.answers.pieces import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Piece,
    Reasoning,
)
from pdserve.text.answers.sections import Closed, Grown, Opened, SectionEvent, Sections

ANSWER: list[Piece] = [
    Reasoning("let me look"),
    Content("one moment"),
    CallBegin(0, "look", "call_a"),
    CallArguments(0, '{"x": 1}'),
    CallEnd(0),
    CallBegin(1, "look", "call_b"),
    CallArguments(1, '{"x"'),
]


def _run(batches: list[list[Piece]]) -> tuple[list[SectionEvent], Sections]:
    sections = Sections()
    events = [event for batch in batches for event in sections.push(batch)]
    return events + sections.finish(), sections


def test_each_run_of_a_kind_is_a_section() -> None:
    events, sections = _run([ANSWER])
    found = [(s.kind, s.index, s.call_id, s.name, s.text, s.is_complete) for s in sections.all]
    assert found == [
        ("reasoning", 0, "", "", "let me look", True),
        ("content", 1, "", "", "one moment", True),
        ("call", 2, "call_a", "look", '{"x": 1}', True),
        ("call", 3, "call_b", "look", '{"x"', False),
    ]
    kinds = [type(event) for event in events]
    assert kinds == [Opened, Grown, Closed] * 4


def test_empty_texts_open_nothing() -> None:
    events, sections = _run([[Content(""), Reasoning("")]])
    assert not events and not sections.all


def test_a_call_without_arguments_is_closed_once() -> None:
    events, _ = _run([[CallBegin(0, "now", "call_a")], [CallEnd(0)], [Content("done")]])
    assert [type(event) for event in events] == [Opened, Closed, Opened, Grown, Closed]


@given(st.data())
def test_cuts_do_not_matter(data: st.DataObject) -> None:
    """The texts that were added are the whole text, and one section is open at a time."""
    pieces: list[Piece] = []
    for piece in ANSWER:
        text = getattr(piece, "text", None)
        if text is None:
            pieces.append(piece)
            continue
        cut = data.draw(st.integers(0, len(text)))
        for part in (text[:cut], text[cut:]):
            kind = type(piece)
            pieces.append(
                CallArguments(piece.index, part) if isinstance(piece, CallArguments) else kind(part)  # type: ignore[call-arg]
            )
    split = data.draw(st.integers(0, len(pieces)))
    events, sections = _run([pieces[:split], pieces[split:]])
    _, whole = _run([ANSWER])
    assert [s.text for s in sections.all] == [s.text for s in whole.all]
    open_now = None
    shown: dict[int, str] = {}
    for event in events:
        match event:
            case Opened(section):
                assert open_now is None
                open_now = section
            case Grown(section, text):
                assert section is open_now
                shown[section.index] = shown.get(section.index, "") + text
            case Closed(section):
                assert section is open_now
                open_now = None
    assert open_now is None
    assert list(shown.values()) == [s.text for s in whole.all]
