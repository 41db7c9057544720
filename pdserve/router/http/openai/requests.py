"""OpenAI's requests: the parameters of both endpoints, and the SamplingParams made from them.

Relations between a request's parameters are checked here; `body_parsing` checks that a body holds
such a request. Knows no workers and no HTTP framework. Used by `router.http.openai.dialects` and by
the responders.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import INVALID_GRAMMAR, ApiError
from pdserve.router.http.request_form import prompts_of
from pdserve.router.http.sampling_fields import SamplingFields, sampling_of
from pdserve.router.request.prompts import Prompt
from pdserve.router.request.request_checks import Names
from pdserve.router.turns import turn_error
from pdserve.text.chat_messages import text_of
from pdserve.text.grammars.structured import StructuredRequest
from pdserve.turns.turn import Turn, make_turn

# fields that are meant for a platform, not for a model: accepted and ignored
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "parallel_tool_calls",
        "guided_decoding_backend",
    }
)

# fields that are not supported; these values ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": ({},),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
}

_CURES = {
    "audio": "this server answers with text only",
    "best_of": "ask for n choices and pick the best yourself",
    "function_call": "it is OpenAI's old form; send tool_choice",
    "functions": "it is OpenAI's old form; send tools, a list of "
    '{"type": "function", "function": ...}',
    "modalities": "this server answers with text only",
    "suffix": "insertion is not supported; write the model's own fill-in tokens into the prompt",
    "add_special_tokens": "the chat template writes the special tokens itself; send false, or "
    "render the prompt yourself and send it to /v1/completions",
    "chat_template": "the server uses its own; its operator sets model.chat_template",
    "logits_processors": "send logit_bias or logit_rules",
    "request_id": "send it in the header x-request-id",
    "top_logprobs": "send logprobs, the number of alternatives",
    "use_beam_search": "beam search is not supported; ask for n choices",
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream.

    `include_usage` adds an event with the usage at the end. With `continuous_usage_stats` too,
    every event has the usage of its choice. `include_obfuscation` is accepted, but no stream is
    obfuscated.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class BaseRequest(SamplingFields, kw_only=True):
    """The fields of both endpoints; None: not given.

    With `return_tokens_as_token_ids` log-probabilities name tokens "token_id:5".
    `truncate_prompt_tokens` cuts the prompt to its last tokens; -1 leaves as many as fit.
    """

    ignored: ClassVar[frozenset[str]] = IGNORED
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL
    cures: ClassVar[Mapping[str, str]] = _CURES
    cuts_prompts: ClassVar[bool] = True

    max_tokens: int | None = None
    n: int | None = None
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: Any = None
    prompt_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True if every event of a stream has the usage so far."""
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)


class CompletionRequest(BaseRequest, kw_only=True):
    """A request for completions.

    `prompt` is a text, token ids, or a list of either. `max_tokens` 0 with `echo` only scores the
    prompt.
    """

    prompt_field: ClassVar[str] = "prompt"

    prompt: str | list[int | str | tuple[int, ...]]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None

    def forget_input(self) -> None:
        self.prompt = ""

    def prompts(self) -> Sequence[Prompt]:
        """Returns one or many prompts as a list of texts or of token ids."""
        return prompts_of(self.prompt, "prompt")

    @property
    def names(self) -> Names:
        """Returns the names that errors use for its fields."""
        return Names(max_tokens="" if self.max_tokens is None else "max_tokens")

    @property
    def scores_prompt_only(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    def structured(self) -> StructuredRequest | None:
        return _without_echo(super().structured(), self.echo, "the prompt")

    def sampling(
        self, defaults: Mapping[str, Any], rules: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """Makes the SamplingParams. Raises ApiError naming the parameter.

        `defaults` are the model's, by SamplingParams' names. `rules` are further logit rules, by
        name.
        """
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(
                "best_of must equal n: ask for n choices and pick the best yourself",
                param="best_of",
            )
        scored = (
            self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
        )
        _check_stream(self, self.prompt_logprobs)
        max_tokens = 1 if self.scores_prompt_only else self.max_tokens
        defaults = {**defaults, "max_tokens": 16}  # as with vLLM; the model's default is for chat
        return sampling_of(
            self,
            defaults,
            rules,
            n=self.n,
            max_tokens=max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=scored,
        )


class ChatRequest(BaseRequest, kw_only=True):
    """A request for the next message of a conversation.

    `max_tokens` and `max_completion_tokens` are the same. Without them a choice may fill the
    context of the worker that decodes it, within the model's own default. `include_reasoning` false
    leaves the reasoning out of the answer. With `echo` the content begins with that of the last
    message, which must be the assistant's.
    """

    shown_fields: ClassVar[frozenset[str]] = frozenset({"messages"})

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool | None = None

    def forget_input(self) -> None:
        self.messages = []

    @property
    def is_open_ended(self) -> bool:
        """True if it does not limit the answer's number of tokens."""
        return self.max_completion_tokens is None and self.max_tokens is None

    @property
    def names(self) -> Names:
        """Returns the names that errors use for its fields."""
        sent = self.max_completion_tokens is not None
        limit = "max_completion_tokens" if sent else "max_tokens"
        return Names("messages", limit, "top_logprobs")

    def structured(self) -> StructuredRequest | None:
        """Returns the form of the answer, as every request does, with one exception.

        response_format is the form of the content. An answer of demanded calls has no content, so
        the field then asks for nothing, as with OpenAI.
        """
        found = super().structured()
        choice = self.tool_choice
        if isinstance(choice, Mapping) and isinstance(choice.get("allowed_tools"), Mapping):
            choice = choice["allowed_tools"].get("mode")
        demands_calls = choice not in (None, "auto", "none")
        is_of_content = found is not None and found.field.startswith("response_format")
        found = None if is_of_content and demands_calls else found
        return _without_echo(found, self.echo, "the last message")

    def turn(self) -> Turn:
        """Returns the conversation, its tools, and what the answer must be.

        Raises ApiError naming the parameter.
        """
        self.echoed()
        try:
            return make_turn(
                self.messages,
                tools=self.tools,
                tool_choice=self.tool_choice,
                parallel_tool_calls=self.parallel_tool_calls,
                chat_template_kwargs=self.chat_template_kwargs,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                documents=self.documents,
                reasoning_effort=self.reasoning_effort,
                thinking_token_budget=self.thinking_token_budget,
            )
        except ValueError as error:
            raise turn_error(error) from error

    def echoed(self) -> str:
        """Returns the beginning of the content: with `echo`, that of the last message.

        Raises ApiError if that message cannot be repeated.
        """
        if not self.echo:
            return ""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or last.get("content") is None:
            raise ApiError(
                "echo repeats the assistant's message that the answer continues: end messages with "
                "one that has content, or leave echo out",
                param="echo",
            )
        try:
            return text_of(last["content"], f"messages[{len(self.messages) - 1}].content")
        except ValueError as error:
            raise turn_error(error) from error

    def sampling(
        self, defaults: Mapping[str, Any], rules: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """Makes the SamplingParams. Raises ApiError naming the parameter.

        `defaults` are the model's, by SamplingParams' names. `rules` are further logit rules, by
        name.
        """
        limit = (
            self.max_completion_tokens
            if self.max_completion_tokens is not None
            else self.max_tokens
        )
        if self.max_tokens is not None and self.max_tokens != limit:
            raise ApiError(
                "max_tokens and max_completion_tokens differ: send one of them", param="max_tokens"
            )
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise ApiError(
                f"top_logprobs must be 0 or more, not {self.top_logprobs}", param="top_logprobs"
            )
        _check_stream(self, self.prompt_logprobs)
        return sampling_of(
            self,
            {"max_tokens": None, **defaults},
            rules,
            n=self.n,
            max_tokens=limit,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )


def _without_echo(
    found: StructuredRequest | None, echo: bool | None, what: str
) -> StructuredRequest | None:
    """Returns the same form. Raises ApiError if the answer would begin with `what`."""
    if found is not None and echo:
        raise ApiError(
            f"echo repeats {what}, which is not of the form that {found.field} asks for: send one "
            "of them",
            param="echo",
            code=INVALID_GRAMMAR,
        )
    return found


def _check_stream(request: BaseRequest, prompt_logprobs: int | None) -> None:
    options = request.stream_options
    asks = options is not None and (options.include_usage or options.continuous_usage_stats)
    if asks and not request.stream:
        raise ApiError("stream_options is only for stream: true", param="stream_options")
    if request.stream and prompt_logprobs is not None:
        raise ApiError(
            "prompt_logprobs cannot be streamed: send stream: false", param="prompt_logprobs"
        )
