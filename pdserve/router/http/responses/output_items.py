"""Makes the output items of a response from sections of an answer.

    a run of reasoning -> reasoning      a run of content -> message      a call -> function_call

An item's JSON is made here both for the stream's events and for the whole answer, so that both are
the same. Knows no stream. Made by `router.http.responses.responder`.
"""

from typing import Literal

import msgspec

from pdserve.router.http.json_pieces import Json, json_bytes
from pdserve.text.answers.sections import Section

Status = Literal["in_progress", "completed", "incomplete"]

_PREFIXES = {"reasoning": "rs", "content": "msg", "call": "fc"}
# kind of section -> the middle of the names of its events
EVENT_NAMES = {
    "reasoning": "reasoning_text",
    "content": "output_text",
    "call": "function_call_arguments",
}


class OutputItem:
    """One output item.

    `name` is the response's, and unique; the item's id is made from it. `run` is the number of the
    run of content within the answer.
    """

    def __init__(self, section: Section, name: str, run: int) -> None:
        self.section = section
        self.run = run
        self.id = f"{_PREFIXES[section.kind]}_{name}{section.index:04x}"
        self.json = b""  # JSON of the whole item, once it is closed
        self.scores = bytearray()  # JSON of log-probabilities with commas between
        self._num_sent = 0  # number of bytes of `scores` that were sent
        self._text = b""  # JSON of the text, once it is closed
        place: Json = {"item_id": self.id, "output_index": section.index}
        if section.kind != "call":
            place["content_index"] = 0
        # members that say in an event which item it is about
        self.place = json_bytes(place)[1:-1]

    def add_scores(self, entry: bytes) -> None:
        """Adds a token's log-probabilities."""
        if self.scores:
            self.scores += b","
        self.scores += entry

    def new_scores(self) -> bytes:
        """Returns the log-probabilities since the last call, as the inside of a JSON list."""
        start = self._num_sent + bool(self._num_sent)  # after the comma
        self._num_sent = len(self.scores)
        return bytes(self.scores[start:])

    @property
    def has_new_scores(self) -> bool:
        return len(self.scores) > self._num_sent

    def opened(self) -> bytes:
        """Returns the item as it begins, as JSON."""
        return self._item("in_progress", b'""', [])

    def part(self, is_closed: bool) -> bytes:
        """Returns its content part as JSON, without text unless it is closed."""
        return self._part(self._text if is_closed else b'""', self.scores if is_closed else b"")

    def close(self, status: Status) -> None:
        """Closes the item and makes its JSON."""
        self._text = json_bytes(self.section.text)
        self.json = self.whole(status)

    def whole(self, status: Status) -> bytes:
        """Returns the item as it is now, as JSON."""
        text = self._text or json_bytes(self.section.text)
        return self._item(status, text, [self._part(text, self.scores)])

    def done_members(self) -> bytes:
        """Returns the members of the event that ends its text or arguments."""
        if self.section.kind == "call":
            name = json_bytes({"name": self.section.name})[1:-1]
            return name + b',"arguments":' + self._text
        if self.section.kind == "content":
            return b'"logprobs":[' + self.scores + b'],"text":' + self._text
        return b'"text":' + self._text

    def _part(self, text: bytes, scores: bytes | bytearray) -> bytes:
        if self.section.kind == "content":
            tail = b',"annotations":[],"logprobs":[' + scores + b"]}"
            return b'{"type":"output_text","text":' + text + tail
        return b'{"type":"reasoning_text","text":' + text + b"}"

    def _item(self, status: Status, text: bytes, parts: list[bytes]) -> bytes:
        """Makes the item from its text and its content parts, which are JSON."""
        section = self.section
        item: Json = {"id": self.id, "status": status}
        if section.kind == "call":
            item |= {"type": "function_call", "call_id": section.call_id, "name": section.name}
            return json_bytes(item | {"arguments": msgspec.Raw(text)})
        item |= {"content": msgspec.Raw(b"[" + b",".join(parts) + b"]")}
        if section.kind == "content":
            return json_bytes({"type": "message", "role": "assistant"} | item)
        return json_bytes({"type": "reasoning", "summary": []} | item)
