"""Errors as an OpenAI client expects them, and the reasons a request ends without an answer.

Knows no HTTP framework. Raised by parsing, admission and requests' runs;
`router.http.endpoints` and `router.http.answers` turn them into responses or stream events.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

FailureKind = Literal["invalid", "unavailable", "internal"]

INVALID_GRAMMAR = "invalid_grammar"  # the code of errors about an answer's form

TOO_LONG = "context_length_exceeded"  # the code of errors about a length
# OpenAI's words, by which clients know such errors; litellm's ContextWindowExceededError does
CONTEXT_LIMIT = "This model's maximum context length is"

LONGEST_MESSAGE = 2000
LONGEST_PARAM = 200

STATUS: dict[str, tuple[int, str, str | None]] = {
    "invalid": (400, "invalid_request_error", None),
    "unavailable": (503, "service_unavailable_error", "no_workers"),
    "internal": (500, "internal_error", None),
}


class ApiError(Exception):
    """An answer in OpenAI's error form. param: the request's parameter at fault. retry_after:
    seconds, for 429 and 503. allow: methods, for 405. figures: what it was decided by, for the log
    alone."""

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
        # it repeats something that was sent, which may be megabytes
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
        self.logged = False  # whether the prompt that it ended has its line in the log

    @property
    def reason(self) -> str:
        """A label for metrics; of a small set, whatever clients send."""
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
    """A request that was admitted, or ready to be, and got no complete answer."""

    def __init__(self, failure: FailureKind, message: str) -> None:
        status, kind, code = STATUS[failure]
        super().__init__(
            message, status=status, kind=kind, code=code, retry_after=1 if status == 503 else None
        )
        self.failure = failure


def internal_error() -> ApiError:
    """What the client is told of an error that only the log explains."""
    return ApiError("the server failed; its log says why", status=500, kind="internal_error")


def grammar_error(error: ValueError) -> ApiError:
    """An ApiError (400) for a ValueError of `text.grammars`, whose message begins with the field,
    as in response_format.json_schema.schema."""
    found = re.match(r"[A-Za-z_][\w.\[\]]*", str(error))
    return ApiError(str(error), param=found[0] if found else None, code=INVALID_GRAMMAR)


def value_error(error: ValueError, names: Iterable[str]) -> ApiError:
    """An ApiError for a ValueError whose message begins with the parameter's name, as all of ours
    do."""
    words = str(error).split()
    first = words[0].rstrip(":,") if words else ""
    return ApiError(str(error), param=first if first in set(names) else None)


def prompt_length_error(
    limit: int, num_prompt: int, named: str, about: str = "", least_answer: int = 1
) -> ApiError:
    """ApiError (400) for a prompt that leaves no room for an answer. named: where it stands in the
    request. about: stands before its length in the message. least_answer: tokens of an answer that
    must fit after it."""
    answer = f", and the answer needs at least {least_answer}" if least_answer else ""
    message = (
        f"{CONTEXT_LIMIT} {limit} tokens. However, you requested {about}{num_prompt} tokens in "
        f"{named}{answer}: shorten {named}"
    )
    return ApiError(message, param=named, code=TOO_LONG)


def room_error(limit: int, num_prompt: int, num_generated: int, named: str, asked: str) -> ApiError:
    """ApiError (400) for a prompt and an answer that do not fit together. named: where the prompt
    stands in the request. asked: what asks for that many generated tokens; "": nothing that the
    client sent."""
    by = asked or "the answer, which is this endpoint's default"
    message = (
        f"{CONTEXT_LIMIT} {limit} tokens. However, you requested {num_prompt + num_generated} "
        f"tokens ({num_prompt} in {named}, {num_generated} in {by}): shorten {named}, or "
        f"{'lower' if asked else 'send a lower'} {asked or 'max_tokens'}"
    )
    return ApiError(message, param=asked or named, code=TOO_LONG)
