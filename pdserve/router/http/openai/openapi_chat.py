"""Describes conversations, tools and the answers to them for the OpenAPI document.

Names and ranges come from the code that checks them. What depends on two messages, on the model or
on its template is described in words. Called by `router.http.openapi.document`.
"""

from pdserve.router.http.openapi.schemas import NULL, STRING, Json, list_of, object_of
from pdserve.router.request.prompts import MAX_MESSAGES
from pdserve.turns.tool_checks import MAX_TOOLS, NAME
from pdserve.turns.turn import MAX_BUDGET

_TEXT_OR_NULL: Json = {"type": ["string", "null"]}
# without surrogates, which no pattern of JSON Schema can name
_NAME = NAME.replace(r"\ud800-\udfff", "")
_OBJECT_OR_NULL: Json = {"type": ["object", "null"]}


def chat_limits() -> dict[str, Json]:
    """Returns the limits of a chat request's values, besides their types."""
    return {
        "messages": {"minItems": 1, "maxItems": MAX_MESSAGES, "items": _message()},
        "tools": {"maxItems": MAX_TOOLS, "items": _tool()},
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required", None]}, *_choices()]},
        "parallel_tool_calls": {"description": "false: at most one call in an answer."},
        "documents": {
            "items": {"type": "object", "minProperties": 1},
            "description": "For the model's chat template, where it shows documents.",
        },
        "reasoning_effort": {"description": "For the model's chat template, where it reads it."},
        "thinking_token_budget": {
            "minimum": 0,
            "maximum": MAX_BUDGET,
            "description": "Tokens after which reasoning is ended.",
        },
        "include_reasoning": {"description": "false: the answer leaves the reasoning out."},
    }


def chat_answers() -> dict[str, Json]:
    """Returns the message of an answer, by its name among the schemas."""
    function = object_of(name=STRING, arguments=STRING)
    call = object_of(id=STRING, type={"const": "function"}, function=function)
    message = object_of(role={"const": "assistant"}, content=_TEXT_OR_NULL)
    message["properties"] |= {
        "reasoning": STRING,
        "reasoning_content": STRING,
        "tool_calls": {"type": "array", "items": call, "minItems": 1},
    }
    return {"ChatMessage": message}


def _message() -> Json:
    """Describes a message of any role that the template knows; other members go to it as sent."""
    part = object_of(type={"const": "text"}, text=STRING)
    named = {
        name: _TEXT_OR_NULL for name in ("name", "tool_call_id", "reasoning", "reasoning_content")
    }
    content = {"anyOf": [STRING, NULL, {"type": "array", "items": part}]}
    call = object_of(function=_called())
    call["properties"] |= {"id": _TEXT_OR_NULL, "type": {"const": "function"}}
    calls = {"anyOf": [NULL, {"type": "array", "items": call}]}
    role = STRING | {"minLength": 1, "not": {"const": "function"}}
    return {
        "type": "object",
        "required": ["role"],
        "properties": named
        | {"role": role, "content": content, "tool_calls": calls, "function_call": NULL},
    }


def _called() -> Json:
    arguments = {"type": ["string", "object", "null"], "description": "A JSON object, or its text."}
    called = object_of(name=STRING | {"minLength": 1})
    called["properties"]["arguments"] = arguments
    return called


def _tool() -> Json:
    function = object_of(name=STRING | {"pattern": f"^{_NAME}$"})
    function["properties"] |= {
        "description": _TEXT_OR_NULL,
        "parameters": _OBJECT_OR_NULL,
        "strict": {"type": ["boolean", "null"]},
    }
    return object_of(type={"const": "function"}, function=function)


def _choices() -> list[Json]:
    named = object_of(type={"const": "function"}, function=object_of(name=STRING))
    allowed = object_of(mode={"enum": ["auto", "required"]}, tools=list_of(named) | {"minItems": 1})
    return [named, object_of(type={"const": "allowed_tools"}, allowed_tools=allowed)]
