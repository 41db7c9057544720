"""Requests of `LLM` in flight: they take the engine's events and build the outputs.

Knows no engine. `engine.llm` makes one per prompt.
"""

from dataclasses import dataclass, field

from pdserve.configs.embedding import EmbeddingModel
from pdserve.engine.scheduling.sequence import Request
from pdserve.protocol.commands import Start
from pdserve.protocol.embedding import embedding_of
from pdserve.protocol.events import Delta, Embedded, Event, Failed, PromptScored, TokenLogprob
from pdserve.text.answer_text import AnswerText, make_choice_text
from pdserve.text.answers.pieces import (
    Piece,
    ToolCall,
    calls_of,
    content_of,
    finish_reason,
    joined,
    reasoning_of,
)
from pdserve.text.answers.reading import AnswerReading
from pdserve.text.stop import StopStrings
from pdserve.text.tokenizer import Tokenizer


@dataclass
class CompletionOutput:
    """One choice.

    - finish_reason: "stop", "length", "tool_calls", or "error" if a logit rule left no token.
    - stop_reason: the stop string or stop token id that ended it, or the error; None for
      end-of-sequence and length.
    - pieces: the answer in order, from `LLM.chat` with a model that may reason or call tools. Then
      text is the content alone.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    pieces: list[Piece] = field(default_factory=list)

    @property
    def reasoning(self) -> str:
        """The reasoning before the content; "" if there is none."""
        return reasoning_of(self.pieces)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls, in order."""
        return calls_of(self.pieces)

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass
class RequestOutput:
    """A prompt with its choices, as `LLM.generate` returns it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False


@dataclass
class EmbeddingOutput:
    embedding: list[float] = field(default_factory=list)


@dataclass
class EmbeddingRequestOutput:
    """A prompt with its embedding, as `LLM.embed` returns it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput = field(default_factory=EmbeddingOutput)
    num_cached_tokens: int = 0
    finished: bool = False


@dataclass(frozen=True)
class EmbeddingForm:
    """Says how hidden rows become embeddings: see `protocol.embedding.embedding_of`."""

    model: EmbeddingModel
    dimensions: int | None
    normalize: bool | None


@dataclass(frozen=True)
class EmbeddingRun:
    """A prompt in flight that is to be embedded. Its single event goes into the output."""

    request: Request
    starts: tuple[Start, ...]
    output: EmbeddingRequestOutput
    form: EmbeddingForm

    @property
    def finished(self) -> bool:
        return self.output.finished

    def take(self, event: Event) -> None:
        """Apply an event. Never returns a choice, because none is stopped."""
        if isinstance(event, Embedded):
            form = self.form
            row = embedding_of(event.values, form.model, form.dimensions, form.normalize)
            self.output.outputs.embedding = row.tolist()
            self.output.num_cached_tokens = event.cached_tokens
            self.output.finished = True


class Run:
    """A request in flight: gathers its events into the output."""

    def __init__(
        self,
        request: Request,
        starts: tuple[Start, ...],
        output: RequestOutput,
        tokenizer: Tokenizer | None,
        stops: StopStrings | None,
        reading: AnswerReading | None = None,
    ) -> None:
        """Begin a request. reading: parses the answers for reasoning and calls; None: everything is
        content."""
        self.request = request
        self.starts = starts
        self.output = output
        sampling = request.sampling
        self._texts = [
            make_choice_text(
                tokenizer,
                reading,
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
        """Apply an event. Returns the choice that a stop string has just ended, if any."""
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
            own = self._texts[choice.index]
            shown, stop, _ = own.push(delta.token_ids, delta.finish_reason)
            if isinstance(shown, str):
                choice.text += shown
            else:
                choice.pieces = joined([*choice.pieces, *shown])
                choice.text += content_of(shown)
            if stop is not None:
                choice.finish_reason = "stop"
                choice.stop_reason = stop
            if isinstance(own, AnswerText) and choice.finish_reason is not None:
                choice.finish_reason = finish_reason(choice.finish_reason, own.num_complete_calls)
        self.output.finished = all(c.finish_reason is not None for c in self.output.outputs)
        return choice.index if stop is not None and delta.finish_reason is None else None
