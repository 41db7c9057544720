"""Writes answers of /v1/chat/completions: messages, deltas and log-probabilities.

A stream shows each piece of an answer (reasoning, content, a part of a call) as a delta of its own.
A whole message is made from the same pieces. Knows no HTTP. Made by `router.http.openai.dialects`,
one ChatResponder per call.
"""

from collections.abc import Iterable, Sequence

import msgspec

from pdserve.background.pace import Pace
from pdserve.protocol.events import TokenLogprob
from pdserve.router.http.json_pieces import Json, json_array, json_bytes
from pdserve.router.http.openai.logprobs import position_json
from pdserve.router.http.openai.requests import ChatRequest
from pdserve.router.http.openai.responder import BaseResponder
from pdserve.router.request.chunks import OutputChunk
from pdserve.router.request.generation import ChoiceResult, Generation
from pdserve.text.answers.pieces import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Piece,
    Reasoning,
    calls_of,
    reasoning_of,
)
from pdserve.text.tokenizer import Tokenizer


class ChatResponder(BaseResponder):
    def __init__(
        self,
        request: ChatRequest,
        generation: Generation,
        tokenizer: Tokenizer,
        shows_timeline: bool = False,
    ) -> None:
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        shows_prompts = bool(request.return_token_ids)
        super().__init__(request, generation, tokenizer, kind, shows_timeline, shows_prompts)
        self._request = request
        self._echoed = request.echoed()
        self._shows_reasoning = request.include_reasoning is not False
        self._names_function = isinstance(request.tool_choice, dict)
        self._begun: set[int] = set()

    @property
    def _varies_little(self) -> bool:
        return not self._request.logprobs

    @property
    def _returns_token_ids(self) -> bool:
        return bool(self._request.return_token_ids)

    def chunks(self, chunk: OutputChunk) -> Iterable[Json]:
        if chunk.index not in self._begun:
            self._begun.add(chunk.index)
            yield self._first(chunk.index)
            if self._echoed:
                yield self._delta(chunk.index, {"content": self._echoed})
        self._count(chunk)
        deltas = [delta for piece in chunk.all_pieces() if (delta := self._shown(piece))]
        is_split = bool(deltas) and "content" not in deltas[-1]
        if chunk.finish_reason and (is_split or not deltas):
            deltas.append({})  # clients may read no further than the reason
        if not deltas and (self._request.logprobs or self._request.return_token_ids):
            deltas.append({"content": ""})
        extra = self._extras(chunk.token_ids, chunk.logprobs)
        for number, delta in enumerate(deltas):
            is_last = number == len(deltas) - 1
            ended = (self._reason(chunk.finish_reason), chunk.stop_reason) if is_last else None
            yield self._delta(chunk.index, delta, extra if number == 0 else None, ended)

    def _delta(
        self,
        index: int,
        delta: Json,
        extra: Json | None = None,
        ended: tuple[str | None, int | str | None] | None = None,
    ) -> Json:
        """Makes an event with one delta.

        `extra` covers all tokens of a chunk. The chunk's first delta gets `extra`, and its last one
        gets `ended`.
        """
        reason, stop_reason = ended or (None, None)
        extra = self._extras((), ()) if extra is None else extra
        end: Json = {"finish_reason": reason, "stop_reason": stop_reason}
        return self._event({"index": index, "delta": delta} | extra | end)

    def _shown(self, piece: Piece) -> Json:
        """Returns the delta of a piece; empty if it shows nothing."""
        match piece:
            case Content():
                return {"content": piece.text}
            case Reasoning():
                return _both_names(piece.text) if self._shows_reasoning else {}
            case CallBegin():
                function = {"name": piece.name, "arguments": ""}
                call = {"index": piece.index, "id": piece.id, "type": "function"}
                return {"tool_calls": [call | {"function": function}]}
            case CallArguments():
                call = {"index": piece.index, "function": {"arguments": piece.text}}
                return {"tool_calls": [call]}
            case CallEnd():
                return {}

    def _reason(self, reason: str | None) -> str | None:
        """Returns OpenAI's reason: a call that the request demanded by name ends with "stop"."""
        return "stop" if reason == "tool_calls" and self._names_function else reason

    def _message(self, result: ChoiceResult) -> Json:
        """Joins the pieces to a whole message."""
        calls = calls_of(result.pieces)
        reasoning = reasoning_of(result.pieces) if self._shows_reasoning else ""
        content = self._echoed + result.text
        message: Json = {"role": "assistant", "content": content}
        if not content and (calls or reasoning):
            message["content"] = None
        if reasoning:
            message |= _both_names(reasoning)
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        return message

    async def _whole_choice(self, result: ChoiceResult, pace: Pace) -> list[bytes]:
        extras: Json = {"logprobs": None}
        if self._request.logprobs:
            positions = map(self._position, result.logprobs)
            extras["logprobs"] = {"content": msgspec.Raw(await json_array(positions, pace))}
        choice = {"index": result.index, "message": self._message(result)}
        choice |= extras
        choice["token_ids"] = result.token_ids if self._request.return_token_ids else None
        reason = self._reason(result.finish_reason)
        return [json_bytes(choice | {"finish_reason": reason, "stop_reason": result.stop_reason})]

    async def _behind_choices(self, pace: Pace) -> list[bytes]:
        pieces = [json_bytes({"usage": self.usage()})[1:-1]]
        asks = self._request.prompt_logprobs is not None
        scored = await self._prompt_logprobs(0, pace) if asks else [b"null"]
        pieces += [b',"prompt_logprobs":', *scored]
        ids = self._prompt_ids(0) if self._request.return_token_ids else None
        extra: Json = {"prompt_token_ids": ids}
        ending = json_bytes(extra | await self._timeline(pace))
        return [*pieces, b",", ending[1:]]

    def _first(self, index: int) -> Json:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        event = self._event(choice)
        if self._request.return_token_ids:
            event["prompt_token_ids"] = self._prompt_ids(0)
        return event

    def _extras(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Json:
        extra: Json = {"logprobs": None}
        if self._request.logprobs:
            extra["logprobs"] = {"content": [self._position(position) for position in logprobs]}
        if self._request.return_token_ids:
            extra["token_ids"] = list(token_ids)
        return extra

    def _position(self, position: TokenLogprob) -> Json:
        num_top = self._request.top_logprobs or 0
        return position_json(self._tokenizer, position, num_top, self._names_ids)


def _both_names(reasoning: str) -> Json:
    """Shows reasoning by vLLM's name of today, and by the older one of DeepSeek's API."""
    return {"reasoning": reasoning, "reasoning_content": reasoning}
