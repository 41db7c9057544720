"""Makes the response object: what the request asked for, around the output items.

The parts that stay the same while an answer is generated are encoded once, because a stream shows
the object three times. Knows no stream. Made by `router.http.responses.responder`.
"""

from collections.abc import Sequence
from typing import Any

from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import ApiError
from pdserve.router.http.json_pieces import Json, json_bytes
from pdserve.router.http.responses.requests import ResponsesRequest


class Envelope:
    """The response object of one answer.

    `response_id` is its id, and `created_at` is in seconds since 1970. `defaults` are the model's
    sampling parameters, for what the request leaves open.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        response_id: str,
        created_at: int,
        defaults: SamplingParams,
    ) -> None:
        head = {"id": response_id, "object": "response", "created_at": created_at}
        self._head = json_bytes(head)[:-1] + b","
        self._echo = b"]," + json_bytes(_echo(request, defaults))[1:-1]

    @property
    def num_bytes(self) -> int:
        return len(self._head) + len(self._echo)

    def pieces(
        self,
        status: str,
        items: Sequence[bytes] = (),
        *,
        usage: Json | None = None,
        incomplete: str | None = None,
        error: Json | None = None,
        completed_at: int | None = None,
        extra: Json | None = None,
    ) -> list[bytes]:
        """Makes the object as JSON.

        `items` are the output items as JSON. `incomplete` says why the answer is not complete.
        `extra` holds further members.
        """
        state: Json = {
            "status": status,
            "completed_at": completed_at,
            "error": error,
            "incomplete_details": None if incomplete is None else {"reason": incomplete},
            "usage": usage,
        }
        pieces = [self._head, json_bytes(state)[1:-1], b',"output":[']
        for number, item in enumerate(items):
            pieces += [b",", item] if number else [item]
        pieces.append(self._echo)
        if extra:
            pieces += [b",", json_bytes(extra)[1:-1]]
        return [*pieces, b"}"]


def failure(error: ApiError) -> Json:
    """Makes the member `error` of a response that failed."""
    code = "server_error"
    if error.status == 429:
        code = "rate_limit_exceeded"
    elif error.status == 400:
        code = "invalid_prompt"
    return {"code": code, "message": error.message}


def _echo(request: ResponsesRequest, defaults: SamplingParams) -> Json:
    """Repeats what the request asked for, and fills in what it left open."""
    reasoning = request.reasoning
    text = request.text
    given_format = text.format if text is not None else None
    effort = reasoning.effort if reasoning is not None else None
    summary = (reasoning.summary or reasoning.generate_summary) if reasoning is not None else None
    return {
        "model": request.model,
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": summary},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": _or(request.temperature, defaults.temperature),
        "text": {
            "format": {"type": "text"} if given_format is None else given_format,
            "verbosity": (text.verbosity if text is not None else None) or "medium",
        },
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": [_tool(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": _or(request.top_p, defaults.top_p),
        "truncation": "disabled",
        "user": request.user,
    }


def _or(given: float | None, default: float) -> float:
    return default if given is None else given


def _tool(tool: dict[str, Any]) -> Json:
    return {"description": None, "parameters": None, "strict": False} | tool
