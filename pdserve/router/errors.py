"""Errors in the form that OpenAI clients expect, and the reasons a request ends without an answer.

Knows no HTTP framework. Raised by parsing, by admission and while requests run;
`router.http.endpoints` and `router.http.answers` turn them into responses or stream events.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

FailureKind = Literal["invalid", "unavailable", "internal"]

INVALID_GRAMMAR = "invalid_grammar"  # the code of errors about an answer's form

TOO_LONG = "context_length_exceeded"  # the code of errors about a length
# Clients such as litellm (ContextWindowExceededError) recognise length errors by OpenAI's words
CONTEXT_LIMIT = "This model's maximum context length is"

LONGEST_MESSAGE = 2000
LONGEST_PARAM = 200

STATUS: dict[str, tuple[int, str, str | None]] = {
    "invalid": (400, "invalid_request_error", None),
    "unavailable": (503, "service_unavailable_error", "no_workers"),
    "internal": (500, "internal_error", None),
}


class ApiError(Exception):
    """An answer in OpenAI's error form.

    `param` is the request's parameter at fault. `retry_after` is in seconds, for 429 and 503.
    `allow` lists methods, for 405. `figures` are the numbers behind the decision, for the log only.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        allow: str | None = None,
        figures: Mapping[str, object] | None = None,
    ) -> None:
        # the message repeats something that the client sent, which may be megabytes
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[:LONGEST_MESSAGE]} ... ({len(message)} characters)"
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param if param is None else param[:LONGEST_PARAM]
        self.code = code
        self.retry_after = retry_after
        self.allow = allow
        self.figures = figures or {}
        self.logged = False  # True once the prompt that it ended has its line in the log

    @property
    def reason(self) -> str:
        """Returns a label for metrics, one of a small set whatever clients send."""
        return self.code or self.kind

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class RequestFailed(ApiError):
    """A request that was admitted, or ready for it, and got no complete answer."""

    def __init__(self, failure: FailureKind, message: str) -> None:
        status, kind, code = STATUS[failure]
        super().__init__(
            message, status=status, kind=kind, code=code, retry_after=1 if status == 503 else None
        )
        self.failure = failure


def internal_error() -> ApiError:
    """Returns what a client sees of an error that only the log explains."""
    return ApiError("the server failed; its log says why", status=500, kind="internal_error")


def grammar_error(error: ValueError) -> ApiError:
    """Returns an ApiError (400) for a ValueError of `text.grammars`.

    Such a message begins with the field, for example response_format.json_schema.schema.
    """
    found = re.match(r"[A-Za-z_][\w.\[\]]*", str(error))
    return ApiError(str(error), param=found[0] if found else None, code=INVALID_GRAMMAR)


def value_error(error: ValueError, names: Iterable[str]) -> ApiError:
    """Returns an ApiError for a ValueError whose message begins with the parameter's name, as all
    of ours do."""
    words = str(error).split()
    first = words[0].rstrip(":,") if words else ""
    return ApiError(str(error), param=first if first in set(names) else None)


def prompt_length_error(
    limit: int, num_prompt: int, named: str, about: str = "", least_answer: int = 1
) -> ApiError:
    """Returns an ApiError (400) for a prompt that leaves no room for an answer.

    `named` is the prompt's place in the request. `about` precedes its length in the message.
    `least_answer` is the least number of answer tokens that must fit after it.
    """
    answer = f", and the answer needs at least {least_answer}" if least_answer else ""
    message = (
        f"{CONTEXT_LIMIT} {limit} tokens. However, you requested {about}{num_prompt} tokens in "
        f"{named}{answer}: shorten {named}"
    )
    return ApiError(message, param=named, code=TOO_LONG)


def room_error(limit: int, num_prompt: int, num_generated: int, named: str, asked: str) -> ApiError:
    """Returns an ApiError (400) for a prompt and an answer that do not fit together.

    `named` is the prompt's place in the request. `asked` is the parameter that asks for
    `num_generated` tokens; "" if the client sent none that does.
    """
    by = asked or "the answer, which is this endpoint's default"
    message = (
        f"{CONTEXT_LIMIT} {limit} tokens. However, you requested {num_prompt + num_generated} "
        f"tokens ({num_prompt} in {named}, {num_generated} in {by}): shorten {named}, or "
        f"{'lower' if asked else 'send a lower'} {asked or 'max_tokens'}"
    )
    return ApiError(message, param=asked or named, code=TOO_LONG)
