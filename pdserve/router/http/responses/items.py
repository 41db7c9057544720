"""Turns the input of a Responses request into a turn's messages, and keeps where each came from.

    items of one assistant's turn (reasoning, message, function_call) -> one assistant's message
    function_call_output -> a tool's message        instructions -> the first system message

A turn ends where another role speaks, and after a message that no call follows. ValueErrors begin
with the item as the client wrote it: `input[3].content[0]`. `text.chat_messages` checks later what
a chat template needs of messages (roles, arguments that are JSON), and `Conversation.place` says
which item its errors mean. Knows no template. Called by `router.http.responses.requests`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.router.request.prompts import MAX_MESSAGES

Json = dict[str, Any]

_KINDS = "message, function_call, function_call_output or reasoning"
_TEXT_PARTS = ("input_text", "output_text", "text")
_STEP = re.compile(r"messages\[(\d+)\](?:\.(\w+)(?:\[(\d+)\](?:\.function)?)?)?")


@dataclass
class _Message:
    """One message, and the input's fields that its parts came from."""

    value: Json
    place: str
    content: str = ""
    reasoning: str = ""
    calls: list[str] = field(default_factory=list)
    # for an assistant's message: the kind of its last item, and the texts of its items
    last: str = ""
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)

    def whole(self) -> Json:
        """Returns the message in the form of chat completions."""
        if self.value["role"] != "assistant":
            return self.value
        content = "".join(self.texts)  # chat completions join content around a call like this
        own: Json = {"content": content if content or not self.calls else None}
        if self.thoughts:
            own["reasoning_content"] = "\n".join(self.thoughts)
        return self.value | own


class Conversation:
    """The messages of a request. Raises ValueError naming the item."""

    def __init__(self, given: str | Sequence[Any], instructions: str | None = None) -> None:
        self._made: list[_Message] = []
        self._call_ids: set[str] = set()
        if instructions is not None:
            self._add({"role": "system", "content": instructions}, "instructions", "instructions")
        if isinstance(given, str):
            self._add({"role": "user", "content": given}, "input", "input")
            return
        if not given:
            raise ValueError("input is empty: send a text, or at least one item")
        if len(given) > MAX_MESSAGES:
            raise ValueError(
                f"input must hold at most {MAX_MESSAGES} items, not {len(given)}: join or leave "
                "out some"
            )
        for index, item in enumerate(given):
            self._take(item, f"input[{index}]")

    @property
    def messages(self) -> list[Json]:
        """Returns the messages in the form of chat completions."""
        return [made.whole() for made in self._made]

    def place(self, path: str) -> tuple[str, int]:
        """Returns the client's name for the beginning of `path`, and that beginning's length.

        `path` is a place as errors name it, such as `messages[1].tool_calls[0].function`.
        """
        found = _STEP.match(path)
        if found is None or int(found[1]) >= len(self._made):
            return "input", len("messages")
        made, name, number = self._made[int(found[1])], found[2], found[3]
        if name == "tool_calls" and number is not None and int(number) < len(made.calls):
            return made.calls[int(number)], found.end()
        if name == "tool_calls":
            return made.calls[-1] if made.calls else made.place, found.end(2)
        if name == "content":
            return made.content or made.place, found.end(2)
        if name in ("reasoning", "reasoning_content"):
            return made.reasoning or made.place, found.end(2)
        return made.place, found.end(1) + 1

    def _add(self, value: Json, place: str, content: str) -> _Message:
        self._made.append(_Message(value, place, content))
        return self._made[-1]

    def _take(self, item: Any, place: str) -> None:
        if not isinstance(item, Mapping):
            raise ValueError(f"{place} must be an object with a type, not {item!r:.80}")
        kind = item.get("type")
        if kind is None:
            kind = "message" if "role" in item else "item_reference" if "id" in item else None
        if kind == "message":
            self._message(item, place)
        elif kind == "reasoning":
            self._reasoning(item, place)
        elif kind == "function_call":
            self._call(item, place)
        elif kind == "function_call_output":
            self._output(item, place)
        elif kind == "item_reference":
            raise ValueError(
                f"{place} refers to an item of an earlier response, and this server stores none: "
                "send the item itself"
            )
        else:
            raise ValueError(
                f"{place}.type must be {_KINDS}, not {kind!r:.80}: leave the item out, or write "
                "what the model should know of it into a message"
            )

    def _message(self, item: Mapping[str, Any], place: str) -> None:
        role = item.get("role")
        if role in ("tool", "function"):
            raise ValueError(
                f"{place}.role {role!r} is the form of chat completions: send an item "
                "{'type': 'function_call_output', 'call_id': ..., 'output': ...}"
            )
        if not isinstance(role, str) or not role:
            raise ValueError(f"{place}.role must be a non-empty string such as 'user'")
        if item.get("tool_calls") is not None:
            raise ValueError(
                f"{place}.tool_calls is the form of chat completions: send an item "
                "{'type': 'function_call', 'call_id': ..., 'name': ..., 'arguments': ...} for each"
            )
        text = _text(item.get("content"), f"{place}.content")
        if role != "assistant":
            self._add({"role": role, "content": text}, place, f"{place}.content")
            return
        turn = self._turn("message", place)
        turn.texts.append(text)
        turn.content = f"{place}.content"

    def _reasoning(self, item: Mapping[str, Any], place: str) -> None:
        """Takes the model's thoughts, or their summary if only that is known."""
        text = ""
        for name in ("content", "summary"):
            text = text or _reasoning_text(item.get(name), f"{place}.{name}")
        turn = self._turn("reasoning", place)
        if text:
            turn.thoughts.append(text)
        turn.reasoning = place

    def _call(self, item: Mapping[str, Any], place: str) -> None:
        call_id = _call_id(item, place)
        name = item.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"{place}.name must be the name of a function, not {name!r:.80}")
        turn = self._turn("function_call", place)
        function = {"name": name, "arguments": item.get("arguments")}
        call = {"id": call_id, "type": "function", "function": function}
        turn.value.setdefault("tool_calls", []).append(call)
        turn.calls.append(place)
        self._call_ids.add(call_id)

    def _output(self, item: Mapping[str, Any], place: str) -> None:
        call_id = _call_id(item, place)
        if call_id not in self._call_ids:
            raise ValueError(
                f"{place}.call_id: input holds no function_call {call_id!r:.80} before it: this "
                "server stores nothing, so send the response's output items too"
            )
        text = _text(item.get("output"), f"{place}.output")
        message = {"role": "tool", "tool_call_id": call_id, "content": text}
        self._add(message, place, f"{place}.output")

    def _turn(self, kind: str, place: str) -> _Message:
        """Returns the assistant's message that an item of this kind belongs to."""
        last = self._made[-1] if self._made else None
        is_own = last is not None and last.value["role"] == "assistant"
        if last is None or not is_own or (last.last == "message" and kind != "function_call"):
            last = self._add({"role": "assistant"}, place, "")
        last.last = kind
        return last


def _call_id(item: Mapping[str, Any], place: str) -> str:
    found = item.get("call_id")
    if not isinstance(found, str) or not found:
        raise ValueError(f"{place}.call_id must be the call's call_id, not {found!r:.80}")
    return found


def _text(content: Any, place: str) -> str:
    """Returns a string, or text parts joined by a newline, as in chat completions."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{place} must be a string or a list of parts, not {content!r:.80}")
    return "\n".join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind == "refusal":
        return _string(part, "refusal", place)
    if kind not in _TEXT_PARTS:
        raise ValueError(
            f"{place} has type {kind!r:.80}: this server reads text only: send input_text, or "
            "output_text for an assistant"
        )
    return _string(part, "text", place)


def _reasoning_text(parts: Any, place: str) -> str:
    if parts is None:
        return ""
    if not isinstance(parts, list):
        raise ValueError(f"{place} must be a list of parts, not {parts!r:.80}")
    for index, part in enumerate(parts):
        if not isinstance(part, Mapping):
            raise ValueError(f"{place}[{index}] must be an object with a text, not {part!r:.80}")
    texts = [_string(part, "text", f"{place}[{index}]") for index, part in enumerate(parts)]
    return "\n".join(texts)


def _string(part: Mapping[str, Any], name: str, place: str) -> str:
    if not isinstance(part.get(name), str):
        raise ValueError(f"{place}.{name} must be a string")
    text: str = part[name]
    return text
