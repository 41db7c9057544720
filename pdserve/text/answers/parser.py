"""The parser of one answer: items in as they are generated, pieces out as they become certain.

    text  ->  [reasoning]  ->  content and calls, in any order, by the format's own parser

The joined pieces do not depend on how the text was cut, and no character is lost. A call that
breaks before its name becomes content. A call that breaks later keeps what the model wrote as its
arguments and gets no CallEnd. Every answer can be parsed, so nothing raises. Each choice has a
parser of its own. The time is linear in the answer's length. This module knows no tokenizer and no
HTTP.
"""

from collections.abc import Collection, Iterable

from pdserve.text.answers.formats import CallFormat, ReasoningFormat
from pdserve.text.answers.pieces import AnyPiece, Item, Piece, Syntax, joined
from pdserve.text.answers.reader import SPACE, Alphabet, Reader, Steps
from pdserve.text.answers.scan import Scan, Schemas
from pdserve.text.answers.writer import PieceWriter


class AnswerParser:
    def __init__(
        self,
        calls: CallFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        *,
        starts_in_reasoning: bool = False,
        tools: Schemas | None = None,
        parallel: bool = True,
        tokens: Collection[str] = (),
    ) -> None:
        """Prepares a parser at the start of an answer.

        - calls: Format of calls. With None, text that looks like a call is content.
        - reasoning: Format of reasoning, or None if the model does not reason.
        - starts_in_reasoning: True if the prompt opened the reasoning
          (`ReasoningFormat.is_open_after`).
        - tools: The request's functions. With None, any name counts as a function.
        - parallel: False keeps only the first call (parallel_tool_calls).
        - tokens: Delimiters that are pushed as `SpecialToken` (`delimiter_tokens`). All other
          delimiters are found in the text.
        """
        assert reasoning is not None or not starts_in_reasoning
        self._alphabet = Alphabet(tokens)
        self._reader = Reader()
        self._writer = PieceWriter(self._alphabet.shown, parallel)
        self._scan = Scan(
            self._reader, self._writer, self._alphabet.spelling, self._alphabet.shown, tools
        )
        self._steps = self._answer(calls, reasoning, starts_in_reasoning)
        self._is_finished = False
        self.is_reasoning = starts_in_reasoning  # True if the text read last is reasoning

    @property
    def num_complete_calls(self) -> int:
        """Number of calls that have got their CallEnd; see `pieces.finish_reason`."""
        return self._writer.num_complete

    def push(self, items: Iterable[Item]) -> list[Piece]:
        """Takes more of the answer and returns the pieces that it makes certain."""
        return _shown(self.push_all(items))

    def finish(self) -> list[Piece]:
        """Ends the answer and returns the rest of its pieces."""
        return _shown(self.finish_all())

    def push_all(self, items: Iterable[Item]) -> list[AnyPiece]:
        """Does what `push` does, and also returns the `Syntax` between the pieces."""
        assert not self._is_finished, "pushed after the end"
        self._reader.feed(self._alphabet.read(items))
        next(self._steps, None)
        return self._writer.take()

    def finish_all(self) -> list[AnyPiece]:
        """Does what `finish` does, and also returns the `Syntax` between the pieces."""
        assert not self._is_finished, "finished twice"
        self._is_finished = True
        self._reader.end()
        next(self._steps, None)
        return self._writer.take()

    def _answer(
        self, calls: CallFormat | None, reasoning: ReasoningFormat | None, is_inside: bool
    ) -> Steps[None]:
        if reasoning is not None:
            yield from self._reason(reasoning, is_inside)
        if calls is not None:
            yield from calls.parse(self._scan)
        else:
            yield from self._scan.content_until()

    def _reason(self, reasoning: ReasoningFormat, is_inside: bool) -> Steps[None]:
        begin, end = map(self._alphabet.spelling, (reasoning.begin, reasoning.end))
        space = yield from self._reader.take(SPACE)
        text, is_begin = yield from self._reader.literal((begin,))
        if not is_begin and not is_inside:
            self._reader.unread(space + text)
            return
        self.is_reasoning = True
        if is_begin:
            self._writer.raw(space + text)
            yield from self._scan.skip()
        else:
            self._writer.raw(space)
            self._reader.unread(text)
        delimiter = yield from self._scan.text_until((end,), self._writer.reasoning)
        if delimiter is not None:
            self.is_reasoning = False
            self._writer.raw(delimiter.whole)
            yield from self._scan.skip()


def _shown(pieces: list[AnyPiece]) -> list[Piece]:
    return joined(piece for piece in pieces if not isinstance(piece, Syntax))
