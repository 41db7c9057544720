"""Renames fields in errors, from the names of chat completions to those of a Responses client.

    messages[1].tool_calls[0].function.arguments -> input[3].arguments
    tools[0].function.name -> tools[0].name        max_tokens -> max_output_tokens

Turns, templates and admission use the names of chat completions, since all dialects go through
them. Knows no HTTP. Made by `router.http.responses.requests`, one per call.
"""

import re

from pdserve.router.errors import TOO_LONG, ApiError
from pdserve.router.http.responses.items import Conversation

_PARAMS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?")
# a path at the beginning of a message
_PATH = re.compile(r"[a-z_]+(?:\[\d+\]|\.[a-z_]+)*")
_MESSAGES = re.compile(r"\bmessages\b")
_MAX_TOKENS = re.compile(r"\bmax_tokens\b")


class Names:
    """The names of one call's fields.

    `conversation` is None if its items were not read.
    """

    def __init__(self, conversation: Conversation | None = None) -> None:
        self._conversation = conversation

    def renamed(self, error: ApiError) -> ApiError:
        """Returns the same error, with param and message in the client's names."""
        path = self._path(error.message)
        if path is not None:
            old, new = path
            error.message = new + error.message[len(old) :]
            error.param = _PATH.match(error.message)[0]  # type: ignore[index]  # it begins with it
        elif error.param in _PARAMS:
            old, error.param = error.param, _PARAMS[error.param]
            if error.message.startswith(old):
                error.message = error.param + error.message[len(old) :]
        error.message = _MAX_TOKENS.sub("max_output_tokens", error.message)
        if error.code == TOO_LONG:  # its field is in the middle of the message
            error.message = _MESSAGES.sub("input", error.message)
        error.args = (error.message,)
        return error

    def _path(self, message: str) -> tuple[str, str] | None:
        """Returns the path that the message begins with, and the one that should replace it."""
        if message.startswith("messages[") and self._conversation is not None:
            name, length = self._conversation.place(message)
            return message[:length], name
        if found := _TOOL.match(message):
            return found[0], f"tools[{found[1]}]"
        if found := re.match(r"input(?:\[\d+\]|\.)|text\.|reasoning\.|tool_choice\.", message):
            return found[0], found[0]
        return None
