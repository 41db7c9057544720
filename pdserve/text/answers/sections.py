"""Sections of an answer: its pieces, grouped as dialects with nested answers show them.

    Opened --Grown--> Grown ... --> Closed      one section after the other, never two at once

A section is a run of reasoning, a run of content, or one call. OpenAI's Responses call it an item,
Anthropic's Messages a content block. A stream shows the events and a whole answer shows the
sections, so both say the same however the answer was cut. This module knows no dialect.
`router.http.responses` and `router.http.messages` use it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from pdserve.text.answers.pieces import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Piece,
    Reasoning,
)

SectionKind = Literal["reasoning", "content", "call"]


@dataclass(slots=True)
class Section:
    """One section. `is_complete` is true for a call if its arguments are closed, and for other
    kinds once a later section or the answer's end has closed them."""

    kind: SectionKind
    index: int  # place in the answer, from 0
    call_id: str = ""  # empty unless the section is a call
    name: str = ""  # function's name; empty unless the section is a call
    is_complete: bool = False
    _texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The section's text up to now, or a call's arguments up to now."""
        return "".join(self._texts)

    def grow(self, text: str) -> None:
        """Adds text at the end."""
        self._texts.append(text)


@dataclass(frozen=True, slots=True)
class Opened:
    section: Section


@dataclass(frozen=True, slots=True)
class Grown:
    """An event: `text` was added to the section."""

    section: Section
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    section: Section


SectionEvent = Opened | Grown | Closed


class Sections:
    """The sections of one answer while it is generated. Call `push` for each batch of pieces, then
    `finish` once."""

    def __init__(self) -> None:
        self.all: list[Section] = []
        self._open: Section | None = None

    def push(self, pieces: Iterable[Piece]) -> list[SectionEvent]:
        """Returns the events that these pieces cause, in order. An empty text causes none."""
        events: list[SectionEvent] = []
        for piece in pieces:
            match piece:
                case Reasoning() | Content():
                    if piece.text:
                        kind: SectionKind = (
                            "reasoning" if isinstance(piece, Reasoning) else "content"
                        )
                        self._grow(kind, piece.text, events)
                case CallBegin():
                    self._open_next(
                        Section("call", len(self.all), call_id=piece.id, name=piece.name), events
                    )
                case CallArguments():
                    if piece.text:
                        self._grow("call", piece.text, events)
                case CallEnd():
                    assert self._open is not None
                    self._open.is_complete = True
                    self._close(events)
        return events

    def finish(self) -> list[SectionEvent]:
        """Closes the open section. A call that is cut off stays incomplete."""
        events: list[SectionEvent] = []
        self._close(events)
        return events

    def _grow(self, kind: SectionKind, text: str, events: list[SectionEvent]) -> None:
        if self._open is None or self._open.kind != kind:
            self._open_next(Section(kind, len(self.all)), events)
        assert self._open is not None
        self._open.grow(text)
        events.append(Grown(self._open, text))

    def _open_next(self, section: Section, events: list[SectionEvent]) -> None:
        self._close(events)
        self.all.append(section)
        self._open = section
        events.append(Opened(section))

    def _close(self, events: list[SectionEvent]) -> None:
        if self._open is None:
            return
        if self._open.kind != "call":
            self._open.is_complete = True
        events.append(Closed(self._open))
        self._open = None
