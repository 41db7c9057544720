"""Responses requests: the fields of OpenAI's API, vLLM's parameters beside them, and the turn and
SamplingParams made from them.

Nothing is stored, so a request that refers to stored things is refused with a cure. Relations
between fields are checked here. `names` turns the fields' names in errors of the rooms below, which
are those of chat completions, into this API's. Knows no workers and no HTTP framework. Used by
`router.http.responses.dialect`.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import ApiError
from pdserve.router.http.responses.items import Conversation
from pdserve.router.http.responses.names import Names
from pdserve.router.http.responses.text_format import form_of
from pdserve.router.http.responses.tools import chat_choice, chat_tools
from pdserve.router.http.sampling_fields import SamplingFields, sampling_of
from pdserve.router.turns import turn_error
from pdserve.text.chat_template import THINKING_SWITCHES
from pdserve.text.grammars.structured import StructuredRequest
from pdserve.turns.tool_checks import check_tools
from pdserve.turns.turn import Turn, make_turn

# fields that are meant for a platform, not for a model: accepted and ignored
IGNORED = frozenset({"prompt_cache_retention", "prompt_cache_options", "store"})

# fields that are not supported; these values ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "context_management": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1.0,),
    "logprobs": (False,),
    "mm_processor_kwargs": ({},),
    "n": (1,),
    "spaces_between_special_tokens": (True,),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

_STATELESS = "this server stores no responses"
_CURES = {
    "background": "send the request with background false, and keep the connection open",
    "context_management": "shorten input yourself",
    "conversation": f"{_STATELESS}: send all items of the conversation as input",
    "echo": "the answer holds only what is generated",
    "guided_json": "send text.format, or structured_outputs",
    "guided_regex": "send structured_outputs",
    "guided_choice": "send structured_outputs",
    "guided_grammar": "send structured_outputs",
    "logprobs": 'send include: ["message.output_text.logprobs"], and top_logprobs',
    "max_completion_tokens": "send max_output_tokens",
    "max_tokens": "send max_output_tokens",
    "max_tool_calls": "this server runs no tools of its own; count the calls that you answer",
    "messages": "send input",
    "moderation": "this server moderates nothing; do so yourself",
    "n": "an answer has one choice; send several requests",
    "previous_response_id": f"{_STATELESS}: send the earlier input, and the output items of its "
    "response, as input",
    "prompt": f"{_STATELESS} and no prompts: send input and instructions",
    "reasoning_effort": "send reasoning: {effort: ...}",
    "response_format": "send text: {format: ...}",
    "truncation": "send truncation disabled, and shorten input yourself",
    "verbosity": "send text: {verbosity: ...}",
}

LOGPROBS = "message.output_text.logprobs"
INCLUDES = (LOGPROBS, "reasoning.encrypted_content")
VERBOSITIES = ("low", "medium", "high")
MAX_METADATA = 16
MAX_KEY_CHARS = 64
MAX_VALUE_CHARS = 512


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream.

    `include_obfuscation` is accepted, but no stream is obfuscated. `include_usage` is accepted, but
    the last event always has the usage.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of reasoning.

    `effort` is for the chat template. `summary` and `generate_summary` are accepted, but nothing is
    summarised.
    """

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of the text. `format` is the form of the answer. `verbosity` is for the chat
    template."""

    format: Any = None
    verbosity: str | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """A body of POST /v1/responses.

    Without `max_output_tokens` an answer may fill the context of the worker that decodes it, within
    the model's own default. `include_reasoning` false leaves the reasoning out of the answer.
    """

    ignored: ClassVar[frozenset[str]] = IGNORED
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL
    cures: ClassVar[Mapping[str, str]] = _CURES
    shown_fields: ClassVar[frozenset[str]] = frozenset({"input", "instructions"})

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: ResponsesStreamOptions | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool | None = None

    def forget_input(self) -> None:
        self.input = ""
        self.instructions = None

    @property
    def is_open_ended(self) -> bool:
        """True if it does not limit the answer's number of tokens."""
        return self.max_output_tokens is None

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer has log-probabilities."""
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Raises ApiError for values that are wrong by themselves or beside others."""
        for index, value in enumerate(self.include or ()):
            if value not in INCLUDES:
                raise ApiError(
                    f"include[{index}] must be one of {', '.join(INCLUDES)}, not {value!r:.80}: "
                    "leave it out",
                    param="include",
                )
        if self.top_logprobs and not self.wants_logprobs:
            raise ApiError(
                f'top_logprobs needs include: ["{LOGPROBS}"]: send both', param="top_logprobs"
            )
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options is only for stream: true", param="stream_options")
        self._check_metadata()

    def _check_metadata(self) -> None:
        given = self.metadata or {}
        if len(given) > MAX_METADATA:
            raise ApiError(
                f"metadata must hold at most {MAX_METADATA} pairs, not {len(given)}",
                param="metadata",
            )
        for key, value in given.items():
            if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
                raise ApiError(
                    f"metadata: keys have at most {MAX_KEY_CHARS} characters, values "
                    f"{MAX_VALUE_CHARS}: {key!r:.80} is longer",
                    param="metadata",
                )

    def turn(self, reads: Callable[[str], bool], can_reason: bool) -> tuple[Turn, Names]:
        """Returns the conversation with its tools, and the names for later errors about it.

        `reads` says whether the chat template reads a variable. `can_reason` is True if the model
        is known to reason. Raises ApiError naming the parameter.
        """
        names = Names()
        try:
            conversation = Conversation(self.input, self.instructions)
            names = Names(conversation)
            tools = check_tools(chat_tools(self.tools or ()))
            turn = make_turn(
                conversation.messages,
                tools=tools,
                tool_choice=chat_choice(self.tool_choice, tools),
                parallel_tool_calls=self.parallel_tool_calls,
                thinking_token_budget=self.thinking_token_budget,
                chat_template_kwargs=self._variables(reads, can_reason),
                reasoning_effort=self._effort(reads),
            )
        except ValueError as error:
            raise names.renamed(turn_error(error)) from error
        return turn, names

    def _effort(self, reads: Callable[[str], bool]) -> str | None:
        """Returns the effort for the chat template; "none" only if it reads efforts."""
        effort = self.reasoning.effort if self.reasoning is not None else None
        return None if effort == "none" and not reads("reasoning_effort") else effort

    def _variables(self, reads: Callable[[str], bool], can_reason: bool) -> dict[str, Any]:
        """Returns chat_template_kwargs, with what `reasoning` and `text` set in the template."""
        variables = dict(self.chat_template_kwargs or {})
        own: dict[str, tuple[str, Any]] = {}  # by variable: the field, and the value it sets
        effort = self.reasoning.effort if self.reasoning is not None else None
        if effort == "none" and not reads("reasoning_effort"):
            switch = next(filter(reads, THINKING_SWITCHES), None)
            if switch is None and can_reason:
                raise ValueError(
                    "reasoning.effort 'none': the model's chat template has no variable that "
                    "switches reasoning off: leave it out, or send thinking_token_budget 0"
                )
            own |= {} if switch is None else {switch: ("reasoning.effort", False)}
        verbosity = self.text.verbosity if self.text is not None else None
        if verbosity not in (None, *VERBOSITIES):
            raise ValueError(
                f"text.verbosity must be one of {', '.join(VERBOSITIES)}, not {verbosity!r:.80}"
            )
        if verbosity is not None and reads("verbosity"):
            own["verbosity"] = "text.verbosity", verbosity
        elif verbosity not in (None, "medium"):
            raise ValueError(
                "text.verbosity: the model's chat template does not read it: leave it out, and say "
                "in instructions how long answers should be"
            )
        for name, (field, value) in own.items():
            if name in variables and variables[name] != value:
                raise ValueError(
                    f"{field} and chat_template_kwargs.{name} contradict each other: send one of "
                    "them"
                )
            variables[name] = value
        return variables

    def asked_form(self) -> StructuredRequest | None:
        own = form_of(self.text.format) if self.text is not None else None
        other = super().asked_form()
        if own is not None and other is not None:
            raise ValueError(
                f"{own.field}: {own.field} and {other.field} exclude each other: send one of them"
            )
        return own or other

    def structured(self) -> StructuredRequest | None:
        """Returns the form of the answer, as every request does, with one exception.

        text.format is the form of the content. An answer of demanded calls has no content, so the
        field then asks for nothing, as with OpenAI.
        """
        found = super().structured()
        is_of_content = found is not None and found.field.startswith("text.format")
        return None if is_of_content and self._demands_calls else found

    @property
    def _demands_calls(self) -> bool:
        choice = self.tool_choice
        mode = choice.get("mode") if isinstance(choice, Mapping) and "mode" in choice else choice
        return mode not in (None, "auto", "none")

    def sampling(
        self, defaults: Mapping[str, Any], rules: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """Makes the SamplingParams. Raises ApiError naming the parameter as SamplingParams do.

        `defaults` are the model's, by SamplingParams' names. `rules` are further logit rules, by
        name.
        """
        return sampling_of(
            self,
            {"max_tokens": None, **defaults},
            rules,
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
        )
