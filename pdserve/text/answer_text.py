"""One choice of an answer that may hold reasoning and tool calls: accepted tokens in, pieces out.

    tokens -> text and delimiters -> AnswerParser -> pieces -> stop strings, in content alone

`text.choice` does the same for plain text. Delimiters that are special tokens are recognised even
if skip_special_tokens is true. Tokens are processed one by one. So the pieces, the end by a stop
string and the number of reasoning tokens do not depend on how the tokens were batched. This module
knows no workers and no engine. The router and `LLM` call it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from pdserve.text.answers.pieces import CallBegin, Content, Item, Piece, SpecialToken, joined
from pdserve.text.answers.reading import AnswerReading
from pdserve.text.choice import ChoiceText
from pdserve.text.detokenize import IncrementalDetokenizer
from pdserve.text.stop import StopMatcher, StopStrings
from pdserve.text.tokenizer import Tokenizer


def make_choice_text(
    tokenizer: Tokenizer, reading: AnswerReading | None, **options: Any
) -> "ChoiceText | AnswerText":
    """Makes the text of one choice.

    - reading: How the answer is read. With None all of it is content.
    - options: Keyword arguments of `ChoiceText`.
    """
    if reading is None:
        return ChoiceText(tokenizer, **options)
    return AnswerText(tokenizer, reading, **options)


class AnswerText:
    def __init__(
        self,
        tokenizer: Tokenizer,
        reading: AnswerReading,
        *,
        stops: StopStrings | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        """The parameters after `reading` mean the same as in `text.choice.ChoiceText`."""
        self._reading = reading
        self._parser = reading.parser()
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._stops = stops
        self._includes_stop = include_stop
        self._matcher = self._new_matcher()
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.num_reasoning_tokens = 0  # counts the end delimiter, too

    @property
    def num_complete_calls(self) -> int:
        """Number of calls that have got their CallEnd."""
        return self._parser.num_complete_calls

    def push(
        self, token_ids: Sequence[int], finish_reason: str | None
    ) -> tuple[list[Piece], str | None, int]:
        """Takes the next tokens of the choice. Nothing may be pushed after a match.

        - finish_reason: Why the worker ended the choice, or None. A reason flushes held text.

        Returns the new pieces, the stop string that matched (or None), and the number of tokens of
        the choice up to the match.
        """
        hidden = 1 if finish_reason == "stop" and not self._includes_stop else 0
        pieces: list[Piece] = []
        for token in token_ids[: len(token_ids) - hidden]:
            self._num_tokens += 1
            stop = self._look(self._read(token), pieces)
            if stop is not None:
                return joined(pieces), stop, self._num_tokens
        self._num_tokens += hidden
        if finish_reason is None:
            return joined(pieces), None, self._num_tokens
        rest = self._parser.push([self._detokenizer.flush()]) + self._parser.finish()
        stop = self._look(rest, pieces)
        if stop is None:
            self._let_go(pieces)
        return joined(pieces), stop, self._num_tokens

    def _read(self, token: int) -> list[Piece]:
        """Returns the pieces that a token makes certain, and counts the token if it is
        reasoning."""
        was_reasoning = self._parser.is_reasoning
        pieces = self._parser.push(self._items(token))
        self.num_reasoning_tokens += was_reasoning or self._parser.is_reasoning
        return pieces

    def _items(self, token: int) -> list[Item]:
        delimiter = self._reading.delimiters.get(token)
        if delimiter is None:
            return [self._detokenizer.push((token,))]
        return [self._detokenizer.flush(), SpecialToken(delimiter)]

    def _look(self, found: Iterable[Piece], pieces: list[Piece]) -> str | None:
        """Moves what was found to `pieces`, up to a stop string. Returns that stop string."""
        for piece in found:
            if isinstance(piece, Content):
                text, stop = self._match(piece.text)
                if text:
                    pieces.append(Content(text))
                if stop is not None:
                    return stop
                continue
            self._let_go(pieces)
            if isinstance(piece, CallBegin):
                piece = replace(piece, id=self._reading.new_call_id())
            pieces.append(piece)
        return None

    def _match(self, text: str) -> tuple[str, str | None]:
        if self._matcher is None or self._num_tokens <= self._min_tokens:
            return text, None
        return self._matcher.push(text)

    def _let_go(self, pieces: list[Piece]) -> None:
        """Emits content that was held as a possible beginning of a stop string. A stop string never
        reaches across a call."""
        held = self._matcher.flush() if self._matcher is not None else ""
        if held:
            pieces.append(Content(held))
            self._matcher = self._new_matcher()

    def _new_matcher(self) -> StopMatcher | None:
        return StopMatcher(self._stops, self._includes_stop) if self._stops is not None else None
