"""Messages of a conversation, checked and brought into the form that chat templates expect.

- content: one string, or None. Text parts are joined by a newline, as in vLLM.
- tool_calls: arguments become objects. OpenAI sends them as JSON in a string.
- reasoning: set under both of its names, reasoning and reasoning_content.
- null: a field that is null counts as absent, except content.

Errors are ValueErrors that name the place, such as `messages[3].tool_calls[0].function.name`. This
module knows no template. `text.chat_template` calls it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

# The limits on a body's JSON do not see JSON inside a string, so it has a limit of its own. This
# many values, summed over all calls, are decoded within 20 ms.
MAX_ARGUMENT_VALUES = 1 << 16

_REASONING = ("reasoning_content", "reasoning")

Message = dict[str, Any]


def normalised(messages: Sequence[Mapping[str, Any]], knows_developer: bool) -> list[Message]:
    """Returns the messages as templates expect them.

    - knows_developer: True if the template has the role developer. Otherwise such a message gets
      the role system.
    """
    _check_arguments(messages)
    return [
        _message(message, f"messages[{index}]", knows_developer)
        for index, message in enumerate(messages)
    ]


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with the arguments of calls as JSON in a string. Templates that join
    strings need this, for example DeepSeek's."""
    return [
        message | {"tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def text_of(content: Any, where: str = "content") -> str:
    """Returns content as one string. Raises ValueError if it is neither a string nor a list of text
    parts. `where` names the content in errors."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(
            f"{where} must be a string or a list of parts, not {type(content).__name__}"
        )
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _check_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    num_values = 0
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            if isinstance(arguments, str):
                num_values += sum(map(arguments.count, "[{,:"))
        if num_values > MAX_ARGUMENT_VALUES:
            raise ValueError(
                f"messages[{index}].tool_calls: function.arguments up to here hold more than "
                f"{MAX_ARGUMENT_VALUES} values: leave out old calls"
            )


def _message(given: Mapping[str, Any], where: str, knows_developer: bool) -> Message:
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{where} must be an object with role and content, not {type(given).__name__}"
        )
    message = {name: value for name, value in given.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}.role must be a non-empty string such as 'user'")
    _refuse_old_form(message, role, where)
    calls = message.pop("tool_calls", None)
    if calls is not None and not isinstance(calls, list):
        raise ValueError(f"{where}.tool_calls must be a list, not {type(calls).__name__}")
    if calls and role != "assistant":
        raise ValueError(
            f"{where}.tool_calls: only an assistant's message calls tools: leave them out"
        )
    for name in (*_REASONING, "name", "tool_call_id"):
        if not isinstance(message.get(name, ""), str):
            raise ValueError(f"{where}.{name} must be a string, not {message[name]!r:.80}")
    if "content" not in message and role != "assistant":
        raise ValueError(f"{where}.content is missing: only an assistant's message may go without")
    content = message.get("content")
    message["content"] = None if content is None else text_of(content, f"{where}.content")
    if calls:
        message["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is not None:
        message |= dict.fromkeys(_REASONING, reasoning)
    if role == "developer" and not knows_developer:
        message["role"] = "system"
    return message


def _refuse_old_form(message: Message, role: str, where: str) -> None:
    if "function_call" in message:
        raise ValueError(
            f"{where}.function_call is OpenAI's old form: send tool_calls, a list of "
            "{'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': ...}}"
        )
    if role == "function":
        raise ValueError(
            f"{where}.role 'function' is OpenAI's old form: send role 'tool' with tool_call_id"
        )


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise ValueError(
            f"{where} has type {kind!r}: only {{'type': 'text', 'text': ...}} is supported"
        )
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{where}.text must be a string")
    text: str = part["text"]
    return text


def _call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(
            f"{where} must be {{'id': ..., 'type': 'function', 'function': {{'name': ..., "
            f"'arguments': ...}}}}, not {call!r:.80}"
        )
    if call.get("type", "function") != "function":
        raise ValueError(f"{where}.type must be 'function', not {call['type']!r:.80}")
    if not isinstance(call.get("id") or "", str):
        raise ValueError(f"{where}.id must be a string, not {call['id']!r:.80}")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}.function.name must be the name of a function, not {name!r:.80}")
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(given: Any, where: str) -> Mapping[str, Any]:
    """Returns a call's arguments as an object, because templates want that. OpenAI sends them as a
    JSON string."""
    parsed = given
    if isinstance(given, str):
        try:
            parsed = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where} is not valid JSON: {error}: send what the model should see as an object"
            ) from error
    parsed = {} if parsed is None else parsed
    if not isinstance(parsed, Mapping):
        raise ValueError(f"{where} must hold a JSON object, not {parsed!r:.80}")
    return parsed


def _with_text(call: Message) -> Message:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return call | {"function": function | {"arguments": arguments}}
