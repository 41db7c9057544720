"""Describes the paths of the server, and what each takes and answers.

Called by `router.http.openapi.document`.
"""

from pdserve.router.http.openapi.schemas import STRING, Json, ref
from pdserve.router.request.request_checks import MAX_SESSION_CHARS

_ERRORS = {
    "400": "A value is wrong: `param` names the field, `message` the cure.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The content type of the body is not JSON.",
    "429": "There is too much to do: try again after Retry-After seconds.",
    "500": "The server failed.",
    "503": "No worker is there: try again after Retry-After seconds.",
}
# paths and methods of a stored response; there are none, so all of them answer 404
_STORED = {"": ("get", "delete"), "/input_items": ("get",), "/cancel": ("post",)}
_HEALTH: Json = {
    "responses": {
        "200": {"description": "Requests can be answered."},
        "503": {"description": "No worker that could finish a request is there."},
    }
}
_HEADERS = {"401": "WWW-Authenticate", "429": "Retry-After", "503": "Retry-After"}

# headers of requests to generate; the first one belongs to all requests
_HEADERS_SENT: list[Json] = [
    {
        "name": "x-request-id",
        "in": "header",
        "schema": STRING | {"pattern": "^[!-~]{1,256}$"},
    },
    {"name": "x-pdserve-timeline", "in": "header", "schema": STRING | {"enum": ["0", "1"]}},
    {
        "name": "x-session-id",
        "in": "header",
        "description": ("Requests of one session go to one worker, if nothing speaks against it."),
        "schema": STRING | {"maxLength": MAX_SESSION_CHARS},
    },
]


def paths_of(security: Json, metrics_security: Json) -> Json:
    """Returns every path with its methods.

    `security` is for paths that need a key, `metrics_security` for /metrics.
    """
    unauthorised = ("401",) if security else ()
    posts = ("400", *unauthorised, "404", "408", "413", "415", "429", "500", "503")
    name: Json = {"name": "name", "in": "path", "required": True, "schema": STRING}
    page: Json = {
        "description": "Prometheus text format.",
        "content": {"text/plain": {"schema": STRING}},
    }
    document: Json = {
        "description": "This document.",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
    return {
        "/v1/completions": {"post": security | _post("CompletionRequest", "Completion", posts)},
        "/v1/chat/completions": {"post": security | _post("ChatRequest", "ChatCompletion", posts)},
        "/v1/responses": {
            "post": security
            | _post("ResponsesRequest", "Response", posts, "the event with the whole answer")
        },
        "/v1/responses/input_tokens": {
            "post": security | _post("ResponsesRequest", "InputTokens", posts, None)
        },
        **{
            f"/v1/responses/{{name}}{path}": {
                method: security | {"parameters": [name]} | _errors((*unauthorised, "404", "405"))
                for method in methods
            }
            for path, methods in _STORED.items()
        },
        "/v1/embeddings": {"post": security | _post("EmbeddingRequest", "Embeddings", posts, None)},
        "/v1/messages": {
            "post": security
            | _post("MessagesRequest", "Message", posts, "message_stop", "MessageError")
        },
        "/v1/messages/count_tokens": {
            "post": security | _post("CountRequest", "TokenCount", posts, None, "MessageError")
        },
        "/v1/models": {"get": security | _get(_body("ModelList", "The models."), unauthorised)},
        "/v1/models/{name}": {
            "get": security
            | {"parameters": [name]}
            | _get(_body("Model", "The model."), (*unauthorised, "404", "405"))
        },
        "/tokenize": {
            "post": security | _post("TokenizeRequest", "Tokens", posts, None),
        },
        "/detokenize": {"post": security | _post("DetokenizeRequest", "Text", posts, None)},
        "/tokenizer_info": {
            "get": security | _get(_body("TokenizerInfo", "The tokenizer."), unauthorised)
        },
        "/health": {"get": _HEALTH},
        "/ping": {"get": _HEALTH, "post": _HEALTH},
        "/version": {"get": _get(_body("Version", "The server's version."), ())},
        "/load": {
            "get": security
            | _get(
                _body("Load", "The number of prompts that the router is answering."), unauthorised
            )
        },
        "/live": {"get": _get({"description": "The router answers."}, ())},
        "/ready": {
            "get": {
                "responses": {
                    "200": _body("Readiness", "Workers of all roles are there."),
                    "503": _body("Readiness", "What is missing."),
                }
            }
        },
        "/metrics": {"get": metrics_security | _get(page, ("401",) if metrics_security else ())},
        "/openapi.json": {"get": _get(document, ())},
    }


def _post(
    request: str,
    answer: str,
    errors: tuple[str, ...],
    last: str | None = "[DONE]",
    error: str = "Error",
) -> Json:
    """Describes a POST.

    `last` is the last event of a stream; None: it cannot be streamed. `error` is the form of its
    errors.
    """
    streamed = f"; with stream: true, server-sent events, the last of which is {last}"
    success = _body(answer, f"The answer{streamed if last else ''}.")
    if last:
        success["content"]["text/event-stream"] = {}
    return {
        "parameters": _HEADERS_SENT if last else _HEADERS_SENT[:1],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": ref(request)}},
        },
        "responses": {"200": success} | {status: _error(status, error) for status in errors},
    }


def _get(success: Json, errors: tuple[str, ...]) -> Json:
    return {"responses": {"200": success} | _errors(errors)["responses"]}


def _errors(statuses: tuple[str, ...]) -> Json:
    return {"responses": {status: _error(status) for status in statuses}}


def _error(status: str, form: str = "Error") -> Json:
    error = _body(form, _ERRORS.get(status, "This path does not have this method."))
    name = _HEADERS.get(status)
    return error | (
        {} if name is None else {"headers": {name: {"schema": STRING, "required": True}}}
    )


def _body(name: str, description: str) -> Json:
    return {"description": description, "content": {"application/json": {"schema": ref(name)}}}
