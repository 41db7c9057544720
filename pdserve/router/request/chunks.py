"""The chunks of text and tokens that a run gives its reader, and how accepted tokens become them.

Knows no workers and no clock. Every reader of a router's answers gets `OutputChunk`s.
`router.request.request_run` keeps one `ChoiceTexts` per prompt.
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

# "tool_calls": the answer stopped by itself and holds a complete call
AnswerEnd = FinishReason | Literal["tool_calls"]


class OutputChunk(msgspec.Struct):
    """The new part of one choice since its last chunk. The last chunk has a finish_reason."""

    # prompt * n + choice.
    index: int
    prompt: int
    # Only the content, if the answer is read for reasoning and calls.
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: AnswerEnd | None
    # Id of the stop token, or the stop string that matched.
    stop_reason: int | str | None
    # Pieces in order, if the answer is read for reasoning and calls; empty if text says it all.
    pieces: tuple[Piece, ...] = ()

    def all_pieces(self) -> tuple[Piece, ...]:
        """Returns the pieces, including content when there is nothing else."""
        return self.pieces or content_pieces(self.text)


class ChoiceTexts:
    """The text of every choice of one prompt. A stop string ends the choice in the record too."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        stops: StopStrings | None,
        prompt: int,
        record: RequestRecord,
        reading: AnswerReading | None = None,
    ) -> None:
        """Starts without text.

        `stops` are the call's; None if it has none. `prompt` is the prompt's number in the call.
        `reading` says how answers are read; with None everything is content.
        """
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
        """Number of reasoning tokens generated so far, over all choices."""
        return sum(
            text.num_reasoning_tokens for text in self._texts if isinstance(text, AnswerText)
        )

    def show(self, accepted: Accepted, chunks: dict[int, OutputChunk]) -> bool:
        """Turns new tokens into text, in the choice's entry of `chunks`.

        True if a stop string ended the choice.
        """
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
    """Returns the content, and all pieces if there is more than content."""
    if isinstance(shown, str):
        return shown, ()
    is_plain = all(isinstance(piece, Content) for piece in shown)
    return content_of(shown), () if is_plain else tuple(shown)
