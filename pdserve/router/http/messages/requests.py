"""Requests of Anthropic's Messages API: their fields, and the Turn and SamplingParams made from
them.

Relations between a request's fields are checked here; `body_parsing` checks that a body holds such
a request. Errors name fields as this API does. Knows no workers and no HTTP framework. Used by
`router.http.messages.dialect`.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import ApiError, grammar_error
from pdserve.router.http.messages.conversation import chat_messages, is_prefilled
from pdserve.router.http.messages.fields import check_keys
from pdserve.router.http.messages.tools import choice_of, tools_of
from pdserve.router.http.request_form import GeneratingForm
from pdserve.router.http.sampling_fields import checked_form, sampling_of
from pdserve.router.turns import turn_error
from pdserve.text.chat_template import THINKING_SWITCHES
from pdserve.text.grammars.structured import StructuredRequest
from pdserve.turns.turn import MAX_BUDGET, Turn, make_turn

Json = dict[str, Any]

# Fields that are meant for a platform, not for a model: accepted and ignored. Prefixes are cached
# without being asked.
IGNORED = frozenset(
    {"cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed"}
)
# fields that are not supported; these values ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "context_management": ({"edits": []}, {}),
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "logprobs": (False,),
    "mcp_servers": ([],),
    "n": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
_FORM = "send output_config with format"
_NO_FORM = "output_config.format takes a JSON schema; other forms are in /v1/chat/completions"
_NO_LOGPROBS = "send the request to /v1/chat/completions, which shows log-probabilities"
_CURES = {
    "container": "this server runs no code: leave it out",
    "context_management": "this server edits no conversation: shorten messages before sending them",
    "guided_choice": _NO_FORM,
    "guided_grammar": _NO_FORM,
    "guided_json": _FORM,
    "guided_regex": _NO_FORM,
    "include_reasoning": "send thinking with display omitted",
    "logprobs": _NO_LOGPROBS,
    "max_completion_tokens": "send max_tokens",
    "mcp_servers": "this server calls no tools: send the servers' tools as tools, and call them "
    "yourself",
    "n": "an answer is one message: send the request several times",
    "parallel_tool_calls": "send tool_choice with disable_parallel_tool_use",
    "reasoning_effort": "send output_config with effort",
    "response_format": _FORM,
    "stop": "send stop_sequences",
    "structured_outputs": _FORM,
    "thinking_token_budget": "send thinking with budget_tokens",
    "top_logprobs": _NO_LOGPROBS,
    "thread": "this server keeps no conversations: send all messages, without thread",
}
# the cure for fields that change nothing that is counted
_NOT_COUNTED = "it does not change how many tokens the input has: leave it out"

EFFORTS = ("low", "medium", "high", "xhigh", "max")
DISPLAYS = ("summarized", "omitted")
_THINKING_FORM = (
    "{'type': 'enabled', 'budget_tokens': ...}, {'type': 'adaptive'} or {'type': 'disabled'}"
)


class BaseRequest(GeneratingForm, kw_only=True):
    """Fields of both endpoints: what the model is shown. None: not given."""

    ignored: ClassVar[frozenset[str]] = IGNORED
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL
    cures: ClassVar[Mapping[str, str]] = _CURES
    shown_fields: ClassVar[frozenset[str]] = frozenset({"messages", "system"})

    messages: list[Any]
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    thinking: Any = None
    output_config: Any = None
    output_format: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    def forget_input(self) -> None:
        self.messages = []
        self.system = None

    def turn(self, reads: Callable[[str], bool]) -> Turn:
        """Returns the conversation, its tools, and what the answer must be.

        `reads` says whether the chat template looks at a variable. Raises ApiError naming the
        field.
        """
        try:
            kind, budget = self._thinking()
            messages = chat_messages(self.system, self.messages)
            tools = tools_of(self.tools)
            choice, parallel = choice_of(self.tool_choice, bool(tools))
            if kind == "enabled" and is_prefilled(messages) and messages[-1]["content"]:
                raise ValueError(
                    "thinking cannot be enabled where the last message, an assistant's, begins the "
                    "answer: end messages with a user's message, or leave thinking out"
                )
            effort = self._effort()
            return make_turn(
                messages,
                tools=tools,
                tool_choice=choice,
                parallel_tool_calls=parallel,
                chat_template_kwargs=self._variables(kind, reads),
                continue_final_message=is_prefilled(messages),
                reasoning_effort=effort if reads("reasoning_effort") else None,
                thinking_token_budget=budget,
            )
        except ValueError as error:
            raise turn_error(error) from error

    def structured(self) -> StructuredRequest | None:
        """Returns the form that the answer must have; None: any text.

        Raises ApiError naming the field.
        """
        self._effort()
        inside = (self.output_config or {}).get("format")
        where = "output_format" if inside is None else "output_config.format"
        given = self.output_format if inside is None else inside
        try:
            if inside is not None and self.output_format is not None:
                raise ValueError(
                    "output_format and output_config.format are the same: send one of them"
                )
            if given is None:
                return None
            kind = given.get("type") if isinstance(given, Mapping) else None
            if kind != "json_schema":
                raise ValueError(
                    f"{where} must be {{'type': 'json_schema', 'schema': ...}}, not {given!r:.80}"
                )
            check_keys(given, ("type", "schema"), where)
            if given.get("schema") is None:
                raise ValueError(f"{where}.schema is missing: send the JSON schema there")
            if not isinstance(given["schema"], Mapping | bool | str):
                raise ValueError(
                    f"{where}.schema must be a JSON schema, not {given['schema']!r:.80}"
                )
        except ValueError as error:
            raise grammar_error(error) from error
        return StructuredRequest("json", given["schema"], f"{where}.schema")

    @property
    def shows_thinking(self) -> bool:
        """True if the answer's thinking should have its text."""
        thinking = self.thinking
        return not (isinstance(thinking, Mapping) and thinking.get("display") == "omitted")

    def _thinking(self) -> tuple[str | None, int | None]:
        """Returns the type of thinking, and the number of tokens after which it is ended."""
        given = self.thinking
        if given is None:
            return None, None
        kind = given.get("type") if isinstance(given, Mapping) else None
        if kind not in ("enabled", "adaptive", "disabled"):
            raise ValueError(f"thinking must be {_THINKING_FORM}, not {given!r:.80}")
        known = {"enabled": ("type", "budget_tokens", "display"), "adaptive": ("type", "display")}
        check_keys(given, known.get(kind, ("type",)), "thinking")
        display = given.get("display")
        if display is not None and display not in DISPLAYS:
            raise ValueError(
                f"thinking.display must be one of {', '.join(DISPLAYS)}, not {display!r:.80}"
            )
        if kind != "enabled":
            return kind, None
        budget = given.get("budget_tokens")
        if type(budget) is not int or not 1 <= budget <= MAX_BUDGET:
            raise ValueError(
                f"thinking.budget_tokens must be an integer in [1, {MAX_BUDGET}], not "
                f"{budget!r:.80}"
            )
        return kind, budget

    def _variables(self, kind: str | None, reads: Callable[[str], bool]) -> Json:
        """Returns the chat template's variables: the client's own, and the template's switch of
        reasoning, if it has one."""
        variables = dict(self.chat_template_kwargs or {})
        for name in THINKING_SWITCHES:
            if kind is None or not reads(name):
                continue
            if name in variables:
                raise ValueError(
                    f"chat_template_kwargs.{name} and thinking both switch reasoning: send one of "
                    "them"
                )
            variables[name] = kind != "disabled"
        return variables

    def _effort(self) -> str | None:
        config = self.output_config
        if config is None:
            return None
        if not isinstance(config, Mapping):
            raise ApiError(
                f"output_config must be an object with effort or format, not {config!r:.80}",
                param="output_config",
            )
        try:
            check_keys(config, ("effort", "format"), "output_config")
            effort = config.get("effort")
            if effort is not None and effort not in EFFORTS:
                raise ValueError(
                    f"output_config.effort must be one of {', '.join(EFFORTS)}, not {effort!r:.80}"
                )
        except ValueError as error:
            raise turn_error(error) from error
        return effort


class MessagesRequest(BaseRequest, kw_only=True):
    """A request for the next message.

    If fewer tokens than `max_tokens` fit the context, the answer may have as many as fit. The
    fields after `top_k` are vLLM's.
    """

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    logit_rules: dict[str, Any] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None

    def turn(self, reads: Callable[[str], bool]) -> Turn:
        turn = super().turn(reads)
        budget = turn.thinking_token_budget
        if budget is not None and budget >= self.max_tokens:
            raise ApiError(
                f"thinking.budget_tokens ({budget}) must be less than max_tokens "
                f"({self.max_tokens}), or nothing is left for the answer: lower it, or raise "
                "max_tokens",
                param="thinking",
            )
        return turn

    def structured(self) -> StructuredRequest | None:
        """Returns the form, as above, except beside demanded calls.

        It is the form of the text. An answer of demanded calls has no text, so the form then asks
        for nothing.
        """
        found = checked_form(super().structured(), self.logit_rules, self.ignore_eos)
        demands_calls = (self.tool_choice or {}).get("type") in ("any", "tool")
        return None if demands_calls else found

    def sampling(self, defaults: Mapping[str, Any], rules: Mapping[str, Any]) -> SamplingParams:
        """Makes the SamplingParams. Raises ApiError naming the field.

        `defaults` are the model's, by SamplingParams' names. `rules` are further logit rules, by
        name.
        """
        return sampling_of(self, defaults, rules, stop=self.stop_sequences)


class CountRequest(BaseRequest, kw_only=True):
    """A request for the number of tokens in a message's input.

    Fields that do not change the number are refused, as by Anthropic's API.
    """

    cures: ClassVar[Mapping[str, str]] = {
        **{
            name: _NOT_COUNTED
            for name in MessagesRequest.__struct_fields__
            if name not in BaseRequest.__struct_fields__
        },
        **_CURES,
    }

    def turn(self, reads: Callable[[str], bool]) -> Turn:
        if self.stream:
            raise ApiError(f"stream is not supported: {_NOT_COUNTED}", param="stream")
        return super().turn(reads)
