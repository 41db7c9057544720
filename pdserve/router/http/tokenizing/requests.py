"""Bodies of /tokenize and /detokenize, with vLLM's fields.

Relations between fields are checked here. Knows no workers and no HTTP framework. Used by
`router.http.tokenizing.endpoints`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pdserve.router.errors import ApiError
from pdserve.router.http.request_form import RequestForm
from pdserve.router.turns import turn_error
from pdserve.turns.turn import Turn, make_turn

_CURES = {"chat_template": "the server uses its own; its operator sets model.chat_template"}

# fields that only a conversation has
CHAT_FIELDS = (
    "continue_final_message",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "tools",
)


class TokenizeRequest(RequestForm, kw_only=True):
    """A text (prompt) or a conversation (messages) to be made into token ids.

    `add_special_tokens` adds the tokenizer's special tokens beside a template's own; by default
    only to a text. `return_token_strs` returns the tokens as the vocabulary writes them, too.
    """

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    }
    cures: ClassVar[Mapping[str, str]] = _CURES
    shown_fields: ClassVar[frozenset[str]] = frozenset({"prompt", "messages"})
    fits_context: ClassVar[bool] = False

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None

    def check(self) -> None:
        """Raises ApiError unless it holds either a text or a conversation."""
        if (self.prompt is None) == (self.messages is None):
            what = "are both here" if self.prompt is not None else "are both missing"
            raise ApiError(f"prompt and messages {what}: send one of them", param="prompt")
        for name in CHAT_FIELDS:
            if self.prompt is not None and getattr(self, name):
                raise ApiError(f"{name} is only for messages: leave it out", param=name)

    def turn(self) -> Turn:
        """Returns the conversation; the model is shown the tools. Raises ApiError naming the
        parameter."""
        try:
            return make_turn(
                self.messages or (),
                tools=self.tools,
                tool_choice="none" if self.tools else None,  # nothing is called here
                chat_template_kwargs=self.chat_template_kwargs,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                documents=self.documents,
                reasoning_effort=self.reasoning_effort,
            )
        except ValueError as error:
            raise turn_error(error) from error


class DetokenizeRequest(RequestForm, kw_only=True):
    """Token ids to be made into a text, which shows special tokens too.

    Ids that the tokenizer does not have are refused.
    """

    shown_fields: ClassVar[frozenset[str]] = frozenset({"tokens"})
    fits_context: ClassVar[bool] = False

    tokens: list[int]
    model: str | None = None
