"""Puts errors into the form of Anthropic's Messages API.

A message begins with the field at fault. Errors about a request's content use the names of chat
completions, and `renamed` replaces those by this API's. Errors about the body keep the names that
the client sent. Knows no HTTP framework. Used by `router.http.messages.routes`, by its dialect and
by its responder.
"""

import re
from typing import Any

from pdserve.router.errors import TOO_LONG, ApiError

# by status; other errors that a client causes are invalid_request_error, and ours api_error
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}

# with this code, clients that want the server to keep a conversation go on without that
NO_THREADS = "thread_unsupported_request"

# beginnings of errors about a turn, a grammar or sampling, and what this API says instead
_RENAMED = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
        (r"^(tools\[\d+\])\.function\.", r"\1."),
        (r"^tool_choice 'required'", "tool_choice 'any'"),
        (r"^tool_choice 'named'", "tool_choice 'tool'"),
        (r"^thinking_token_budget\b", "thinking.budget_tokens"),
        (r"^stop\b", "stop_sequences"),
        (r"\bsend 'auto'$", "send {'type': 'auto'}"),
        (r"\bleave continue_final_message out$", "end messages with a user's message"),
    )
]
_KEY = "'Authorization: Bearer KEY'"


def error_body(error: ApiError, name: str) -> dict[str, Any]:
    """Makes the body of an error; `name` is the request's."""
    shown: dict[str, Any] = {"type": error_type(error.status), "message": message_of(error)}
    if error.param == "thread":
        shown["details"] = {"error_code": NO_THREADS, "unsupported": []}
    return {"type": "error", "error": shown, "request_id": name}


def error_type(status: int) -> str:
    """Returns Anthropic's type of an error with this status."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def message_of(error: ApiError) -> str:
    """Returns the error's message, which begins with the field at fault if there is one."""
    message = error.message.replace(_KEY, f"'x-api-key: KEY' or {_KEY}")
    if error.code == TOO_LONG:  # Anthropic's words, by which its clients know such errors
        message = f"prompt is too long: {message}"
    if error.param is None:
        return message
    return message if message.startswith(error.param) else f"{error.param}: {message}"


def renamed(error: ApiError) -> ApiError:
    """Returns the same error, with param and message in this API's names."""
    error.message = _renamed(error.message)
    error.param = error.param and _renamed(error.param)
    error.args = (error.message,)
    return error


def _renamed(text: str) -> str:
    for pattern, name in _RENAMED:
        text = pattern.sub(name, text)
    return text
