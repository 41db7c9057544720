"""What a run gives its reader: chunks of text and tokens, and how accepted tokens become them.

Knows no workers and no clock. `OutputChunk` is what every reader of a router's answers gets;
`ChoiceTexts` is kept by `router.request.request_run`, one per prompt.
"""

import msgspec

from pdserve.protocol.events import TokenLogprob
from pdserve.protocol.request_key import FinishReason
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.request.record import Accepted, RequestRecord
from pdserve.text.choice import ChoiceText
from pdserve.text.stop import StopStrings
from pdserve.text.tokenizer import Tokenizer


class OutputChunk(msgspec.Struct):
    """What became certain of one choice since its last chunk. index: prompt * n + choice. The last
    chunk of a choice has a finish_reason; stop_reason is the stop token's id or the stop string
    that matched."""

    index: int
    prompt: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class ChoiceTexts:
    """The text of every choice of one prompt; a stop string ends the choice in the record too."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        stops: StopStrings | None,
        prompt: int,
        record: RequestRecord,
    ) -> None:
        """stops: the call's, None when it has none. prompt: its number within the call."""
        self._texts = [
            ChoiceText(
                tokenizer,
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

    def show(self, accepted: Accepted, chunks: dict[int, OutputChunk]) -> bool:
        """Turn new tokens into text, in the choice's entry of chunks. Whether a stop string ended
        the choice."""
        choice = accepted.choice
        text, stop, length = self._texts[choice].push(accepted.token_ids, accepted.finish_reason)
        tokens = accepted.token_ids
        logprobs = accepted.logprobs
        if stop is not None:
            keep = len(tokens) - (len(self._record.choices[choice].tokens) - length)
            tokens = tokens[:keep]
            logprobs = logprobs[:keep]
            self._record.stop(choice, stop, length)
        record = self._record.choices[choice]
        before = chunks.get(choice)
        if before is not None:
            text = before.text + text
            tokens = before.token_ids + tokens
            logprobs = before.logprobs + logprobs
        chunks[choice] = OutputChunk(
            self._first_index + choice,
            self._prompt,
            text,
            tokens,
            logprobs,
            record.finish_reason,
            record.stop_reason,
        )
        return stop is not None
