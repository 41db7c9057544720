"""The text of one choice: accepted tokens in, certain text out, and the place where a stop string
ended it.

It joins `text.detokenize` and `text.stop` by vLLM's rules. The text of a stop token is only shown
with include_stop. Stop strings are only searched for after the first min_tokens tokens. This module
knows no workers and no engine. The router and `LLM` call it.
"""

from collections.abc import Sequence

from pdserve.text.detokenize import IncrementalDetokenizer
from pdserve.text.stop import StopMatcher, StopStrings
from pdserve.text.tokenizer import Tokenizer


class ChoiceText:
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: StopStrings | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        """Prepares an empty text.

        - stops: Stop strings of the request, shared by its choices. None: there are none.
        - include_stop: SamplingParams' include_stop_str_in_output.

        The others are the parameters of SamplingParams with the same names.
        """
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._matcher = StopMatcher(stops, include_stop) if stops is not None else None
        self._min_tokens = min_tokens
        self._shows_stop = include_stop
        self._num_tokens = 0

    def push(
        self, token_ids: Sequence[int], finish_reason: str | None
    ) -> tuple[str, str | None, int]:
        """Takes the next tokens of the choice. Nothing may be pushed after a match.

        - finish_reason: Why the worker ended the choice, or None. A reason flushes held text.

        Returns the new text, the stop string that matched (or None), and the number of tokens of
        the choice up to the match.
        """
        hidden = 1 if finish_reason == "stop" and not self._shows_stop else 0
        visible = token_ids[: len(token_ids) - hidden]
        if self._matcher is None:
            self._num_tokens += len(token_ids)
            text = self._detokenizer.push(visible)
            return (
                text + self._detokenizer.flush() if finish_reason else text,
                None,
                self._num_tokens,
            )
        return self._match(self._matcher, visible, hidden, finish_reason is not None)

    def _match(
        self, matcher: StopMatcher, visible: Sequence[int], hidden: int, finished: bool
    ) -> tuple[str, str | None, int]:
        text = ""
        # one by one, because the token that completes a stop string is the choice's last
        for token in visible:
            self._num_tokens += 1
            piece, stop = self._look(matcher, self._detokenizer.push((token,)))
            text += piece
            if stop is not None:
                return text, stop, self._num_tokens
        self._num_tokens += hidden
        if not finished:
            return text, None, self._num_tokens
        piece, stop = self._look(matcher, self._detokenizer.flush())
        return text + piece + matcher.flush(), stop, self._num_tokens

    def _look(self, matcher: StopMatcher, text: str) -> tuple[str, str | None]:
        return matcher.push(text) if self._num_tokens > self._min_tokens else (text, None)
