"""Describes Responses for the OpenAPI document: requests, items, and the answers.

Names and ranges come from the code that checks them. What depends on two items, on the model or on
its template is described in words. Called by `router.http.openapi.document`.
"""

from pdserve.router.http.openapi.forms import plain_formats
from pdserve.router.http.openapi.schemas import (
    INTEGER,
    NULL,
    STRING,
    Json,
    closed,
    list_of,
    object_of,
)
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

_SOME: Json = {"type": "string", "minLength": 1}
_TEXT_OR_NULL: Json = {"type": ["string", "null"]}


def responses_limits() -> dict[str, Json]:
    """Returns the limits of a request's values, besides their types."""
    items = {"type": "array", "items": _item(), "minItems": 1, "maxItems": MAX_MESSAGES}
    return {
        "input": {"anyOf": [STRING, items]},
        "include": {"items": {"enum": list(INCLUDES)}},
        "tools": {"maxItems": MAX_TOOLS, "items": _tool()},
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required", None]}, *_choices()]},
        "parallel_tool_calls": {"description": "false: at most one call in an answer."},
        "metadata": {
            "maxProperties": MAX_METADATA,
            "propertyNames": {"maxLength": MAX_KEY_CHARS},
            "additionalProperties": STRING | {"maxLength": MAX_VALUE_CHARS},
        },
        "thinking_token_budget": {"minimum": 0, "maximum": MAX_BUDGET},
        "include_reasoning": {"description": "false: the answer leaves the reasoning out."},
    }


def text_options(schema: Json) -> Json:
    """Returns the schema of `text`, with the limits of its members."""
    form = object_of(type={"const": "json_schema"}, name=STRING)
    form["properties"] |= {
        "schema": {"type": ["object", "string", "boolean"]},
        "strict": {"type": ["boolean", "null"]},
        "description": _TEXT_OR_NULL,
    }
    form["required"].append("schema")
    members = {
        "format": {"anyOf": [*plain_formats(), closed(form), NULL]},
        "verbosity": {"enum": [*VERBOSITIES, None]},
    }
    return schema | {"properties": schema["properties"] | members}


def responses_answers() -> dict[str, Json]:
    """Returns the answers, by their names among the schemas, as far as clients rely on them."""
    text = object_of(type={"const": "output_text"}, text=STRING, annotations={"type": "array"})
    thought = object_of(type={"const": "reasoning_text"}, text=STRING)
    status = {"enum": ["completed", "incomplete"]}
    head: Json = {"id": STRING, "status": status}
    kinds = [
        object_of(type={"const": "message"}, content=list_of(text), **head),
        object_of(type={"const": "reasoning"}, content=list_of(thought), **head),
        object_of(
            type={"const": "function_call"},
            call_id=STRING,
            name=STRING,
            arguments=STRING,
            **head,
        ),
    ]
    usage = object_of(input_tokens=INTEGER, output_tokens=INTEGER, total_tokens=INTEGER)
    response = object_of(
        id=STRING,
        object={"const": "response"},
        created_at=INTEGER,
        model=STRING,
        status=status,
        output=list_of({"anyOf": kinds}),
        usage=usage,
        store={"const": False},
    )
    counted = object_of(object={"const": "response.input_tokens"}, input_tokens=INTEGER)
    return {"Response": response, "InputTokens": counted}


def _item() -> Json:
    """Describes an item; further members are ignored."""
    parts = list_of(
        {
            "anyOf": [
                object_of(type={"enum": ["input_text", "output_text", "text"]}, text=STRING),
                object_of(type={"const": "refusal"}, refusal=STRING),
            ]
        }
    )
    content = {"anyOf": [STRING, parts]}
    message = object_of(role=_SOME | {"not": {"enum": ["tool", "function"]}}, content=content)
    message["properties"]["type"] = {"enum": ["message", None]}
    call = object_of(type={"const": "function_call"}, call_id=_SOME, name=_SOME)
    call["properties"]["arguments"] = {
        "type": ["string", "object", "null"],
        "description": "A JSON object, or its text.",
    }
    output = object_of(type={"const": "function_call_output"}, call_id=_SOME, output=content)
    reasoning = object_of(type={"const": "reasoning"})
    thoughts = {"anyOf": [list_of(object_of(text=STRING)), NULL]}
    reasoning["properties"] |= {"content": thoughts, "summary": thoughts}
    return {"anyOf": [message, call, output, reasoning]}


def _tool() -> Json:
    tool = object_of(type={"const": "function"}, name=STRING | {"pattern": f"^{NAME}$"})
    tool["properties"] |= {
        "description": _TEXT_OR_NULL,
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    }
    return tool


def _choices() -> list[Json]:
    named = object_of(type={"const": "function"}, name=STRING)
    allowed = object_of(
        type={"const": "allowed_tools"},
        mode={"enum": ["auto", "required"]},
        tools=list_of(named) | {"minItems": 1},
    )
    return [named, allowed]
