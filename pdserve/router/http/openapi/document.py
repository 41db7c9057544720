"""Describes the server in OpenAPI 3.1 for GET /openapi.json: what it takes, within which limits,
and how it answers.

Fields come from the request types of each dialect, and ranges from the code that checks them, so
neither can be forgotten here. Some rules about two fields are schemas too (RULES_OF_TWO). Others
(min_tokens <= max_tokens) and what depends on the workers (context length) are described in words.
Called by `router.http.pages`.
"""

from collections.abc import Mapping, Sequence

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
from pdserve.router.http.embeddings.openapi import embedding_answers, embedding_limits
from pdserve.router.http.embeddings.requests import EmbeddingRequest
from pdserve.router.http.messages.openapi import count_limits, message_answers, message_limits
from pdserve.router.http.messages.requests import CountRequest, MessagesRequest
from pdserve.router.http.openai.openapi_chat import chat_limits
from pdserve.router.http.openai.requests import ChatRequest, CompletionRequest
from pdserve.router.http.openapi.answers import openai_answers
from pdserve.router.http.openapi.forms import answer_forms, needs
from pdserve.router.http.openapi.paths import paths_of
from pdserve.router.http.openapi.schemas import INTEGER, NULL, REF, STRING, TOKEN_IDS, Json
from pdserve.router.http.request_form import RequestForm
from pdserve.router.http.responses.openapi import (
    responses_limits,
    text_options,
)
from pdserve.router.http.responses.requests import LOGPROBS, ResponsesRequest
from pdserve.router.http.tokenizing.openapi import tokenizing_answers, tokenizing_limits
from pdserve.router.request.request_checks import MAX_PRIORITY, MAX_SALT_CHARS

_STREAM = needs("stream_options", "stream", {"const": True})
RULES_OF_TWO: dict[type[RequestForm], list[Json]] = {
    CompletionRequest: [_STREAM],
    ResponsesRequest: [
        _STREAM,
        needs("top_logprobs", "include", {"type": "array", "contains": {"const": LOGPROBS}}, 0),
    ],
    ChatRequest: [
        _STREAM,
        needs("top_logprobs", "logprobs", {"const": True}, 0),
        needs("tool_choice", "tools", {"type": "array", "minItems": 1}, "none"),
    ],
}


def openapi_document(config: RouterConfig, model_names: Sequence[str], needs_key: bool) -> Json:
    """Returns the whole document, ready for JSON."""
    own: dict[type[RequestForm], dict[str, Json]] = {
        CompletionRequest: {"max_tokens": _range(0, 1 << 31)},
        ChatRequest: chat_limits(),
        ResponsesRequest: responses_limits(),
        MessagesRequest: message_limits(),
        CountRequest: count_limits(),
        EmbeddingRequest: embedding_limits(_prompts()),
        **tokenizing_limits(),
    }
    _, schemas = msgspec.json.schema_components(list(own), ref_template=REF)
    limits = _limits(config, model_names)
    for kind, narrower in own.items():
        schema = schemas[kind.__name__]
        schema["description"] = " ".join(schema["description"].split())
        schema["properties"] = _properties(kind, schema["properties"], limits | narrower)
        schema["additionalProperties"] = False
        if rules := RULES_OF_TWO.get(kind):
            schema["allOf"] = rules
    schemas["TextOptions"] = text_options(schemas["TextOptions"])
    schemas |= openai_answers() | message_answers() | tokenizing_answers() | embedding_answers()
    security: Json = {"security": [{"key": []}]} if needs_key else {}
    schemes: Json = (
        {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if needs_key else {}
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": pdserve.__version__},
        **({"servers": [{"url": config.root_path}]} if config.root_path else {}),
        "paths": paths_of(security, security if config.metrics_need_key else {}),
        "components": {"schemas": schemas} | schemes,
    }


def _limits(config: RouterConfig, model_names: Sequence[str]) -> dict[str, Json]:
    """Returns the limits of values, besides their types, as far as a schema can express them."""
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
            "description": "Cached prefixes are shared only between equal salts.",
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
        **answer_forms(),
        "stop_token_ids": {"items": INTEGER | {"minimum": 0}, "maxItems": MAX_STOP_TOKEN_IDS},
        "prompt": {"anyOf": _prompts()},
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
    """Returns msgspec's own properties with their limits, and those taken only for compatibility.

    Null is the same as not given.
    """
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
