"""Describes /v1/messages and /v1/messages/count_tokens for the OpenAPI document.

Names and ranges come from the code that checks them. What depends on two messages, on the model or
on its template is described in words. Called by `router.http.openapi.document`.
"""

from pdserve.protocol.sampling_params import MAX_STOP_CHARS, MAX_STOPS
from pdserve.router.http.messages.conversation import BLOCK_IGNORED, BLOCK_KEYS, BLOCKS
from pdserve.router.http.messages.requests import DISPLAYS, EFFORTS
from pdserve.router.http.messages.tools import CHOICES, TOOL_IGNORED, TOOL_NEUTRAL
from pdserve.router.http.openapi.schemas import INTEGER, NULL, STRING, Json, list_of, object_of
from pdserve.router.request.prompts import MAX_MESSAGES
from pdserve.turns.tool_checks import MAX_TOOLS, NAME
from pdserve.turns.turn import MAX_BUDGET

_NAME: Json = {"type": "string", "minLength": 1}
_BOOL: Json = {"type": ["boolean", "null"]}


def message_limits() -> dict[str, Json]:
    """Returns the limits of these requests' values, besides their types."""
    texts = {"anyOf": [STRING, list_of(_block("text"))]}
    stop = STRING | {"minLength": 1, "maxLength": MAX_STOP_CHARS}
    return {
        "messages": {"minItems": 1, "maxItems": MAX_MESSAGES, "items": _message()},
        "system": {"anyOf": [*texts["anyOf"], NULL]},
        "tools": {"maxItems": MAX_TOOLS, "items": _tool()},
        "tool_choice": {"anyOf": _choices()},
        "thinking": {"anyOf": _thinking()},
        "output_config": {"anyOf": [_output_config(), NULL]},
        "output_format": {"anyOf": [_format(), NULL]}
        | {"description": "The same as output_config.format, by its older name."},
        "stop_sequences": {"items": stop, "maxItems": MAX_STOPS},
    }


def count_limits() -> dict[str, Json]:
    """Returns the same for a request to count tokens, whose answer cannot be streamed."""
    return message_limits() | {"stream": {"anyOf": [{"enum": [False, None]}]}}


def message_answers() -> dict[str, Json]:
    """Returns the answers and errors, by their names among the schemas."""
    text = object_of(type={"const": "text"}, text=STRING)
    thinking = object_of(type={"const": "thinking"}, thinking=STRING, signature=STRING)
    call = object_of(type={"const": "tool_use"}, id=_NAME, name=_NAME, input={"type": "object"})
    reasons = ("end_turn", "max_tokens", "stop_sequence", "tool_use")
    usage = object_of(
        input_tokens=INTEGER,
        output_tokens=INTEGER,
        cache_creation_input_tokens={"const": 0},
        cache_read_input_tokens=INTEGER,
    )
    message = object_of(
        id=STRING,
        type={"const": "message"},
        role={"const": "assistant"},
        model=STRING,
        content=list_of({"anyOf": [text, thinking, call]}),
        stop_reason={"enum": [*reasons, "model_context_window_exceeded"]},
        stop_sequence={"type": ["string", "null"]},
        usage=usage,
    )
    error = object_of(type=STRING, message=STRING)
    return {
        "Message": message,
        "TokenCount": object_of(input_tokens=INTEGER),
        "MessageError": object_of(type={"const": "error"}, error=error, request_id=STRING),
    }


def _message() -> Json:
    return {
        "anyOf": [
            _closed(
                {
                    "role": {"const": role},
                    "content": {
                        "anyOf": [STRING, list_of({"anyOf": [_block(kind) for kind in kinds]})]
                    },
                },
                "role",
                "content",
            )
            for role, kinds in BLOCKS.items()
        ]
    }


def _block(kind: str) -> Json:
    texts = list_of(_block("text")) if kind == "tool_result" else {}
    checked: dict[str, dict[str, Json]] = {
        "text": {"text": STRING},
        "thinking": {"thinking": STRING},
        "redacted_thinking": {},
        "tool_use": {"id": _NAME, "name": _NAME, "input": {"type": "object"}},
        "tool_result": {
            "tool_use_id": _NAME,
            "content": {"anyOf": [STRING, NULL, texts]},
            "is_error": _BOOL,
        },
    }
    own = checked[kind]
    required = [name for name in own if name not in ("content", "is_error")]
    ignored: dict[str, Json] = {name: {} for name in (*BLOCK_IGNORED, *BLOCK_KEYS[kind])}
    return _closed(ignored | own | {"type": {"const": kind}}, "type", *required)


def _tool() -> Json:
    ignored: dict[str, Json] = {name: {} for name in TOOL_IGNORED}
    neutral: dict[str, Json] = {n: {"enum": [v, None]} for n, (v, _) in TOOL_NEUTRAL.items()}
    own: dict[str, Json] = {
        "type": {"enum": ["custom", None]},
        "name": STRING | {"pattern": f"^{NAME}$"},
        "description": {"type": ["string", "null"]},
        "input_schema": {"type": "object"},
        "strict": _BOOL,
    }
    return _closed(ignored | neutral | own, "name", "input_schema")


def _choices() -> list[Json]:
    plain = [name for name in CHOICES if name != "tool"]
    single = {"disable_parallel_tool_use": _BOOL}
    return [
        NULL,
        _closed({"type": {"enum": plain}} | single, "type"),
        _closed({"type": {"const": "tool"}, "name": _NAME} | single, "type", "name"),
    ]


def _thinking() -> list[Json]:
    display: Json = {"display": {"enum": [*DISPLAYS, None]}}
    budget = INTEGER | {"minimum": 1, "maximum": MAX_BUDGET}
    enabled = {"type": {"const": "enabled"}, "budget_tokens": budget}
    return [
        NULL,
        _closed(enabled | display, "type", "budget_tokens"),
        _closed({"type": {"const": "adaptive"}} | display, "type"),
        _closed({"type": {"const": "disabled"}}, "type"),
    ]


def _output_config() -> Json:
    effort: Json = {"enum": [*EFFORTS, None]}
    return _closed({"effort": effort, "format": {"anyOf": [_format(), NULL]}})


def _format() -> Json:
    schema: Json = {"type": ["object", "string", "boolean"]}
    return _closed({"type": {"const": "json_schema"}, "schema": schema}, "type", "schema")


def _closed(properties: dict[str, Json], *required: str) -> Json:
    """Describes an object with these members; others must be null, the same as not given."""
    found: Json = {"type": "object", "properties": properties, "additionalProperties": NULL}
    return found | ({"required": list(required)} if required else {})
