"""The server's description in OpenAPI 3.1: what is taken, within which limits, and how it answers;
GET /openapi.json.

Fields come from the request types of each dialect, ranges from where they are checked, so that
neither can be forgotten here. What depends on two fields (min_tokens <=
max_tokens) or on the workers (context length) is in words. Knows no workers. Called by
`router.http.app`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

import pdserve
from pdserve.configs.router import RouterConfig
from pdserve.protocol.logit_rules import RULES
from pdserve.protocol.sampling_params import (
    INTEGERS,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    NUMBERS,
)
from pdserve.router.grammars import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS
from pdserve.router.http.messages.openapi import count_limits, message_answers, message_limits
from pdserve.router.http.messages.requests import CountRequest, MessagesRequest
from pdserve.router.http.openai.openapi_chat import chat_answers, chat_limits
from pdserve.router.http.openai.requests import ChatRequest, CompletionRequest
from pdserve.router.http.request_form import RequestForm
from pdserve.router.http.responses.openapi import (
    responses_answers,
    responses_limits,
    text_options,
)
from pdserve.router.http.responses.requests import ResponsesRequest
from pdserve.router.http.tokenizing.openapi import tokenizing_answers, tokenizing_limits
from pdserve.router.request.request_checks import MAX_PRIORITY, MAX_SALT_CHARS, MAX_SESSION_CHARS

Json = dict[str, Any]

REF = "#/components/schemas/{name}"
NULL: Json = {"type": "null"}
STRING: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
TOKEN_IDS: Json = {"type": "array", "items": INTEGER}

_ERRORS = {
    "400": "A value is wrong: `param` names the field, `message` the cure.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The body is not said to be JSON.",
    "429": "There is too much to do: try again after Retry-After seconds.",
    "500": "The server failed.",
    "503": "No worker is there: try again after Retry-After seconds.",
}
# of a stored response, of which there are none: paths and methods
_STORED = {"": ("get", "delete"), "/input_items": ("get",), "/cancel": ("post",)}
_HEALTH: Json = {
    "responses": {
        "200": {"description": "Requests can be answered."},
        "503": {"description": "No worker is there that could finish a request."},
    }
}
_HEADERS = {"401": "WWW-Authenticate", "429": "Retry-After", "503": "Retry-After"}

# headers of what generates; the first of them of all
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
        "description": (
            "Requests of one session go to one worker, where nothing speaks against it."
        ),
        "schema": STRING | {"maxLength": MAX_SESSION_CHARS},
    },
]


def openapi_document(config: RouterConfig, model_names: Sequence[str], needs_key: bool) -> Json:
    """The whole document, JSON-ready."""
    own: dict[type[RequestForm], dict[str, Json]] = {
        CompletionRequest: {"max_tokens": _range(0, 1 << 31)},
        ChatRequest: chat_limits(),
        ResponsesRequest: responses_limits(),
        MessagesRequest: message_limits(),
        CountRequest: count_limits(),
        **tokenizing_limits(),
    }
    _, schemas = msgspec.json.schema_components(list(own), ref_template=REF)
    limits = _limits(config, model_names)
    for kind, narrower in own.items():
        schema = schemas[kind.__name__]
        schema["description"] = " ".join(schema["description"].split())
        schema["properties"] = _properties(kind, schema["properties"], limits | narrower)
        schema["additionalProperties"] = False
    schemas["TextOptions"] = text_options(schemas["TextOptions"])
    schemas |= _answers() | message_answers() | tokenizing_answers()
    security: Json = {"security": [{"key": []}]} if needs_key else {}
    schemes: Json = (
        {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if needs_key else {}
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": pdserve.__version__},
        **({"servers": [{"url": config.root_path}]} if config.root_path else {}),
        "paths": _paths(security, security if config.metrics_need_key else {}),
        "components": {"schemas": schemas} | schemes,
    }


def _paths(security: Json, metrics_security: Json) -> Json:
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
            | _post("ResponsesRequest", "Response", posts, "the event that has the whole answer")
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
        "/v1/messages": {
            "post": security
            | _post("MessagesRequest", "Message", posts, "message_stop", "MessageError")
        },
        "/v1/messages/count_tokens": {
            "post": security | _post("CountRequest", "TokenCount", posts, None, "MessageError")
        },
        "/v1/models": {"get": security | _get(_body("ModelList", "What is served."), unauthorised)},
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
        "/load": {"get": security | _get(_body("Load", "How busy it is."), unauthorised)},
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
    """last: the last event of a stream; None: it cannot be streamed. error: the form of errors."""
    streamed = f"; with stream: true, server-sent events, the last of which is {last}"
    success = _body(answer, f"The answer{streamed if last else ''}.")
    if last:
        success["content"]["text/event-stream"] = {}
    return {
        "parameters": _HEADERS_SENT if last else _HEADERS_SENT[:1],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(request)}},
        },
        "responses": {"200": success} | {status: _error(status, error) for status in errors},
    }


def _get(success: Json, errors: tuple[str, ...]) -> Json:
    return {"responses": {"200": success} | _errors(errors)["responses"]}


def _errors(statuses: tuple[str, ...]) -> Json:
    return {"responses": {status: _error(status) for status in statuses}}


def _error(status: str, form: str = "Error") -> Json:
    error = _body(form, _ERRORS.get(status, "Not so."))
    name = _HEADERS.get(status)
    return error | (
        {} if name is None else {"headers": {name: {"schema": STRING, "required": True}}}
    )


def _body(name: str, description: str) -> Json:
    return {"description": description, "content": {"application/json": {"schema": _ref(name)}}}


def _ref(name: str) -> Json:
    return {"$ref": REF.format(name=name)}


def _limits(config: RouterConfig, model_names: Sequence[str]) -> dict[str, Json]:
    """What a value must be, besides its type, as far as a schema can say it."""
    limits = {name: _range(low, high) for name, (low, high, _) in INTEGERS.items()}
    for name, (least, most, is_closed) in NUMBERS.items():
        limits[name] = {"minimum" if is_closed else "exclusiveMinimum": least, "maximum": most}
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        limits[name] = _range(0, config.max_logprobs)
    served = sorted(name for name, row in RULES.items() if not row.is_offline)
    text = {"minLength": 1, "maxLength": MAX_STOP_CHARS}
    return limits | {
        "model": {"enum": list(model_names)},
        "truncate_prompt_tokens": {
            "minimum": -1,
            "not": {"const": 0},
            "description": "The prompt is cut to its last tokens; -1: as many as fit.",
        },
        "n": _range(1, config.max_n),
        "best_of": _range(1, config.max_n),
        "max_completion_tokens": limits["max_tokens"],
        "max_output_tokens": limits["max_tokens"],
        "priority": _range(_lowest_priority(config), MAX_PRIORITY)
        | {"description": "The lowest runs first."},
        "cache_salt": {
            "maxLength": MAX_SALT_CHARS,
            "description": "Cached prefixes are shared between equal salts only.",
        },
        "logit_rules": {
            "propertyNames": {"enum": served},
            "properties": {name: RULES[name].schema or {} for name in served},
        },
        "logit_bias": {
            "maxProperties": MAX_LOGIT_BIAS,
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        "stop": {
            "anyOf": [
                STRING | text,
                {"type": "array", "items": STRING | text, "maxItems": MAX_STOPS},
            ]
        },
        **_forms(),
        "stop_token_ids": {"items": INTEGER | {"minimum": 0}, "maxItems": MAX_STOP_TOKEN_IDS},
        "prompt": {"anyOf": _prompts()},
    }


def _forms() -> dict[str, Json]:
    """What the answer must look like: the outer form of each field. What stands in it is checked
    when a grammar is made of it."""
    kinds = {"enum": ["text", "json_object", "json_schema", "structural_tag"]}
    schema = {"type": ["object", "string", "boolean"]}
    text = {"type": "string", "minLength": 1}
    texts = {"type": "array", "items": STRING, "minItems": 1}
    outputs: Json = {"json": schema, "regex": text, "choice": texts, "grammar": text}
    outputs |= {"json_object": {"type": "boolean"}, "structural_tag": {}, "whitespace_pattern": {}}
    fields = {
        "response_format": {
            "type": "object",
            "properties": {"type": kinds},
            "required": ["type"],
        },
        "structured_outputs": {"type": "object", "properties": outputs},
        "guided_json": schema,
        "guided_regex": text,
        "guided_choice": texts,
        "guided_grammar": text,
        "guided_whitespace_pattern": STRING,
    }
    words = {"items": STRING | {"minLength": 1, "maxLength": MAX_BAD_WORD_CHARS}}
    return {name: {"anyOf": [form, NULL]} for name, form in fields.items()} | {
        "bad_words": words | {"maxItems": MAX_BAD_WORDS},
        "allowed_token_ids": {"items": INTEGER | {"minimum": 0}},
    }


def _lowest_priority(config: RouterConfig) -> int:
    return -MAX_PRIORITY if config.min_priority is None else config.min_priority


def _prompts() -> list[Json]:
    ids = TOKEN_IDS | {"items": INTEGER | {"minimum": 0}, "minItems": 1}
    return [
        STRING,
        {"type": "array", "items": STRING, "minItems": 1},
        ids,
        {"type": "array", "items": ids, "minItems": 1},
    ]


def _range(low: int, high: int) -> Json:
    return {"minimum": low, "maximum": high}


def _properties(
    kind: type[RequestForm], found: Mapping[str, Json], limits: Mapping[str, Json]
) -> dict[str, Json]:
    """msgspec's own, bounded, and what is taken for compatibility alone. Null is the same as not
    given."""
    named = {name: _bounded(schema, limits.get(name, {})) for name, schema in found.items()}
    neutral = {
        name: {"enum": [*values, None]}
        for name, values in kind.neutral.items()
        if name not in found
    }
    ignored: dict[str, Json] = {
        name: {"description": "Taken and ignored."} for name in sorted(kind.ignored)
    }
    rules: dict[str, Json] = {
        row.field: {"anyOf": [dict(row.schema), NULL]} if row.schema else {}
        for row in RULES.values()
        if row.field and "logit_rules" in found
    }
    return ignored | neutral | named | rules


def _bounded(schema: Json, limit: Json) -> Json:
    schema = {
        name: value for name, value in schema.items() if name != "default" or value is not None
    }
    variants: list[Json] = schema.get("anyOf", [])
    if "anyOf" in limit:
        return {"anyOf": [*limit["anyOf"], *([NULL] if NULL in variants else [])]}
    if NULL in variants:
        return {"anyOf": [variant if variant == NULL else variant | limit for variant in variants]}
    return schema | limit


def _answers() -> dict[str, Json]:
    """What comes back, in as much as clients rely on it."""
    reason = {"enum": ["stop", "length", None]}
    chat_reason = {"enum": ["stop", "length", "tool_calls", None]}
    usage = _object(prompt_tokens=INTEGER, completion_tokens=INTEGER, total_tokens=INTEGER)
    head = {"id": STRING, "created": INTEGER, "model": STRING, "usage": usage}
    choice = _object(index=INTEGER, text=STRING, finish_reason=reason)
    message = _ref("ChatMessage")
    chat_choice = _object(index=INTEGER, message=message, finish_reason=chat_reason)
    text_or_null = {"type": ["string", "null"]}
    error = _object(message=STRING, type=STRING, param=text_or_null, code=text_or_null)
    return {
        **chat_answers(),
        **responses_answers(),
        "Completion": _object(object={"const": "text_completion"}, choices=_list(choice), **head),
        "ChatCompletion": _object(
            object={"const": "chat.completion"}, choices=_list(chat_choice), **head
        ),
        "Model": _object(
            id=STRING,
            object={"const": "model"},
            created=INTEGER,
            owned_by=STRING,
            root=STRING,
            parent=NULL,
            max_model_len={"type": ["integer", "null"]},
        ),
        "ModelList": _object(object={"const": "list"}, data=_list(_ref("Model"))),
        "Readiness": _object(
            ready={"type": "boolean"},
            prefill=INTEGER,
            decode=INTEGER,
            both=INTEGER,
            missing=_list(STRING),
        ),
        "Error": _object(error=error),
    }


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}
