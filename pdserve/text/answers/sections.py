"""Sections of an answer: its pieces, grouped as dialects with nested answers show them.

    Opened --Grown--> Grown ... --> Closed      one section after the other, never two at once

A section is a run of reasoning, a run of content, or one call. OpenAI's Responses call it an item,
Anthropic's Messages a content block. A stream shows the events, a whole answer the sections, so
that both say the same however the answer was cut. Knows no dialect. Used by
`router.http.responses` and `router.http.messages`.
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
    """index: its place in the answer, from 0. call_id, name: of a call; else empty. is_complete:
    a call's arguments are closed; the other kinds are complete when they are closed by a later
    section or by the answer's end."""

    kind: SectionKind
    index: int
    call_id: str = ""
    name: str = ""
    is_complete: bool = False
    _texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What it holds up to now: text, or a call's arguments."""
        return "".join(self._texts)

    def grow(self, text: str) -> None:
        """Add text at its end."""
        self._texts.append(text)


@dataclass(frozen=True, slots=True)
class Opened:
    section: Section


@dataclass(frozen=True, slots=True)
class Grown:
    """text: what was added to the section now."""

    section: Section
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    section: Section


SectionEvent = Opened | Grown | Closed


class Sections:
    """The sections of one answer as it is generated. Call `push` for each batch of pieces, then
    `finish` once."""

    def __init__(self) -> None:
        self.all: list[Section] = []
        self._open: Section | None = None

    def push(self, pieces: Iterable[Piece]) -> list[SectionEvent]:
        """What these pieces change, in order. A text that is empty changes nothing."""
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
        """Close what is open. A call that is cut off stays incomplete."""
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
