"""Which tokens of an answer make its content: those that output_text shows log-probabilities of.

    token -> the answer's own parser --content--> it, and what waited with it, is content's
                 '--nothing yet--> it waits       '--anything else--> neither is

Runs the answer's parser a second time, token by token, so that what a token is does not depend on
how tokens came. Tokens of reasoning, of calls, of delimiters and the one that ends the answer are
left out. Knows no JSON. Used by `router.http.responses.responder` where log-probabilities are asked
for.
"""

from collections.abc import Iterator, Sequence

from pdserve.protocol.events import TokenLogprob
from pdserve.text.answers.pieces import AnyPiece, Content, Item, SpecialToken, Syntax
from pdserve.text.answers.reading import AnswerReading
from pdserve.text.detokenize import IncrementalDetokenizer
from pdserve.text.tokenizer import Tokenizer

Found = tuple[int, TokenLogprob]  # (which run of content, from 0; the token)


class ContentTokens:
    def __init__(
        self, tokenizer: Tokenizer, reading: AnswerReading | None, skip_special_tokens: bool
    ) -> None:
        """reading: as the answer is read; None: all of it is content."""
        self._reading = reading
        self._parser = reading.parser() if reading is not None else None
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._waiting: list[TokenLogprob] = []
        self._num_runs = 0
        self._is_content = False  # whether the last piece was

    def push(self, tokens: Sequence[TokenLogprob]) -> Iterator[Found]:
        """Tokens of content, as they become certain. tokens: without the one that ends the answer,
        where that is not shown."""
        for token in tokens:
            if self._parser is None:
                yield 0, token
                continue
            pieces = self._parser.push_all(self._items(token.token_id))
            self._waiting.append(token)
            yield from self._settled(pieces)

    def finish(self) -> Iterator[Found]:
        """The rest, when the answer has ended by itself."""
        if self._parser is not None:
            pieces = self._parser.push_all([self._detokenizer.flush()]) + self._parser.finish_all()
            yield from self._settled(pieces)

    def _settled(self, pieces: Sequence[AnyPiece]) -> Iterator[Found]:
        """Those of the tokens that wait which these pieces say are content's."""
        if not pieces:
            return
        run = self._run_of(pieces)
        if not isinstance(pieces[0], Content):  # what waited was something else
            del self._waiting[:-1]
        if run is not None:
            yield from [(run, token) for token in self._waiting]
        self._waiting.clear()

    def _run_of(self, pieces: Sequence[AnyPiece]) -> int | None:
        """The run that the first content among the pieces is in; None where there is none."""
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
