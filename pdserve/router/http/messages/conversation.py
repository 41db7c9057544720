"""Turns conversations of Anthropic's Messages API into the messages that chat templates show.

    system, messages -> turns: neighbours of one role joined -> messages in chat's form

Blocks of text are joined by a newline, like parts of a chat message. A tool_result becomes a
message of the role tool, a tool_use becomes a call in the assistant's message, and thinking becomes
its reasoning. ValueErrors begin with the field as clients call it, such as
messages[2].content[0].input, and say the cure. Knows no HTTP and no template. Used by
`router.http.messages.requests`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.router.http.messages.fields import check_keys, checked_name, checked_text
from pdserve.router.request.prompts import MAX_MESSAGES

Json = dict[str, Any]

ROLES = ("user", "assistant", "system")
# members of a block that ask for nothing; prefixes are cached without being asked
BLOCK_IGNORED = ("type", "cache_control")
BLOCK_KEYS: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "citations"),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input", "caller", "toolset_name"),
    "tool_result": ("tool_use_id", "content", "is_error", "toolset_name"),
}
BLOCKS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_CURES = {
    "image": "the model reads only text: describe the image in a text block",
    "document": "the model reads only text: send the document's text in a text block",
    "search_result": "send its text in a text block",
}
ERROR_PREFIX = "Error: "  # shows is_error to the model


def chat_messages(system: Any, messages: Sequence[Any]) -> list[Json]:
    """Returns the conversation in the form of chat completions. Raises ValueError with the
    field."""
    if not messages:
        raise ValueError("messages is empty: send at least one message")
    if len(messages) > MAX_MESSAGES:
        raise ValueError(
            f"messages must hold at most {MAX_MESSAGES} messages, not {len(messages)}: join or "
            "leave out some"
        )
    shown = [] if system is None else [{"role": "system", "content": _text_of(system, "system")}]
    calls = _OpenCalls()
    for turn in _turns(messages):
        shown += _SHOWN[turn.role](turn, calls)
    calls.check()
    if shown[-1]["role"] == "assistant" and shown[-1]["content"] is None:
        shown[-1]["content"] = ""  # the answer begins after the thinking
    return shown


def is_prefilled(messages: Sequence[Json]) -> bool:
    """True if the answer continues the last message; `messages` come from `chat_messages`."""
    return bool(messages[-1]["role"] == "assistant")


@dataclass
class _Turn:
    """Neighbouring messages of one role. `blocks` are pairs of a place and the block there."""

    role: str
    where: str
    blocks: list[tuple[str, Json]] = field(default_factory=list)


class _OpenCalls:
    """The calls of the assistant's last turn that have no result yet, by id."""

    def __init__(self) -> None:
        self._open: dict[str, str] = {}
        self._known: set[str] = set()

    def add(self, call_id: str, where: str) -> None:
        if call_id in self._known:
            raise ValueError(f"{where}.id {call_id!r:.80} is there twice: give each call its own")
        self._known.add(call_id)
        self._open[call_id] = where

    def answer(self, call_id: str, where: str) -> None:
        if self._open.pop(call_id, None) is None:
            raise ValueError(
                f"{where}.tool_use_id {call_id!r:.80} names no tool_use in the previous message "
                "that still needs a result: send one tool_result for each tool_use, in the next "
                "message"
            )

    def check(self) -> None:
        """Raises ValueError if a call is left without a result."""
        for call_id, where in self._open.items():
            raise ValueError(
                f"{where}: tool_use {call_id!r:.80} has no result: begin the next message, a "
                "user's, with its tool_result"
            )


def _turns(messages: Sequence[Any]) -> Iterator[_Turn]:
    turn: _Turn | None = None
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ValueError(
                f"{where} must be an object with role and content, not {message!r:.80}"
            )
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"{where}.role must be one of {', '.join(ROLES)}, not {role!r:.80}")
        check_keys(message, ("role", "content"), where)
        if turn is not None and turn.role != role:
            yield turn
            turn = None
        turn = turn or _Turn(role, where)
        turn.blocks += _blocks(message.get("content"), f"{where}.content", BLOCKS[role])
    if turn is not None:
        yield turn


def _blocks(content: Any, where: str, allowed: Sequence[str]) -> list[tuple[str, Json]]:
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise ValueError(f"{where} must be a string or a list of blocks, not {content!r:.80}")
    found = []
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str):
            raise ValueError(f"{place} must be an object with a type, not {block!r:.80}")
        if kind not in allowed:
            cure = _CURES.get(kind, f"use {', '.join(allowed)} here")
            raise ValueError(f"{place} has type {kind!r:.80}, which is not supported: {cure}")
        check_keys(block, (*BLOCK_IGNORED, *BLOCK_KEYS[kind]), place)
        found.append((place, block))
    return found


def _text_of(content: Any, where: str) -> str:
    """Returns a text, or blocks of text, as one string."""
    return _joined(_blocks(content, where, ("text",)))


def _joined(blocks: Sequence[tuple[str, Json]]) -> str:
    return "\n".join(checked_text(block.get("text"), f"{place}.text") for place, block in blocks)


def _system(turn: _Turn, calls: _OpenCalls) -> list[Json]:
    calls.check()
    return [{"role": "system", "content": _joined(turn.blocks)}]


def _user(turn: _Turn, calls: _OpenCalls) -> list[Json]:
    """Shows results of tools, then the text.

    The API demands this order, which keeps calls and results together in the prompt.
    """
    shown: list[Json] = []
    texts = [found for found in turn.blocks if found[1]["type"] == "text"]
    num_results = len(turn.blocks) - len(texts)
    for place, block in turn.blocks[:num_results]:
        if block["type"] == "text":
            late = next(p for p, b in turn.blocks[num_results:] if b["type"] != "text")
            raise ValueError(
                f"{late}: a tool_result must stand before all text of a user's message: move it up"
            )
        shown.append(_result(block, place, calls))
    calls.check()
    if texts or not num_results:
        shown.append({"role": "user", "content": _joined(texts)})
    return shown


def _result(block: Json, where: str, calls: _OpenCalls) -> Json:
    call_id = checked_name(
        block.get("tool_use_id"), f"{where}.tool_use_id", "the id of a tool_use block"
    )
    calls.answer(call_id, where)
    is_error = block.get("is_error")
    if is_error is not None and not isinstance(is_error, bool):
        raise ValueError(f"{where}.is_error must be true or false, not {is_error!r:.80}")
    content = block.get("content")
    text = "" if content is None else _text_of(content, f"{where}.content")
    shown = (ERROR_PREFIX if is_error else "") + text
    return {"role": "tool", "tool_call_id": call_id, "content": shown}


def _assistant(turn: _Turn, calls: _OpenCalls) -> list[Json]:
    calls.check()
    texts = [found for found in turn.blocks if found[1]["type"] == "text"]
    message: Json = {"role": "assistant", "content": _joined(texts) if texts else None}
    thoughts = [
        checked_text(block.get("thinking"), f"{place}.thinking")
        for place, block in turn.blocks
        if block["type"] == "thinking"
    ]
    if any(thoughts):
        message["reasoning"] = "\n".join(thoughts)
    called = [
        _call(block, place, calls) for place, block in turn.blocks if block["type"] == "tool_use"
    ]
    if called:
        message["tool_calls"] = called
    return [message]


def _call(block: Json, where: str, calls: _OpenCalls) -> Json:
    call_id = checked_name(block.get("id"), f"{where}.id", "the id of the call")
    name = checked_name(block.get("name"), f"{where}.name", "the name of a tool")
    given = block.get("input")
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}.input must be an object, not {given!r:.80}")
    calls.add(call_id, where)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


_SHOWN: Mapping[str, Callable[[_Turn, _OpenCalls], list[Json]]] = {
    "system": _system,
    "user": _user,
    "assistant": _assistant,
}
