"""Collects pieces as a parser finds them: joins texts of one kind, counts calls, and holds text
that may be a call until its name is known.

Held text becomes the beginning of a call (`begin`) or content (`give_back`), so nothing is lost.
This module knows no format. Parsers use it through `scan`.
"""

from collections.abc import Callable

from pdserve.text.answers.pieces import (
    AnyPiece,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Reasoning,
    Syntax,
)

_Kind = type[Reasoning] | type[Content] | type[CallArguments] | type[Syntax]


class PieceWriter:
    def __init__(self, shown: Callable[[str], str], parallel: bool = True) -> None:
        """Prepares an empty writer.

        - shown: Turns the reader's text into the text that clients see.
        - parallel: False keeps only the first call.
        """
        self._shown = shown
        self._parallel = parallel
        self._pieces: list[AnyPiece] = []
        self._kind: _Kind = Syntax
        self._texts: list[str] = []
        self._held: list[tuple[str, bool]] | None = None  # (text, True if it is arguments)
        self._num_calls = 0
        self.num_complete = 0

    def take(self) -> list[AnyPiece]:
        """Returns the pieces since the last call, and forgets them."""
        self._close()
        pieces = self._pieces
        self._pieces = []
        return pieces

    @property
    def is_holding(self) -> bool:
        return self._held is not None

    def hold(self) -> None:
        assert self._held is None, "holds already"
        self._held = []

    def give_back(self) -> None:
        """Turns the held text into content, because it was no call."""
        self._write(Content, "".join([text for text, _ in self._release()]))

    def begin(self, name: str) -> None:
        """Turns the held text into the beginning of a call of this name."""
        held = self._release()
        self._close()  # pending arguments belong to the previous call
        self._num_calls += 1
        self._write(Syntax, "".join([text for text, is_argument in held if not is_argument]))
        if self._is_shown:
            self._close()
            self._pieces.append(CallBegin(self._num_calls - 1, self._shown(name)))
        self.argument("".join([text for text, is_argument in held if is_argument]))

    def end(self) -> None:
        """Marks the last call as complete."""
        if self._is_shown:
            self._close()
            self._pieces.append(CallEnd(self._num_calls - 1))
            self.num_complete += 1

    def content(self, text: str) -> None:
        self._write(Content, text)

    def reasoning(self, text: str) -> None:
        self._write(Reasoning, text)

    def raw(self, text: str) -> None:
        """Writes text that only gives a call its form."""
        if self._held is None:
            self._write(Syntax, text)
        elif text:
            self._held.append((text, False))

    def argument(self, text: str) -> None:
        """Writes arguments as the model wrote them."""
        if self._held is not None:
            self._held.append((text, True))
        else:
            self._write(CallArguments if self._is_shown else Syntax, text)

    def made_argument(self, text: str) -> None:
        """Writes arguments that do not stand in the answer in this form."""
        if self._is_shown:
            self.argument(text)

    @property
    def _is_shown(self) -> bool:
        return self._parallel or self._num_calls <= 1

    def _release(self) -> list[tuple[str, bool]]:
        assert self._held is not None, "holds nothing"
        held = self._held
        self._held = None
        return held

    def _write(self, kind: _Kind, text: str) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._close()
            self._kind = kind
        self._texts.append(text)

    def _close(self) -> None:
        if not self._texts:
            return
        text = self._shown("".join(self._texts))
        self._texts = []
        if self._kind is CallArguments:
            self._pieces.append(CallArguments(self._num_calls - 1, text))
        elif self._kind is Reasoning:
            self._pieces.append(Reasoning(text))
        else:
            self._pieces.append(Content(text) if self._kind is Content else Syntax(text))
