"""Finds the tokens that make an answer's content; output_text shows their log-probabilities.

    token -> the answer's own parser --content--> it and the tokens that waited with it are content
                 '--nothing yet--> it waits       '--anything else--> neither is

It runs the answer's parser a second time, token by token, so that a token's kind does not depend on
how tokens came. Tokens of reasoning, of calls and of delimiters are left out, and so is the token
that ends the answer. Knows no JSON. Used by `router.http.responses.responder` if log-probabilities
are asked for.
"""

from collections.abc import Iterator, Sequence

from pdserve.protocol.events import TokenLogprob
from pdserve.text.answers.pieces import AnyPiece, Content, Item, SpecialToken, Syntax
from pdserve.text.answers.reading import AnswerReading
from pdserve.text.detokenize import IncrementalDetokenizer
from pdserve.text.tokenizer import Tokenizer

Found = tuple[int, TokenLogprob]  # (number of the run of content, from 0; the token)


class ContentTokens:
    def __init__(
        self, tokenizer: Tokenizer, reading: AnswerReading | None, skip_special_tokens: bool
    ) -> None:
        """Starts before the first token.

        `reading` is the answer's; None: all of it is content.
        """
        self._reading = reading
        self._parser = reading.parser() if reading is not None else None
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._waiting: list[TokenLogprob] = []
        self._num_runs = 0
        self._is_content = False  # whether the last piece was content

    def push(self, tokens: Sequence[TokenLogprob]) -> Iterator[Found]:
        """Yields tokens of content as they become certain.

        `tokens` must not include the token that ends the answer, unless that is shown.
        """
        for token in tokens:
            if self._parser is None:
                yield 0, token
                continue
            pieces = self._parser.push_all(self._items(token.token_id))
            self._waiting.append(token)
            yield from self._settled(pieces)

    def finish(self) -> Iterator[Found]:
        """Yields the rest, after the answer has ended by itself."""
        if self._parser is not None:
            pieces = self._parser.push_all([self._detokenizer.flush()]) + self._parser.finish_all()
            yield from self._settled(pieces)

    def _settled(self, pieces: Sequence[AnyPiece]) -> Iterator[Found]:
        """Yields those of the waiting tokens that are content according to these pieces."""
        if not pieces:
            return
        run = self._run_of(pieces)
        if not isinstance(pieces[0], Content):  # what waited was something else
            del self._waiting[:-1]
        if run is not None:
            yield from [(run, token) for token in self._waiting]
        self._waiting.clear()

    def _run_of(self, pieces: Sequence[AnyPiece]) -> int | None:
        """Returns the run of the first content among the pieces; None if there is none."""
        found = None
        for piece in pieces:
            if isinstance(piece, Syntax):
                continue
            if not isinstance(piece, Content):
                self._is_content = False
            elif piece.text:
                self._num_runs += not self._is_content
                self._is_content = True
                found = self._num_runs - 1 if found is None else found
        return found

    def _items(self, token: int) -> list[Item]:
        assert self._reading is not None
        delimiter = self._reading.delimiters.get(token)
        if delimiter is None:
            return [self._detokenizer.push((token,))]
        return [self._detokenizer.flush(), SpecialToken(delimiter)]
