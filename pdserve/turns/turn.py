"""A turn of a conversation: the request that every dialect makes, and the checks that need no
model.

Dialects translate: they make a Turn from their own fields, and show the pieces of its answer
(`text.answers.pieces`) in their own form. Messages and tools have OpenAI's form, because chat
templates are written for it. ValueErrors begin with the field, named as in chat completions, and
name the cure. Called by `router.http.openai`, `cluster.client` and `engine.llm`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from pdserve.text.chat_template import RESERVED
from pdserve.turns.tool_checks import allowed_tools_of, check_tools, tool_choice_of

Json = dict[str, Any]
ToolChoice = Literal["auto", "none", "required", "named"]

MAX_BUDGET = 1 << 31
# Variables of the template that have a field of their own.
_OWN_FIELDS = ("documents", "reasoning_effort")


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. `make_turn` makes and checks it."""

    messages: list[Json]
    tools: list[Json] = []  # Tools that may be called; the model is shown no others.
    tool_places: list[int] = []  # The place of each of them in the request.
    tool_choice: ToolChoice = "auto"  # "named" calls `function`.
    function: str = ""
    parallel_tool_calls: bool = True  # False allows one call.
    template_kwargs: Json = {}  # Further variables of the chat template.
    add_generation_prompt: bool = True  # The prompt ends where an assistant's message begins.
    continue_final_message: bool = False  # The prompt ends with the last message's content.
    documents: list[Json] = []  # For the template.
    reasoning_effort: str | None = None  # For the template.
    thinking_token_budget: int | None = None  # Tokens after which reasoning is ended; None: never.

    @property
    def may_call(self) -> bool:
        """True if the answer may hold calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        """True if the answer must be a call."""
        return self.tool_choice in ("required", "named")

    @property
    def openai_choice(self) -> str | Json:
        """The field tool_choice in OpenAI's form."""
        if self.tool_choice == "named":
            return {"type": "function", "function": {"name": self.function}}
        return self.tool_choice

    @property
    def variables(self) -> Json:
        """The variables of the chat template, without those that every turn has."""
        own: Json = {"documents": self.documents} if self.documents else {}
        if self.reasoning_effort is not None:
            own["reasoning_effort"] = self.reasoning_effort
        return self.template_kwargs | own


def make_turn(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: Any = None,
    parallel_tool_calls: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    reasoning_effort: str | None = None,
    thinking_token_budget: int | None = None,
) -> Turn:
    """Returns the turn that these fields ask for; None means that a field is not given.

    `tool_choice` is in OpenAI's form. Messages are checked when they are rendered. Raises a
    ValueError that names the field and the cure.
    """
    if not messages:
        raise ValueError("messages is empty: send at least one message")
    checked = check_tools(tools)
    asked, places = allowed_tools_of(tool_choice, checked)
    choice, function = tool_choice_of(asked, checked)
    if continue_final_message and add_generation_prompt:
        raise ValueError(
            "add_generation_prompt and continue_final_message exclude each other: a prompt ends "
            "with the last message or with the beginning of the next; send one of them"
        )
    _check_variables(chat_template_kwargs, documents, reasoning_effort)
    _check_budget(thinking_token_budget)
    return Turn(
        messages=list(messages),  # type: ignore[arg-type]  # the template looks at them
        tools=[checked[place] for place in places],
        tool_places=places,
        tool_choice=choice,
        function=function,
        parallel_tool_calls=parallel_tool_calls is not False,
        template_kwargs=dict(chat_template_kwargs or {}),
        add_generation_prompt=add_generation_prompt is not False and not continue_final_message,
        continue_final_message=bool(continue_final_message),
        documents=[dict(document) for document in documents or ()],
        reasoning_effort=reasoning_effort,
        thinking_token_budget=thinking_token_budget,
    )


# The keywords of `make_turn`.
TURN_OPTIONS = frozenset(make_turn.__kwdefaults__ or ())


def _check_variables(
    variables: Mapping[str, Any] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    reasoning_effort: str | None,
) -> None:
    for index, document in enumerate(documents or ()):
        if not isinstance(document, Mapping) or not document:
            raise ValueError(
                f"documents[{index}] must be an object such as {{'title': ..., 'text': ...}}, not "
                f"{document!r:.80}"
            )
    if reasoning_effort is not None and not isinstance(reasoning_effort, str):
        raise ValueError(
            f"reasoning_effort must be a string such as 'low', not {reasoning_effort!r:.80}"
        )
    given = {"documents": documents, "reasoning_effort": reasoning_effort}
    for name in variables or {}:
        if name in RESERVED or name == "self":
            raise ValueError(f"chat_template_kwargs must not set {name!r}: the server sets it")
        if name in _OWN_FIELDS and given[name] is not None:
            raise ValueError(
                f"chat_template_kwargs and the field {name} both set it: send one of them"
            )


def _check_budget(budget: Any) -> None:
    if budget is not None and (type(budget) is not int or not 0 <= budget <= MAX_BUDGET):
        raise ValueError(
            f"thinking_token_budget must be an integer in [0, {MAX_BUDGET}], not {budget!r:.80}"
        )
