"""What the OpenAPI document says of Responses: requests, items, and the answers.

Names and ranges come from where they are checked. What depends on two items, on the model or on its
template is in words. Called by `router.http.openapi.document`.
"""

from typing import Any

from pdserve.router.http.responses.requests import (
    INCLUDES,
    MAX_KEY_CHARS,
    MAX_METADATA,
    MAX_VALUE_CHARS,
    VERBOSITIES,
)
from pdserve.router.request.prompts import MAX_MESSAGES
from pdserve.turns.tool_checks import MAX_TOOLS, NAME
from pdserve.turns.turn import MAX_BUDGET

Json = dict[str, Any]

_STRING: Json = {"type": "string"}
_SOME: Json = {"type": "string", "minLength": 1}
_NULL: Json = {"type": "null"}
_TEXT_OR_NULL: Json = {"type": ["string", "null"]}
_INTEGER: Json = {"type": "integer"}


def responses_limits() -> dict[str, Json]:
    """What a value of a request must be, besides its type."""
    items = {"type": "array", "items": _item(), "minItems": 1, "maxItems": MAX_MESSAGES}
    return {
        "input": {"anyOf": [_STRING, items]},
        "include": {"items": {"enum": list(INCLUDES)}},
        "tools": {"maxItems": MAX_TOOLS, "items": _tool()},
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required", None]}, *_choices()]},
        "parallel_tool_calls": {"description": "false: at most one call in an answer."},
        "metadata": {
            "maxProperties": MAX_METADATA,
            "propertyNames": {"maxLength": MAX_KEY_CHARS},
            "additionalProperties": _STRING | {"maxLength": MAX_VALUE_CHARS},
        },
        "thinking_token_budget": {"minimum": 0, "maximum": MAX_BUDGET},
        "include_reasoning": {"description": "false: the answer leaves the reasoning out."},
    }


def text_options(schema: Json) -> Json:
    """The schema of `text`, with what its members must be."""
    form = _object(type={"const": "json_schema"}, name=_STRING)
    form["properties"] |= {
        "schema": {"type": ["object", "string", "boolean"]},
        "strict": {"type": ["boolean", "null"]},
        "description": _TEXT_OR_NULL,
    }
    form["required"].append("schema")
    plain = _object(type={"enum": ["text", "json_object"]})
    members = {
        "format": {"anyOf": [plain, form, _NULL]},
        "verbosity": {"enum": [*VERBOSITIES, None]},
    }
    return schema | {"properties": schema["properties"] | members}


def responses_answers() -> dict[str, Json]:
    """The answers, by their names among the schemas, in as much as clients rely on them."""
    text = _object(type={"const": "output_text"}, text=_STRING, annotations={"type": "array"})
    thought = _object(type={"const": "reasoning_text"}, text=_STRING)
    status = {"enum": ["completed", "incomplete"]}
    head: Json = {"id": _STRING, "status": status}
    kinds = [
        _object(type={"const": "message"}, content=_list(text), **head),
        _object(type={"const": "reasoning"}, content=_list(thought), **head),
        _object(
            type={"const": "function_call"},
            call_id=_STRING,
            name=_STRING,
            arguments=_STRING,
            **head,
        ),
    ]
    usage = _object(input_tokens=_INTEGER, output_tokens=_INTEGER, total_tokens=_INTEGER)
    response = _object(
        id=_STRING,
        object={"const": "response"},
        created_at=_INTEGER,
        model=_STRING,
        status=status,
        output=_list({"anyOf": kinds}),
        usage=usage,
        store={"const": False},
    )
    counted = _object(object={"const": "response.input_tokens"}, input_tokens=_INTEGER)
    return {"Response": response, "InputTokens": counted}


def _item() -> Json:
    """Further members are ignored."""
    parts = _list(
        {
            "anyOf": [
                _object(type={"enum": ["input_text", "output_text", "text"]}, text=_STRING),
                _object(type={"const": "refusal"}, refusal=_STRING),
            ]
        }
    )
    content = {"anyOf": [_STRING, parts]}
    message = _object(role=_SOME | {"not": {"enum": ["tool", "function"]}}, content=content)
    message["properties"]["type"] = {"enum": ["message", None]}
    call = _object(type={"const": "function_call"}, call_id=_SOME, name=_SOME)
    call["properties"]["arguments"] = {
        "type": ["string", "object", "null"],
        "description": "A JSON object, or its text.",
    }
    output = _object(type={"const": "function_call_output"}, call_id=_SOME, output=content)
    reasoning = _object(type={"const": "reasoning"})
    thoughts = {"anyOf": [_list(_object(text=_STRING)), _NULL]}
    reasoning["properties"] |= {"content": thoughts, "summary": thoughts}
    return {"anyOf": [message, call, output, reasoning]}


def _tool() -> Json:
    tool = _object(type={"const": "function"}, name=_STRING | {"pattern": f"^{NAME}$"})
    tool["properties"] |= {
        "description": _TEXT_OR_NULL,
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    }
    return tool


def _choices() -> list[Json]:
    named = _object(type={"const": "function"}, name=_STRING)
    allowed = _object(
        type={"const": "allowed_tools"},
        mode={"enum": ["auto", "required"]},
        tools=_list(named) | {"minItems": 1},
    )
    return [named, allowed]


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}
