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
_MODES = ("auto", "required")
_NAMED = "{'type': 'function', 'function': {'name': ...}}"
_ALLOWED = f"{{'mode': 'auto' or 'required', 'tools': [{_NAMED}, ...]}}"


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


def allowed_tools_of(given: Any, tools: Sequence[Mapping[str, Any]]) -> tuple[Any, list[int]]:
    """Returns tool_choice without its list of allowed tools, and the places of the tools that may
    be called.

    `given` is OpenAI's tool_choice. With {"type": "allowed_tools", ...} the choice is its mode.
    """
    if not tools or not isinstance(given, Mapping) or given.get("type") != "allowed_tools":
        return given, list(range(len(tools)))
    where = "tool_choice.allowed_tools"
    allowed = given.get("allowed_tools")
    if not isinstance(allowed, Mapping):
        raise ValueError(f"{where} must be {_ALLOWED}, not {allowed!r:.80}")
    mode, names = allowed.get("mode"), allowed.get("tools")
    if mode not in _MODES:
        raise ValueError(f"{where}.mode must be 'auto' or 'required', not {mode!r:.80}")
    if not isinstance(names, list) or not names:
        raise ValueError(f"{where}.tools must be a list of at least one of the tools")
    known = {tool["function"]["name"]: index for index, tool in enumerate(tools)}
    return mode, sorted(
        {_place(tool, known, f"{where}.tools[{i}]") for i, tool in enumerate(names)}
    )


def _place(tool: Any, known: Mapping[str, int], where: str) -> int:
    name = _name_in(tool)
    if name is None:
        raise ValueError(f"{where} must be {_NAMED}, not {tool!r:.80}")
    if name not in known:
        raise ValueError(
            f"{where} names {name!r:.80}, which tools does not hold: send it there too"
        )
    return known[name]


def _name_in(choice: Any) -> str | None:
    """Returns the name in OpenAI's form of a named function; None if it has another form."""
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def tool_choice_of(
    given: Any, tools: Sequence[Mapping[str, Any]]
) -> tuple[Literal["auto", "none", "required", "named"], str]:
    """Returns how the tools are chosen, and the function's name if that is "named".

    `given` is what `allowed_tools_of` returns; None means auto, as with OpenAI.
    """
    if given is None or given == "none":
        return "auto" if given is None else "none", ""
    if not tools:
        raise ValueError(
            "tool_choice is only for requests with tools: leave it out, or send 'none'"
        )
    if isinstance(given, str) and given in _CHOICES:
        return given, ""  # type: ignore[return-value]  # one of the three
    name = _name_in(given)
    if name is None:
        raise ValueError(
            f"tool_choice must be 'none', 'auto', 'required', {_NAMED} or {{'type': "
            f"'allowed_tools', 'allowed_tools': {_ALLOWED}}}, not {given!r:.80}"
        )
    known = [tool["function"]["name"] for tool in tools]
    if name not in known:
        raise ValueError(
            f"tool_choice names {name!r:.80}, which tools does not hold: use one of "
            f"{', '.join(known):.500}"
        )
    return "named", name
