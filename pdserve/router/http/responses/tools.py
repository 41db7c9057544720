"""Turns tools of a Responses request, which are flat objects, into the form of chat completions.

Checks what is this API's own form. `turns.tool_checks` checks names and schemas, and whether a tool
exists. ValueErrors begin with the field as the client wrote it. Called by
`router.http.responses.requests`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]

_FORM = "{'type': 'function', 'name': ..., 'parameters': {...}}"
_CHOICES = (
    "tool_choice must be 'none', 'auto', 'required', {'type': 'function', 'name': ...} or "
    "{'type': 'allowed_tools', 'mode': 'auto' or 'required', 'tools': [...]}"
)
# members of a tool that a chat template is shown
_SHOWN = ("name", "description", "parameters", "strict")


def chat_tools(tools: Sequence[Any]) -> list[Json]:
    """Returns the tools, in order."""
    return [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _chat_tool(tool: Any, place: str) -> Json:
    if not isinstance(tool, Mapping):
        raise ValueError(f"{place} must be {_FORM}, not {tool!r:.80}")
    kind = tool.get("type")
    if kind != "function":
        raise ValueError(
            f"{place}.type must be 'function', not {kind!r:.80}: this server runs no tools of its "
            "own: send a function, and answer its calls with function_call_output"
        )
    if "function" in tool:
        raise ValueError(
            f"{place} has the form of chat completions: send {_FORM}, with the name beside the type"
        )
    shown = {name: tool[name] for name in _SHOWN if tool.get(name) is not None}
    return {"type": "function", "function": shown}


def chat_choice(choice: Any, tools: Sequence[Json]) -> Any:
    """Returns tool_choice in the form of chat completions. `tools` come from `chat_tools`."""
    if choice is None or (choice == "auto" and not tools):  # OpenAI's clients send it always
        return None
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise ValueError(f"{_CHOICES}, not {choice!r:.80}")
        return choice
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function" and isinstance(choice.get("name"), str):
        return _named(choice["name"])
    if kind == "allowed_tools":
        mode, names = _allowed(choice)
        known = {tool["function"].get("name") for tool in tools}
        for number, name in enumerate(names):
            if name not in known:
                raise ValueError(
                    f"tool_choice.tools[{number}].name {name!r:.80} is not among tools: send it "
                    "there too"
                )
        allowed = {"mode": mode, "tools": [_named(name) for name in names]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    raise ValueError(f"{_CHOICES}, not {choice!r:.80}")


def _named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


def _allowed(choice: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Returns the mode, and the names of the functions."""
    mode = choice.get("mode")
    if mode not in ("auto", "required"):
        raise ValueError(f"tool_choice.mode must be 'auto' or 'required', not {mode!r:.80}")
    given = choice.get("tools")
    if not isinstance(given, list) or not given:
        raise ValueError("tool_choice.tools must be a list of at least one of the tools")
    names = []
    for number, tool in enumerate(given):
        name = tool.get("name") if isinstance(tool, Mapping) else None
        if not isinstance(name, str) or tool.get("type") != "function":
            raise ValueError(
                f"tool_choice.tools[{number}] must be {{'type': 'function', 'name': ...}}, not "
                f"{tool!r:.80}"
            )
        names.append(name)
    return mode, names
