"""Makes the input of a tool_use block: takes a call's arguments as they are generated, and gives a
JSON object.

Anthropic's clients need an object even in a stream, where they parse what came so far. So arguments
pass on member by member, each once it is complete and valid JSON:

    reading --a member is whole--> reading --the object is closed--> closed
    reading or closed --what comes is no JSON object--> broken           (nothing passes any more)

What passed and what `finish` adds always make one JSON object together. Arguments that a model
wrote without a grammar, or that max_tokens cut off, may be no object. Then the object has
INVALID_JSON, a member with all arguments as the model wrote them. So nothing is lost, and no tool
takes the input for a complete one. The name is from Anthropic's documentation. Knows no HTTP. Used
by `router.http.messages.responder`.
"""

import re

import msgspec

from pdserve.router.http.json_pieces import json_bytes

INVALID_JSON = "INVALID_JSON"

_MARKS = re.compile(r'["\\{}\[\],]')


class ToolInput:
    """The arguments of one call. Time is linear in their length, however they are cut."""

    def __init__(self) -> None:
        self._parts: list[str] = []  # parts of the member that is not complete yet
        self._num_members = 0
        self._depth = 0
        self._in_string = False
        self._is_escaped = False  # the next character follows a backslash
        self._is_closed = False
        self._is_broken = False

    def push(self, text: str) -> str:
        """Takes more of the arguments; returns the part of the object that is certain now."""
        if self._is_broken or not text:
            return ""
        passed: list[str] = []
        start = 0  # where the member that is being read begins
        after = 1 if self._is_escaped else 0
        self._is_escaped = False
        for match in _MARKS.finditer(text, after):
            at = match.start()
            if at < after:  # it follows a backslash
                continue
            mark = match[0]
            if self._in_string:
                if mark == "\\":
                    after = at + 2
                    self._is_escaped = after > len(text)
                self._in_string = mark != '"'
            elif mark == '"':
                self._in_string = True
            elif mark in "{[":
                if self._depth == 0:
                    self._open(text[start:at], mark)
                    start = at + 1
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                if self._depth == 0:
                    passed.append(self._member(text[start:at], is_last=True))
                    self._is_broken = self._is_broken or mark != "}"
                    self._is_closed = not self._is_broken
                    start = at + 1
            elif mark == "," and self._depth == 1:
                passed.append(self._member(text[start:at]))
                start = at + 1
            self._is_broken = self._is_broken or self._depth < 0
            if self._is_broken:
                return "".join(passed)
        self._parts.append(text[start:])
        if self._depth == 0 and self._parts[-1].strip():
            self._is_broken = True  # something stands before the object or after it
        return "".join(passed)

    def finish(self, arguments: str) -> str:
        """Returns the rest of the object; `arguments` is all that was pushed."""
        if self._is_closed and not self._is_broken:
            return "}" if self._num_members else "{}"
        written = json_bytes({INVALID_JSON: arguments}).decode()
        return ("," if self._num_members else "{") + written[1:]

    def _open(self, before: str, mark: str) -> None:
        """Begins the object; breaks unless it is the first one and really an object."""
        self._parts.append(before)
        if self._is_closed or mark != "{" or "".join(self._parts).strip():
            self._is_broken = True
        self._parts.clear()

    def _member(self, end: str, is_last: bool = False) -> str:
        """Returns a complete member, after the comma or brace that belongs before it."""
        member = "".join([*self._parts, end])
        self._parts.clear()
        if is_last and not self._num_members and not member.strip():
            return ""
        if not _is_member(member):
            self._is_broken = True
            return ""
        self._num_members += 1
        return ("{" if self._num_members == 1 else ",") + member


def _is_member(text: str) -> bool:
    try:
        found = msgspec.json.decode("{" + text + "}")
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return False
    return isinstance(found, dict) and len(found) == 1
