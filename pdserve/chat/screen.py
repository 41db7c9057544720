"""Writes an answer on a terminal: dimmed reasoning, content, and tool calls.

Control characters of a model never reach the terminal, which could obey them. Knows no server. Made
by `chat.session`, one for each answer.
"""

import unicodedata

from rich.console import Console

from pdserve.text.answers.pieces import CallArguments, CallBegin, CallEnd, Content, Piece, Reasoning


class Answer:
    """Writes the pieces of one answer as they come."""

    def __init__(self, console: Console, shows_reasoning: bool) -> None:
        self._console = console
        self._shows_reasoning = shows_reasoning
        self._last: type[Piece] | None = None
        self._is_at_start = True  # the cursor is at the start of a line

    def show(self, piece: Piece) -> None:
        match piece:
            case Reasoning():
                if self._shows_reasoning:
                    self._write(Reasoning, piece.text, "dim italic")
            case Content():
                self._write(Content, piece.text)
            case CallBegin():
                self.end()
                self._write(CallBegin, f"{piece.name}(", "cyan")
            case CallArguments():
                self._write(CallBegin, piece.text, "cyan")
            case CallEnd():
                self._write(CallBegin, ")", "cyan")

    def end(self) -> None:
        """Leaves the cursor at the start of a line."""
        if not self._is_at_start:
            self._console.out()
        self._is_at_start, self._last = True, None

    def _write(self, kind: type[Piece], text: str, style: str | None = None) -> None:
        if self._last not in (None, kind):
            self.end()
        shown = visible(text) if self._console.is_terminal else text
        if style is None:
            self._console.file.write(shown)  # unchanged, because rich would expand tabs
        else:
            self._console.out(shown, style=style, end="", highlight=False)
        self._console.file.flush()
        self._last, self._is_at_start = kind, shown.endswith("\n")


def visible(text: str) -> str:
    """Replaces control characters, except tabs and line breaks, and half surrogate pairs by
    U+FFFD."""
    return "".join(
        "\ufffd" if char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cs") else char
        for char in text
    )
