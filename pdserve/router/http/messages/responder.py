"""Writes answers of /v1/messages: content blocks, whole or as a stream of events.

    message_start --> content_block_start, content_block_delta ..., content_block_stop (each block)
                  --> message_delta --> message_stop            (or, from anywhere, error)

Both forms are made from the same sections (`text.answers.sections`), so they say the same however
the answer was cut. Knows no HTTP. Made by `router.http.messages.dialect`, one per call.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from pdserve.background.pace import Pace
from pdserve.protocol.request_key import FinishReason
from pdserve.router.errors import ApiError
from pdserve.router.http.json_pieces import Json, JsonPieces, json_array, json_bytes
from pdserve.router.http.messages.errors import error_body
from pdserve.router.http.messages.requests import MessagesRequest
from pdserve.router.http.messages.tool_input import ToolInput
from pdserve.router.request.chunks import AnswerEnd, OutputChunk
from pdserve.router.request.generation import ChoiceResult, Generation
from pdserve.text.answers.pieces import content_pieces
from pdserve.text.answers.sections import (
    Closed,
    Grown,
    Opened,
    Section,
    SectionEvent,
    Sections,
)

ID_PREFIX = "msg_"  # begins an answer's id; the request's name follows
HELD_TEXT_BYTES = 64  # memory of one text in a section, beside its characters

# a delta's type, and the member with its text
_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
_REASONS: dict[FinishReason | str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


class MessagesResponder:
    """Writes the answer of one call; implements `answers.Responder`."""

    def __init__(
        self, call: MessagesRequest, generation: Generation, shows_timeline: bool = False
    ) -> None:
        generation.forget_prompts()
        self._generation = generation
        self._model = call.model
        self._max_tokens = call.max_tokens
        self._shows_thinking = call.shows_thinking
        self._shows_timeline = shows_timeline
        self._sections = Sections()
        self._input = ToolInput()  # input of the call that is open
        self._has_begun = False
        self._ended: Json = {}

    @property
    def prepares(self) -> bool:
        return False

    async def prepare(self, chunk: OutputChunk) -> None:
        return None

    def stream(self, chunk: OutputChunk) -> bytes:
        shown = [] if self._has_begun else [self._start()]
        self._has_begun = True
        pieces = chunk.all_pieces()
        events = self._sections.push(pieces)
        if chunk.finish_reason is not None:
            events += self._sections.finish()
            self._ended = self._end(chunk.finish_reason, chunk.stop_reason)
        num_bytes = 0
        for event in events:
            shown.append(self._shown(event))
            if isinstance(event, Grown):  # the section keeps it
                num_bytes += HELD_TEXT_BYTES + len(event.text)
        if num_bytes:
            self._generation.hold(num_bytes)
        return b"".join(shown)

    async def ending(self) -> bytes:
        with self._generation.pacer.pace() as pace:
            extra = await self._timeline(pace)
        last = {"type": "message_delta", "delta": self._ended, "usage": self._usage()} | extra
        return _event(last) + _event({"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        return _event(error_body(error, self._generation.request_id.removeprefix(ID_PREFIX)))

    async def whole(self, results: Sequence[ChoiceResult]) -> JsonPieces:
        [result] = results
        sections = self._sections
        sections.push(result.pieces or content_pieces(result.text))
        sections.finish()
        pieces = JsonPieces()
        hold = self._generation.hold
        head = self._head()
        hold(pieces.add([json_bytes(head)[:-1], b',"content":[']))
        with self._generation.pacer.pace() as pace:
            for section in sections.all:
                if pace.is_due:
                    await pace.rest()
                block = json_bytes(self._block(section))
                hold(pieces.add([b"," if section.index else b"", block]))
            assert result.finish_reason is not None
            end = self._end(result.finish_reason, result.stop_reason) | {"usage": self._usage()}
            end |= await self._timeline(pace)
        hold(pieces.add([b"],", json_bytes(end)[1:]]))
        return pieces

    def _head(self) -> Json:
        return {
            "id": self._generation.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
        }

    def _start(self) -> bytes:
        message = self._head() | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._input_usage() | {"output_tokens": 0},
        }
        return _event({"type": "message_start", "message": message})

    def _shown(self, event: SectionEvent) -> bytes:
        section = event.section
        match event:
            case Opened():
                if section.kind == "call":
                    self._input = ToolInput()
                begun = {"type": "content_block_start", "index": section.index}
                ping = b"" if section.index else _event({"type": "ping"})
                return _event(begun | {"content_block": _begun(section)}) + ping
            case Grown():
                if section.kind == "reasoning" and not self._shows_thinking:
                    return b""
                is_call = section.kind == "call"
                return _delta(section, self._input.push(event.text) if is_call else event.text)
            case Closed():
                last = b""
                if section.kind == "call":
                    last = _delta(section, self._input.finish(section.text))
                elif section.kind == "reasoning":
                    signed = {"type": "signature_delta", "signature": ""}
                    delta = {"type": "content_block_delta", "index": section.index}
                    last = _event(delta | {"delta": signed})
                return last + _event({"type": "content_block_stop", "index": section.index})

    def _block(self, section: Section) -> Json:
        """Makes a whole block: what a client puts together from a stream's events."""
        block = _begun(section)
        match section.kind:
            case "content":
                block["text"] = section.text
            case "reasoning":
                block["thinking"] = section.text if self._shows_thinking else ""
            case "call":
                found = ToolInput()
                text = section.text
                block["input"] = msgspec.Raw((found.push(text) + found.finish(text)).encode())
        return block

    def _end(self, reason: AnswerEnd, stop_reason: int | str | None) -> Json:
        """Says why the answer ended. A stop token, which has a number, is the model's own end."""
        if reason == "stop" and isinstance(stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
        shown = _REASONS[reason]
        if reason == "length" and self._generation.num_generated_tokens < self._max_tokens:
            shown = "model_context_window_exceeded"
        return {"stop_reason": shown, "stop_sequence": None}

    def _input_usage(self) -> Json:
        """Counts the prompt's tokens; this API counts cached ones apart from the others."""
        cached = self._generation.num_cached_tokens
        return {
            "input_tokens": self._generation.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }

    def _usage(self) -> Json:
        usage = self._input_usage() | {"output_tokens": self._generation.num_generated_tokens}
        reading = self._generation.reading
        if reading is not None and reading.reasoning is not None:
            num_thinking = self._generation.num_reasoning_tokens
            usage["output_tokens_details"] = {"thinking_tokens": num_thinking}
        return usage

    async def _timeline(self, pace: Pace) -> Json:
        if not self._shows_timeline:
            return {}
        return {"timeline": msgspec.Raw(await json_array(self._generation.timelines(), pace))}


def _begun(section: Section) -> Json:
    """Makes a block with nothing in it yet."""
    match section.kind:
        case "content":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            block = {"type": "tool_use", "id": section.call_id, "name": section.name}
            return block | {"input": {}}


def _delta(section: Section, text: str) -> bytes:
    """Makes the event of more text. Nearly all events are such, so only the text is encoded."""
    if not text:
        return b""
    kind, name = _DELTAS[section.kind]
    return (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
        b'{"type":"%b","%b":%b}}\n\n'
        % (section.index, kind.encode(), name.encode(), json_bytes(text))
    )


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), json_bytes(data))
