"""Checks whether the tools of a request, and its choice of them, can be used.

These are plain functions over OpenAI's form. Their ValueErrors begin with the field and name the
cure. Schemas are checked where they are enforced (`turns.enforcement`). Called by `turns.turn`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

MAX_TOOLS = 256
MAX_CHARS = 256  # in a function's name

# A name that every format of calls can hold.
NAME = r"[^\s<>\[\]{}\"'`\\\x00-\x1f\ud800-\udfff]{1,256}"
_NAME = re.compile(NAME)
_FORM = "{'type': 'function', 'function': {'name': ..., 'parameters': {...}}}"
_CHOICES = ("none", "auto", "required")


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns the tools as a list. Raises ValueError for one that is no function or has a bad
    name."""
    found: dict[str, dict[str, Any]] = {}
    if len(tools or ()) > MAX_TOOLS:
        raise ValueError(f"tools must hold at most {MAX_TOOLS} tools, not {len(tools or ())}")
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping):
            raise ValueError(f"{where} must be {_FORM}, not {tool!r:.80}")
        if tool.get("type") != "function":
            raise ValueError(
                f"{where}.type must be 'function', not {tool.get('type')!r:.80}: only functions "
                "can be called"
            )
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise ValueError(f"{where} must be {_FORM}: function is missing or not an object")
        name = _checked_function(function, f"{where}.function")
        if name in found:
            raise ValueError(f"{where}.function.name {name!r} appears twice: give each its own")
        found[name] = dict(tool)
    return list(found.values())


def _checked_function(function: Mapping[str, Any], where: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{where}.name must have 1 to {MAX_CHARS} characters without spaces, quotes and "
            f"brackets, not {name!r:.80}"
        )
    for key, kind, what in (
        ("description", str, "a string"),
        ("parameters", Mapping, "a JSON schema, which is an object"),
        ("strict", bool, "true or false"),
    ):
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{where}.{key} must be {what}, not {value!r:.80}")
    return name


def tool_choice_of(
    given: Any, tools: Sequence[Mapping[str, Any]]
) -> tuple[Literal["auto", "none", "required", "named"], str]:
    """Returns how the tools are chosen, and the function's name if that is "named".

    `given` is OpenAI's tool_choice; None means auto, as with OpenAI.
    """
    if given is None or given == "none":
        return "auto" if given is None else "none", ""
    if not tools:
        raise ValueError(
            "tool_choice is only for requests with tools: leave it out, or send 'none'"
        )
    if isinstance(given, str) and given in _CHOICES:
        return given, ""  # type: ignore[return-value]  # one of the three
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    is_form = isinstance(given, Mapping) and given.get("type") == "function"
    if not is_form or not isinstance(name, str):
        raise ValueError(
            "tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'function': "
            f"{{'name': ...}}}}, not {given!r:.80}"
        )
    known = [tool["function"]["name"] for tool in tools]
    if name not in known:
        raise ValueError(
            f"tool_choice names {name!r:.80}, which tools does not hold: use one of "
            f"{', '.join(known):.500}"
        )
    return "named", name
