"""A request of `LLM` in flight, and the output that its events are gathered into.

Knows text; no engine. Made by `llm`.
"""

from dataclasses import dataclass, field

from pdserve.engine.scheduling.sequence import Request
from pdserve.protocol.commands import Start
from pdserve.protocol.events import Delta, Event, Failed, PromptScored, TokenLogprob
from pdserve.text.choice import ChoiceText
from pdserve.text.stop import StopStrings
from pdserve.text.tokenizer import Tokenizer


@dataclass
class CompletionOutput:
    """One choice. finish_reason: "stop", "length", or "error" where a logit rule left nothing to
    draw. stop_reason: the stop string or stop token id that ended it, or the error; None for
    end-of-sequence and length."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass
class RequestOutput:
    """One prompt and its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False


class Run:
    """A request in flight: gathers its events into the output."""

    def __init__(
        self,
        request: Request,
        starts: tuple[Start, ...],
        output: RequestOutput,
        tokenizer: Tokenizer | None,
        stops: StopStrings | None,
    ) -> None:
        self.request = request
        self.starts = starts
        self.output = output
        sampling = request.sampling
        self._texts = [
            ChoiceText(
                tokenizer,
                stops=stops,
                include_stop=sampling.include_stop_str_in_output,
                min_tokens=sampling.min_tokens,
                skip_special_tokens=sampling.skip_special_tokens,
            )
            for _ in output.outputs
            if tokenizer is not None
        ]

    @property
    def finished(self) -> bool:
        return self.output.finished

    def take(self, event: Event) -> int | None:
        """Apply an event; returns the choice that a stop string just ended, if any."""
        if isinstance(event, PromptScored):
            self.output.num_cached_tokens = event.cached_tokens
            if event.logprobs is not None:
                self.output.prompt_logprobs = [
                    *(self.output.prompt_logprobs or []),
                    *event.logprobs,
                ]
        elif isinstance(event, Failed):
            self._fail(event.message)
        elif isinstance(event, Delta) and self.output.outputs[event.choice].finish_reason is None:
            return self._take_delta(event, self.output.outputs[event.choice])
        return None

    def _fail(self, message: str) -> None:
        for choice in self.output.outputs:
            if choice.finish_reason is None:
                choice.finish_reason = "error"
                choice.stop_reason = message
        self.output.finished = True

    def _take_delta(self, delta: Delta, choice: CompletionOutput) -> int | None:
        choice.token_ids += delta.token_ids
        if delta.logprobs is not None:
            choice.logprobs = choice.logprobs or []
            choice.logprobs += delta.logprobs
        choice.finish_reason = delta.finish_reason
        choice.stop_reason = delta.stop_reason
        stop = None
        if self._texts:
            text, stop, _ = self._texts[choice.index].push(delta.token_ids, delta.finish_reason)
            choice.text += text
        if stop is not None:
            choice.finish_reason = "stop"
            choice.stop_reason = stop
        self.output.finished = all(c.finish_reason is not None for c in self.output.outputs)
        return choice.index if stop is not None and delta.finish_reason is None else None
