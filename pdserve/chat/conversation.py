"""The messages of a conversation, in OpenAI's form: what is sent, taken back, and saved.

Reasoning is kept only for the file: chat templates leave out the reasoning of earlier answers.
Knows no server and no terminal. Made by `chat.session`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdserve.text.answers.pieces import Piece, ToolCall, calls_of, content_of, reasoning_of

Json = dict[str, Any]
_REASONING = "reasoning_content"


class Conversation:
    def __init__(self, system: str | None = None) -> None:
        """Starts with a system message, or without one if `system` is None."""
        self.system = system
        self._messages: list[Json] = []

    @property
    def pending(self) -> list[Json]:
        """Calls of the last answer that have no result yet, in OpenAI's form."""
        after: list[str] = []
        for message in reversed(self._messages):
            if message["role"] != "tool":
                calls: list[Json] = message.get("tool_calls") or []
                return [call for call in calls if call["id"] not in after]
            after.append(message["tool_call_id"])
        return []

    def sent(self) -> list[Json]:
        """Returns the messages in the form that a request holds."""
        return [{k: v for k, v in m.items() if k != _REASONING} for m in self._all()]

    def say(self, text: str) -> None:
        """Adds the user's next message; if a call is pending, the message is its result."""
        if pending := self.pending:
            self._messages.append(
                {"role": "tool", "tool_call_id": pending[0]["id"], "content": text}
            )
        else:
            self._messages.append({"role": "user", "content": text})

    def take_back(self) -> None:
        """Forgets what the user said last."""
        self._messages.pop()

    def hear(self, pieces: Sequence[Piece]) -> bool:
        """Adds the content and the complete calls of an answer.

        Returns False if there are none, and then adds nothing.
        """
        content = content_of(pieces)
        calls = [call for call in calls_of(pieces) if call.is_complete]
        if not content and not calls:
            return False
        message: Json = {"role": "assistant", "content": content or None}
        if reasoning := reasoning_of(pieces):
            message[_REASONING] = reasoning
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        self._messages.append(message)
        return True

    def undo(self) -> str | None:
        """Forgets the user's last message and everything after it. Returns its text, or None."""
        for place in range(len(self._messages) - 1, -1, -1):
            if self._messages[place]["role"] == "user":
                text: str = self._messages[place]["content"]
                del self._messages[place:]
                return text
        return None

    def reset(self) -> None:
        """Forgets everything except the system message."""
        self._messages.clear()

    def save(self, path: Path, model: str) -> None:
        """Writes model and messages as JSON. Raises OSError if the file exists, or cannot be
        written."""
        data = {"model": model, "messages": self._all()}
        with path.expanduser().open("x", encoding="utf-8") as file:
            json.dump(data, file, ensure_ascii=False, indent=1)
            file.write("\n")

    def _all(self) -> list[Json]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + self._messages


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
