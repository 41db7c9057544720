"""What a run gives its reader: chunks of text and tokens, and how accepted tokens become them.

Knows no workers and no clock. `OutputChunk` is what every reader of a router's answers gets;
`ChoiceTexts` is kept by `router.request.request_run`, one per prompt.
"""

from typing import Literal

import msgspec

from pdserve.protocol.events import TokenLogprob
from pdserve.protocol.request_key import FinishReason
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.request.record import Accepted, RequestRecord
from pdserve.text.answer_text import AnswerText, make_choice_text
from pdserve.text.answers.pieces import (
    Content,
    Piece,
    content_of,
    content_pieces,
    finish_reason,
)
from pdserve.text.answers.reading import AnswerReading
from pdserve.text.stop import StopStrings
from pdserve.text.tokenizer import Tokenizer

# "tool_calls": it stopped by itself, and holds a complete call
AnswerEnd = FinishReason | Literal["tool_calls"]


class OutputChunk(msgspec.Struct):
    """What became certain of one choice since its last chunk. index: prompt * n + choice. text: of
    an answer that is read for reasoning and calls, its content. The last chunk of a choice has a
    finish_reason; stop_reason is the stop token's id or the stop string that matched. pieces: of
    such an answer, in order; empty where the text says it all."""

    index: int
    prompt: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: AnswerEnd | None
    stop_reason: int | str | None
    pieces: tuple[Piece, ...] = ()

    def all_pieces(self) -> tuple[Piece, ...]:
        """The pieces, those too that are content alone."""
        return self.pieces or content_pieces(self.text)


class ChoiceTexts:
    """The text of every choice of one prompt; a stop string ends the choice in the record too."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        stops: StopStrings | None,
        prompt: int,
        record: RequestRecord,
        reading: AnswerReading | None = None,
    ) -> None:
        """stops: the call's, None when it has none. prompt: its number within the call. reading:
        how its answers are read; None: all is content."""
        self._texts = [
            make_choice_text(
                tokenizer,
                reading,
                stops=stops,
                include_stop=sampling.include_stop_str_in_output,
                min_tokens=sampling.min_tokens,
                skip_special_tokens=sampling.skip_special_tokens,
            )
            for _ in range(sampling.n)
        ]
        self._prompt = prompt
        self._first_index = prompt * sampling.n
        self._record = record

    @property
    def num_reasoning_tokens(self) -> int:
        """Of all choices up to now."""
        return sum(
            text.num_reasoning_tokens for text in self._texts if isinstance(text, AnswerText)
        )

    def show(self, accepted: Accepted, chunks: dict[int, OutputChunk]) -> bool:
        """Turn new tokens into text, in the choice's entry of chunks. Whether a stop string ended
        the choice."""
        choice = accepted.choice
        own = self._texts[choice]
        shown, stop, length = own.push(accepted.token_ids, accepted.finish_reason)
        tokens = accepted.token_ids
        logprobs = accepted.logprobs
        if stop is not None:
            keep = len(tokens) - (len(self._record.choices[choice].tokens) - length)
            tokens = tokens[:keep]
            logprobs = logprobs[:keep]
            self._record.stop(choice, stop, length)
        record = self._record.choices[choice]
        text, pieces = _shown(shown)
        ended: AnswerEnd | None = record.finish_reason
        if ended is not None and isinstance(own, AnswerText):
            ended = finish_reason(ended, own.num_complete_calls)
        before = chunks.get(choice)
        if before is not None:
            if before.pieces or pieces:
                pieces = before.all_pieces() + (pieces or content_pieces(text))
            text = before.text + text
            tokens = before.token_ids + tokens
            logprobs = before.logprobs + logprobs
        chunks[choice] = OutputChunk(
            self._first_index + choice,
            self._prompt,
            text,
            tokens,
            logprobs,
            ended,
            record.stop_reason,
            pieces,
        )
        return stop is not None


def _shown(shown: str | list[Piece]) -> tuple[str, tuple[Piece, ...]]:
    """(content, all pieces where there is more than content)."""
    if isinstance(shown, str):
        return shown, ()
    is_plain = all(isinstance(piece, Content) for piece in shown)
    return content_of(shown), () if is_plain else tuple(shown)
