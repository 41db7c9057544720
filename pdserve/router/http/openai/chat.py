"""Answers of /v1/chat/completions: messages, deltas and log-probabilities in this endpoint's form.

Knows no HTTP. Made by `router.http.app`, one ChatResponder per call.
"""

from collections.abc import Iterable, Sequence

import msgspec

from pdserve.background.pace import Pace
from pdserve.protocol.events import TokenLogprob
from pdserve.router.http.json_pieces import Json, finite, json_array, json_bytes
from pdserve.router.http.openai.requests import ChatRequest
from pdserve.router.http.openai.responder import BaseResponder
from pdserve.router.request.chunks import OutputChunk
from pdserve.router.request.generation import ChoiceResult, Generation
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
        usage = request.include_usage
        shows_prompts = bool(request.return_token_ids)
        super().__init__(
            generation, tokenizer, request.model, kind, usage, shows_timeline, shows_prompts
        )
        self._request = request
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
        extra = self._extras(chunk.token_ids, chunk.logprobs)
        if (
            chunk.text
            or chunk.finish_reason
            or self._request.logprobs
            or self._request.return_token_ids
        ):
            delta = {"content": chunk.text} if chunk.text or not chunk.finish_reason else {}
            ended = {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}
            yield self._event({"index": chunk.index, "delta": delta} | extra | ended)

    async def _whole_choice(self, result: ChoiceResult, pace: Pace) -> list[bytes]:
        extras: Json = {"logprobs": None}
        if self._request.logprobs:
            positions = map(self._position, result.logprobs)
            extras["logprobs"] = {"content": msgspec.Raw(await json_array(positions, pace))}
        choice = {"index": result.index, "message": {"role": "assistant", "content": result.text}}
        choice |= extras | (
            {"token_ids": result.token_ids} if self._request.return_token_ids else {}
        )
        ended = {"finish_reason": result.finish_reason, "stop_reason": result.stop_reason}
        return [json_bytes(choice | ended)]

    async def _behind_choices(self, pace: Pace) -> list[bytes]:
        pieces = [json_bytes({"usage": self.usage()})[1:-1]]
        if self._request.prompt_logprobs is not None:
            pieces += [b',"prompt_logprobs":', *await self._prompt_logprobs(0, pace)]
        extra = {"prompt_token_ids": self._prompt_ids(0)} if self._request.return_token_ids else {}
        ending = json_bytes(extra | await self._timeline(pace))
        return [*pieces, b"," if len(ending) > 2 else b"", ending[1:]]

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
        top = [
            self._entry(token, logprob)
            for token, logprob in position.top[: self._request.top_logprobs or 0]
        ]
        return self._entry(position.token_id, position.logprob) | {"top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": finite(logprob),
            "bytes": list(data),
        }
