"""The look of an answer on a terminal: reasoning dimmed, content, calls of tools.

Control characters of a model do not reach a terminal, which could obey them. Knows no server. Made
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
        self._is_at_start = True  # of a line

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
        """Leave the cursor at the start of a line."""
        if not self._is_at_start:
            self._console.out()
        self._is_at_start, self._last = True, None

    def _write(self, kind: type[Piece], text: str, style: str | None = None) -> None:
        if self._last not in (None, kind):
            self.end()
        shown = visible(text) if self._console.is_terminal else text
        if style is None:
            self._console.file.write(shown)  # as it is: rich would expand tabs
        else:
            self._console.out(shown, style=style, end="", highlight=False)
        self._console.file.flush()
        self._last, self._is_at_start = kind, shown.endswith("\n")


def visible(text: str) -> str:
    """The text with U+FFFD in place of control characters, but for tabs and line breaks, and of
    halves of surrogate pairs."""
    return "".join(
        "\ufffd" if char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cs") else char
        for char in text
    )
