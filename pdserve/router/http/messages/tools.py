"""Turns tools and tool_choice of Anthropic's Messages API into the form of a turn.

Checks what only this API has; `turns.tool_checks` checks the rest. ValueErrors begin with the field
and say the cure. Knows no HTTP. Used by `router.http.messages.requests`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.router.http.messages.fields import check_keys, text_or_none
from pdserve.turns.tool_checks import MAX_TOOLS

Json = dict[str, Any]

TOOL_KEYS = ("name", "description", "input_schema", "strict")
# fields of a tool that ask for nothing here
TOOL_IGNORED = ("type", "cache_control", "eager_input_streaming")
# fields of a tool that need more than a model, with the values that ask for nothing, and cures
TOOL_NEUTRAL: Mapping[str, tuple[Any, str]] = {
    "defer_loading": (False, "every tool is shown to the model: leave it out"),
    "allowed_callers": (["direct"], "this server runs no code: leave it out"),
    "input_examples": ([], "the model's chat template shows none: write them into description"),
}
CHOICES: Mapping[str, str] = {
    "auto": "auto",
    "any": "required",
    "tool": "named",
    "none": "none",
}
_CHOICE_FORM = (
    "{'type': 'auto'}, {'type': 'any'}, {'type': 'none'} or {'type': 'tool', 'name': ...}"
)


def tools_of(tools: Sequence[Any] | None) -> list[Json]:
    """Returns the tools in the form of chat completions.

    Raises ValueError for a tool that is not the client's own, or has fields that this server cannot
    honour.
    """
    if len(tools or ()) > MAX_TOOLS:
        raise ValueError(f"tools must hold at most {MAX_TOOLS} tools, not {len(tools or ())}")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]


def choice_of(given: Any, has_tools: bool) -> tuple[Any, bool | None]:
    """Returns tool_choice in the form of chat completions, and parallel_tool_calls.

    None: not given. Raises ValueError.
    """
    if given is None:
        return None, None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in CHOICES:
        raise ValueError(f"tool_choice must be {_CHOICE_FORM}, not {given!r:.80}")
    keys = ["type", "disable_parallel_tool_use", *(["name"] if kind == "tool" else [])]
    check_keys(given, keys, "tool_choice")
    is_single = given.get("disable_parallel_tool_use")
    if is_single is not None and not isinstance(is_single, bool):
        raise ValueError(
            f"tool_choice.disable_parallel_tool_use must be true or false, not {is_single!r:.80}"
        )
    if kind == "none":
        return "none", None
    if not has_tools:
        raise ValueError("tool_choice is only for requests with tools: leave it out, or send tools")
    parallel = None if is_single is None else not is_single
    if kind != "tool":
        return CHOICES[kind], parallel
    name = given.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"tool_choice.name must be the name of a tool, not {name!r:.80}")
    return {"type": "function", "function": {"name": name}}, parallel


def _tool(tool: Any, where: str) -> Json:
    if not isinstance(tool, Mapping):
        raise ValueError(f"{where} must be an object with name and input_schema, not {tool!r:.80}")
    kind = tool.get("type")
    if kind == "function" or "function" in tool:
        raise ValueError(
            f"{where} has the form of chat completions: send name, description and input_schema in "
            "the tool itself, without type"
        )
    if kind is not None and kind != "custom":
        raise ValueError(
            f"{where}.type {kind!r:.80} is a tool of Anthropic's own, which this server does not "
            "have: describe yours by name, description and input_schema, without type"
        )
    check_keys(tool, (*TOOL_KEYS, *TOOL_IGNORED, *TOOL_NEUTRAL), where)
    for name, (neutral, cure) in TOOL_NEUTRAL.items():
        given = tool.get(name)
        if given is not None and (type(given) is not type(neutral) or given != neutral):
            raise ValueError(f"{where}.{name} is not supported: {cure}")
    if not isinstance(tool.get("input_schema"), Mapping):
        raise ValueError(
            f"{where}.input_schema must be a JSON schema, which is an object, not "
            f"{tool.get('input_schema')!r:.80}"
        )
    function: Json = {"name": tool.get("name")}
    if (description := text_or_none(tool.get("description"), f"{where}.description")) is not None:
        function["description"] = description
    function["parameters"] = tool["input_schema"]
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}
